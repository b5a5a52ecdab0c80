"""Stop strings in a stream of text pieces, across any borders between the pieces. No torch.

This file does not know tokens, end tokens or channels: whoever routes reasoning away from the answer feeds
only the answer to a matcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hipfire.base.errors import ValidationError


class StopResult(NamedTuple):
    """Text that is now safe to show, and the stop string that ended the stream (None while it goes on)."""

    text: str
    matched: str | None


class StopMatcher:
    """Finds the earliest stop string in a stream and withholds it.

    The occurrence that starts first wins; of several that start at the same place the shortest does,
    because it is complete first and the others could not change the text. The result does not depend on how
    the text is cut into pieces: the texts of all results, joined, are the whole text up to the match. Only
    the longest suffix that may still become a match is held back, so a stop string delays no text that does
    not look like its beginning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings; raises `ValidationError` for an empty one or a bare string."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValidationError(
                "stop must be a list of strings of at least one character",
                hint="put a single stop string into a list and leave empty ones out",
            )
        # a stop string that begins with another one can never win
        self._stops = tuple(
            stop
            for stop in dict.fromkeys(stops)
            if not any(stop != other and stop.startswith(other) for other in stops)
        )
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """Return the stop string that ended the stream, or None."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Take the next piece; after a match, pieces are dropped and the match is repeated."""
        if self._matched is not None:
            return StopResult("", self._matched)
        text = self._held + text
        start, stop = self._first_match(text)
        hold = self._first_open_prefix(text, start)
        # an unfinished beginning before a match may become the earlier match, so the match has to wait for it
        if stop is not None and hold == start:
            return self._end(text[:start], stop)
        self._held = text[hold:]
        return StopResult(text[:hold], None)

    def flush(self) -> StopResult:
        """End the stream: what was held back can no longer grow, so it is a match or ordinary text."""
        if self._matched is not None:
            return StopResult("", self._matched)
        text, self._held = self._held, ""
        start, stop = self._first_match(text)
        return StopResult(text, None) if stop is None else self._end(text[:start], stop)

    def _end(self, text: str, stop: str) -> StopResult:
        self._held = ""
        self._matched = stop
        return StopResult(text, stop)

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Return start and stop string of the earliest complete match, or (len(text), None)."""
        best, winner = len(text), None
        for stop in self._stops:
            found = text.find(stop, 0, best + len(stop) - 1)
            if found >= 0:
                best, winner = found, stop
        return best, winner

    def _first_open_prefix(self, text: str, end: int) -> int:
        """Return the first place before `end` whose rest of the text begins a stop string, or `end`."""
        first = end
        for stop in self._stops:
            place = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while place >= 0 and not stop.startswith(text[place:]):
                place = text.find(stop[0], place + 1, first)
            if place >= 0:
                first = place
        return first
