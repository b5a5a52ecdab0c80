"""The pieces that a reply's text is cut into, and the search for the markers that cut it.

This file knows no marker by name and no chat format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

ReplyChannel = Literal["answer", "reasoning"]


class Piece(NamedTuple):
    """A non-empty stretch of a reply's text and the channel that it belongs to."""

    channel: ReplyChannel
    text: str


class Found(NamedTuple):
    """Where ordinary text ends: at a marker, or (marker None) at text that may still become one."""

    start: int
    marker: str | None


class MarkerFinder:
    """Finds markers in a text that arrives in parts; of several at one place the longest counts."""

    def __init__(self, markers: Sequence[str]) -> None:
        """Take the markers, each at least one character long."""
        longest_first = sorted(dict.fromkeys(markers), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._markers = longest_first
        self._reach = len(longest_first[0]) - 1 if longest_first else 0

    def find(self, text: str, start: int = 0, *, final: bool = False) -> Found:
        """Return the first marker from `start` on, or the place from which on text must be held back.

        Only the longest suffix that is a proper beginning of a marker is held back; a complete marker that a
        longer one begins with is held back too. Nothing is when `final` says that no more text will come.
        """
        match = self._pattern.search(text, start)
        place = len(text) if match is None else match.start()
        if not final:
            for hold in range(max(start, len(text) - self._reach), min(place + 1, len(text))):
                if self.may_grow(text[hold:]):
                    return Found(hold, None)
        return Found(place, None if match is None else match.group())

    def may_grow(self, text: str) -> bool:
        """Say whether `text` is a proper beginning of a marker."""
        return any(len(text) < len(marker) and marker.startswith(text) for marker in self._markers)


def cut(
    finder: MarkerFinder,
    text: str,
    take_text: Callable[[str], None],
    take_marker: Callable[[str], None],
    *,
    final: bool,
) -> str:
    """Hand text and markers to the two functions in their order; return what must be held back."""
    at = 0
    while True:
        found = finder.find(text, at, final=final)
        take_text(text[at : found.start])
        if found.marker is None:
            return text[found.start :]
        take_marker(found.marker)
        at = found.start + len(found.marker)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with neighbours of one channel made one, and without empty ones."""
    made: list[Piece] = []
    for piece in pieces:
        if made and made[-1].channel == piece.channel:
            made[-1] = Piece(piece.channel, made[-1].text + piece.text)
        elif piece.text:
            made.append(piece)
    return made
