"""Standard library only: errors, plain types, configuration keys, paths."""
