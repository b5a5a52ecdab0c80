"""Stop strings against a search of the whole text, for every way of cutting the text into pieces."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hipfire.base.errors import ValidationError
from hipfire.text.stops import StopMatcher, StopResult


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return text before the earliest stop (the shortest of several at one place) and that stop."""
    for start in range(len(text)):
        here = [stop for stop in stops if text[start:].startswith(stop)]
        if here:
            return text[:start], min(here, key=len)
    return text, None


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    results = [matcher.push(piece) for piece in pieces] + [matcher.flush()]
    assert results[-1].matched == matcher.matched
    return "".join(result.text for result in results), matcher.matched


def may_still_match(text: str, stops: list[str]) -> bool:
    return any(len(text) < len(stop) and stop.startswith(text) for stop in stops)


stop_lists = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)
pieces_lists = st.lists(st.text("ab<", max_size=6), max_size=8)


@given(pieces_lists, stop_lists)
@example(["a", "b", "c"], ["abcd", "bc"])
@example(["abc", "d"], ["abcd", "bc"])
@example(["aab"], ["ab"])
@example(["<<", "<a"], ["<<a"])
def test_any_split_gives_the_result_of_a_whole_text_search(pieces: list[str], stops: list[str]) -> None:
    assert stream(pieces, stops) == search("".join(pieces), stops)


@given(pieces_lists, stop_lists)
def test_only_the_longest_suffix_that_may_still_match_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        result = matcher.push(piece)
        shown += result.text
        before, stop = search(seen, stops)
        # a place in front of the match, from which an earlier match may still come
        hold = next((i for i in range(len(before)) if may_still_match(seen[i:], stops)), len(before))
        assert shown == seen[:hold]
        assert result.matched == (stop if hold == len(before) else None)
        if result.matched is not None:
            return


@pytest.mark.parametrize("stop", ["END", "\n\nUser:", "é—🙂"])
def test_stop_split_at_every_place_ends_the_text_right_before_it(stop: str) -> None:
    text = f"some answer{stop}never shown"
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert stream(pieces, [stop]) == ("some answer", stop)


def test_a_long_stop_text_does_not_delay_ordinary_text() -> None:
    matcher = StopMatcher(["=" * 38 + "##"])
    for piece in ("Paris", " is", " the", " capital", ".", "\n"):
        assert matcher.push(piece) == StopResult(piece, None)
    assert matcher.push(" a ==") == StopResult(" a ", None)
    assert matcher.push(" b") == StopResult("== b", None)


def test_a_false_start_comes_out_as_soon_as_it_is_one() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("x </ans") == StopResult("x ", None)
    assert matcher.push("wering") == StopResult("</answering", None)


def test_text_before_the_stop_in_the_same_piece_is_emitted_with_the_match() -> None:
    assert StopMatcher(["STOP"]).push("all of this STOP not this") == StopResult("all of this ", "STOP")


def test_the_earliest_start_wins_over_the_earliest_end() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == StopResult("x", None)
    assert matcher.push("d") == StopResult("", "abcd")


def test_a_match_that_waited_for_an_earlier_one_counts_at_the_end_of_the_stream() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == StopResult("x", None)
    assert matcher.flush() == StopResult("a", "bc")
    assert matcher.matched == "bc"


def test_of_two_stops_at_one_place_the_shorter_ends_the_stream_at_once() -> None:
    for stops in (["ab", "abc"], ["abc", "ab"]):
        assert StopMatcher(stops).push("xab") == StopResult("x", "ab")


def test_flush_releases_an_unfinished_stop_as_text_and_then_nothing() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert matcher.push("a <|en") == StopResult("a ", None)
    assert matcher.flush() == StopResult("<|en", None)
    assert matcher.flush() == StopResult("", None)


def test_nothing_comes_out_after_the_match() -> None:
    matcher = StopMatcher(["."])
    matcher.push("one.")
    assert matcher.push("two. three") == StopResult("", ".")
    assert matcher.flush() == StopResult("", ".")


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == StopResult("anything", None)
    assert matcher.flush() == StopResult("", None)


@pytest.mark.parametrize("stops", ["END", [""], ["ok", ""], [1], [None]])
def test_bad_stops_are_refused(stops: Any) -> None:
    with pytest.raises(ValidationError, match="at least one character"):
        StopMatcher(stops)


def test_stops_load_without_torch() -> None:
    code = "import sys, hipfire.text.stops; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
