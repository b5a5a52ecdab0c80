"""Loading settings for a command, with one line on stderr for each entry that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cyclopts import Parameter

from hipfire.base import log
from hipfire.base.config import Config, load_config
from hipfire.base.config_keys import AUTO, Value
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


def use_threads(threads: Value) -> None:
    """Let torch compute with so many threads; None leaves the number to it."""
    if isinstance(threads, int):
        # torch takes a second or two to import
        import torch  # noqa: PLC0415

        torch.set_num_threads(threads)


def _whole(_: Any, tokens: Sequence[Any]) -> int | None:
    """Read an integer, or `auto`; the parser's own rule would round 1.5."""
    word = tokens[0].value
    if word.lower() == AUTO:
        return None
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number") from None


# for options that take a whole number
WHOLE = Parameter(converter=_whole)
