"""Making text from files fit for a terminal: what could move the cursor or hide text is shown escaped.

This file does not know where text comes from. A model's reply is payload and does not pass here.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with each character that is not printable, line breaks included, as an escape.

    Letters, signs and emoji of any script are printable; control characters, marks that turn the direction of
    writing, and half surrogates are not.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Return `printable(text)` with each run of white space as one space."""
    return printable(" ".join(text.split()))
