"""Finding markers in a text that arrives in parts."""

from __future__ import annotations

import pytest

from hipfire.text.markup import Found, MarkerFinder, Piece, joined

FINDER = MarkerFinder(["<a>", "<a>b", "<c|"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain", Found(5, None)),
        ("x<a>y", Found(1, "<a>")),
        ("x<a>by", Found(1, "<a>b")),
        ("x<c|<a>", Found(1, "<c|")),
        ("x<a>", Found(1, None)),
        ("x<", Found(1, None)),
        ("x<<c", Found(2, None)),
        ("x<b", Found(3, None)),
        ("<a><", Found(0, "<a>")),
        ("", Found(0, None)),
    ],
)
def test_only_what_may_still_become_a_marker_is_held(text: str, found: Found) -> None:
    assert FINDER.find(text) == found


@pytest.mark.parametrize(
    ("text", "found"), [("x<a>", Found(1, "<a>")), ("x<", Found(2, None)), ("<a", Found(2, None))]
)
def test_at_the_end_nothing_is_held(text: str, found: Found) -> None:
    assert FINDER.find(text, final=True) == found


def test_the_search_begins_where_it_is_told() -> None:
    assert FINDER.find("<c|<c|<", 3) == Found(3, "<c|")
    assert FINDER.find("<c|<c|<", 6) == Found(6, None)


def test_without_markers_all_text_passes() -> None:
    assert MarkerFinder([]).find("a<b") == Found(3, None)


def test_a_marker_with_text_behind_it_is_no_beginning_of_one() -> None:
    assert FINDER.may_grow("<a")
    assert FINDER.may_grow("<a>")
    assert not FINDER.may_grow("<a>x")
    assert not FINDER.may_grow("<c|")


def test_neighbours_of_one_channel_become_one_piece_and_empty_ones_none() -> None:
    pieces = [Piece("answer", ""), Piece("answer", "a"), Piece("answer", "b"), Piece("reasoning", "c")]
    assert joined(pieces) == [Piece("answer", "ab"), Piece("reasoning", "c")]
    assert joined([Piece("reasoning", "")]) == []
