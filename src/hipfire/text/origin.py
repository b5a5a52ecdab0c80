"""Strings that remember which of their characters came from the caller rather than from the template.

`CallerText` behaves exactly as the `str` that it is; slicing, joining, splitting, stripping and replacing
keep the record, so that after rendering each character's origin is known. A plain `str` counts as the
template's own. This file knows nothing about templates or tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, SupportsIndex

_MANY: Final = 10_000
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered chat: the exact text for people, and where the caller's own words are in it.

    `caller_spans` are sorted, disjoint [start, end) character ranges of `text`; a control token that touches
    one of them was typed by the caller and is ordinary text.
    """

    text: str
    caller_spans: Spans = ()


class CallerText(str):
    """A string with the [start, end) ranges that came from the caller; all of it unless told otherwise."""

    __slots__ = ("_spans",)
    _spans: Spans

    def __new__(cls, value: object = "", spans: Spans | None = None) -> CallerText:
        """Return `value` as text."""
        text = super().__new__(cls, value)
        text._spans = spans if spans is not None else ((0, len(text)),) if len(text) else ()
        return text

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return join_text((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join_text((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            letter = super().__getitem__(key)
            return CallerText(letter) if self._touches(key) else letter
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, max(start, stop))
        return join_text([self[index] for index in range(start, stop, step)])

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def strip(self, chars: str | None = None, /) -> str:
        """As `str.strip`."""
        left = len(self) - len(super().lstrip(chars))
        return self._cut(left, max(left, len(super().rstrip(chars))))

    def lstrip(self, chars: str | None = None, /) -> str:
        """As `str.lstrip`."""
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        """As `str.rstrip`."""
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        """As `str.removeprefix`."""
        return self._cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> str:
        """As `str.removesuffix`."""
        return self._cut(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As `str.split`."""
        return self._locate(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As `str.rsplit`."""
        return self._locate(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As `str.splitlines`."""
        return self._locate(super().splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """As `str.partition`."""
        return self._three(super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """As `str.rpartition`."""
        return self._three(super().rpartition(sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As `str.replace`."""
        return replace_text(self, old, new, count)

    def _touches(self, key: SupportsIndex) -> bool:
        index = key.__index__()
        index = index + len(self) if index < 0 else index
        nearest = bisect_right(self._spans, index, key=itemgetter(1))
        return nearest < len(self._spans) and self._spans[nearest][0] <= index

    def _cut(self, start: int, stop: int) -> str:
        """Return characters [start, stop) with their origins; a plain `str` when none is the caller's."""
        text = str.__getitem__(self, slice(start, stop))
        if not text:
            return text
        stop = start + len(text)
        spans: list[tuple[int, int]] = []
        for index in range(bisect_right(self._spans, start, key=itemgetter(1)), len(self._spans)):
            first, last = self._spans[index]
            if first >= stop:
                break
            spans.append((max(first, start) - start, min(last, stop) - start))
        return CallerText(text, tuple(spans)) if spans else text

    def _locate(self, pieces: list[str], separator: str | None = None) -> list[str]:
        """Return `pieces`, which follow one another in this string, cut out of it again.

        Without a separator they are divided by whitespace that no piece begins with.
        """
        found = []
        position = 0
        for piece in pieces:
            start = position if separator else self.find(piece, position)
            found.append(self._cut(start, start + len(piece)))
            position = start + len(piece) + len(separator or "")
        return found

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        head, middle, _ = parts
        first, second = len(head), len(head) + len(middle)
        return self._cut(0, first), self._cut(first, second), self._cut(second, len(self))


def spans_of(text: str) -> Spans:
    """Return the caller's ranges in `text`, sorted and disjoint."""
    return text._spans if isinstance(text, CallerText) else ()


def join_text(parts: Iterable[str], separator: str = "") -> str:
    """Return the parts joined, with the origin of every character kept."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    position = 0
    for index, part in enumerate(parts):
        for text in (separator, part) if index and separator else (part,):
            for first, last in spans_of(text):
                if spans and spans[-1][1] == position + first:
                    spans[-1] = (spans[-1][0], position + last)
                else:
                    spans.append((position + first, position + last))
            pieces.append(text)
            position += len(text)
    joined = "".join(pieces)
    return CallerText(joined, tuple(spans)) if spans else joined


def repeat_text(text: str, count: int) -> str:
    """Return `text * count`, origins kept; with very many repeats a mixture counts as the caller's."""
    repeated = str.__mul__(text, count)
    spans = spans_of(text)
    if not spans:
        return repeated
    mixed = spans != ((0, len(text)),)
    return join_text([text] * count) if mixed and count <= _MANY else CallerText(repeated)


def replace_text(text: str, old: str, new: str, count: SupportsIndex = -1) -> str:
    """Return `str.replace` of any mixture of plain and caller's strings, origins kept.

    A result with very many replacements counts as the caller's as a whole.
    """
    if not (spans_of(text) or spans_of(new)):
        return str.replace(text, old, new, count)
    if str.count(text, old) > _MANY:
        return CallerText(str.replace(text, old, new, count))
    if old:
        return join_text(text.split(old, count), new)
    limit = count.__index__()
    gaps = len(text) + 1 if limit < 0 else min(limit, len(text) + 1)
    parts: list[str] = []
    for index in range(len(text) + 1):
        parts.extend([new] if index < gaps else [])
        parts.append(text[index : index + 1])
    return join_text(parts)


def carries_caller_text(value: Any) -> bool:
    """Say whether a string made from `value` could hold the caller's words; of unknown kinds say yes."""
    if isinstance(value, CallerText):
        return True
    if value is None or isinstance(value, str | int | float):
        return False
    if isinstance(value, Mapping):
        return any(carries_caller_text(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(carries_caller_text(item) for item in value)
    return True


def mark(value: Any) -> Any:
    """Return a deep copy of JSON-like `value` in which every string, keys too, is marked as the caller's."""
    if isinstance(value, str):
        return CallerText(value)
    if isinstance(value, Mapping):
        return {mark(key): mark(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark(item) for item in value]
    return value
