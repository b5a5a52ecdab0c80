"""Tidying of prompt text: one line ending, ordinary spaces, no trailing spaces, no tall gaps.

A pure function of the text; whether it is applied is the caller's setting. It knows no tokens and no
templates.
"""

from __future__ import annotations

import re
from typing import Final

_TALL_GAP: Final = re.compile(r"\n{3,}")


def normalize_prompt(text: str) -> str:
    """Return `text` with LF line ends, plain spaces, no trailing spaces, and 2 newlines in a row at most.

    Applying it twice changes nothing, and the work is linear in the length. Carriage returns inside a line,
    tabs and leading spaces stay as they are.
    """
    *ended, last = text.replace("\u00a0", " ").split("\n")
    lines = [line.rstrip(" \r") for line in ended]
    return _TALL_GAP.sub("\n\n", "\n".join([*lines, last.rstrip(" ")]))
