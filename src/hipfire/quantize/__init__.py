"""Turning a checkpoint into an HFQM container."""
