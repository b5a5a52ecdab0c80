"""The hipfire command."""
