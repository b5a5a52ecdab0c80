"""One file per operation: its reference in torch and the kernels beside it; launch.py is the one door."""
