"""Feeding a reply to a parser in every way that a stream may cut it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from hypothesis import strategies as st

from hipfire.text.markup import Piece, joined


class Stream(Protocol):
    """What splitters and the parser have in common."""

    def push(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def run(stream: Stream, parts: Iterable[str]) -> list[Piece]:
    """Return all pieces, neighbours of one channel joined."""
    return joined([piece for part in parts for piece in stream.push(part)] + stream.finish())


def channels(pieces: Iterable[Piece]) -> tuple[str, str]:
    """Return (reasoning, answer)."""
    both: dict[str, str] = {"reasoning": "", "answer": ""}
    for piece in pieces:
        both[piece.channel] += piece.text
    return both["reasoning"], both["answer"]


def every_split(text: str) -> Iterator[list[str]]:
    """Yield the text in two parts at each place, in three at each pair of places, and letter by letter."""
    yield list(text)
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:first], text[first:second], text[second:]]


def two_parts(text: str) -> Iterator[list[str]]:
    """Yield the text in two parts at each place, and letter by letter."""
    yield list(text)
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]


def assert_split_invariant(
    make: Callable[[], Stream], text: str, splits: Callable[[str], Iterable[list[str]]] = every_split
) -> None:
    """Fail if any way of cutting the text changes its pieces."""
    whole = run(make(), [text])
    for parts in splits(text):
        assert run(make(), parts) == whole, parts


@st.composite
def cut_texts(draw: st.DrawFn, words: list[str]) -> tuple[str, list[str]]:
    """Draw a text made of the words, and a way of cutting it."""
    text = "".join(draw(st.lists(st.sampled_from(words), max_size=14)))
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *places, len(text)]
    return text, [text[begin:end] for begin, end in itertools.pairwise(edges)]
