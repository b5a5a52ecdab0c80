"""Tokenizers, incremental decoding and chat templates."""
