"""The parts of `cpu_peers.py`: two workers, the rounds between them, and what is made of their times."""
