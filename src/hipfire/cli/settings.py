"""Loading settings for a command, with one line on stderr for each entry that cannot be used."""

from __future__ import annotations

from hipfire.base import log
from hipfire.base.config import Config, load_config
from hipfire.checkpoint.library import Library, open_library


def load_settings() -> Config:
    """Return the user's settings; warn about bad entries in the files."""
    config = load_config()
    for line in config.warnings:
        log.logger().warning(line)
    return config


def load_library() -> Library:
    """Return the user's library; warn about bad entries in the settings files."""
    return open_library(load_settings())
