"""One file per architecture, found by its MODEL_TYPES literal."""
