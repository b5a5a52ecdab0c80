"""Devices: what they are, their memory, and graphs of launches."""
