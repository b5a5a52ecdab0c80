"""Reasoning and answer of replies with think markers, for every way of cutting them into parts."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from reply_kit import assert_split_invariant, channels, cut_texts, run

from hipfire.text.markup import Piece
from hipfire.text.think_splitter import TURN_ENDS, ThinkSplitter, strip_reasoning

# reply, does the prompt end inside a thought, reasoning, answer
SAMPLES = {
    "usual": ("<think>\nTwo and two.\n</think>\n\nFour.", False, "Two and two.\n", "Four."),
    "opened by the prompt": ("Two and two.\n</think>\n\nFour.", True, "Two and two.\n", "Four."),
    "empty thought": ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
    "white space in front": ("\n <think>Hm.</think>Four.", False, "Hm.", "Four."),
    "no thought": ("  Four < five.\n", False, "", "  Four < five.\n"),
    "never closed": ("<think>and on", False, "and on", ""),
    "never closed, opened by the prompt": ("and on", True, "and on", ""),
    "orphan closer": ("\n</think>\n\nFour.", False, "", "Four."),
    "nested opener": ("<think>a <think>b</think>c</think>d", False, "a b", "cd"),
    "opener repeated inside": ("a<think>b</think>c", True, "ab", "c"),
    "second thought": ("<think>a</think>\nb <think>\nc</think>d", False, "ac", "b d"),
    "end of turn spelled out": ("Four.<|im_end|>", False, "", "Four."),
    "every end of turn": ("a" + "b".join(TURN_ENDS), False, "", "abbb"),
    "mentions": ("Write `<think>` and `</think>`.", False, "", "Write `<think>` and `</think>`."),
    "unfinished marker": ("Four </thin", False, "", "Four </thin"),
    "unfinished opener": ("<thi", False, "", "<thi"),
    "nearly markers": ("a <thinking> b </ think> c", False, "", "a <thinking> b </ think> c"),
    "less-than at the end": ("is 3 <", False, "", "is 3 <"),
    "only white space": (" \n ", False, "", " \n "),
    "nothing": ("", False, "", ""),
    "newlines only behind the closer": ("<think>a</think>\n\n\n  b\n\nc", False, "a", "  b\n\nc"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_channels_of(name: str) -> None:
    text, inside, reasoning, answer = SAMPLES[name]
    assert channels(run(ThinkSplitter(in_thinking=inside), [text])) == (reasoning, answer)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("keep", [False, True])
def test_every_split_of(name: str, keep: bool) -> None:
    text, inside, *_ = SAMPLES[name]
    assert_split_invariant(lambda: ThinkSplitter(in_thinking=inside, keep_markers=keep), text)


WORDS = [
    "<think>",
    "</think>",
    "<|im_end|>",
    "<|eot_id|>",
    "\n",
    " ",
    "`",
    "<",
    "</th",
    "ink>",
    "a",
    "é🙂",
    "\r\n",
]


@given(cut_texts(WORDS))
@example(("</think>\n  <think>a", ["</think>", "\n", "  <think>a"]))
def test_any_split_of_any_text_gives_the_same_pieces(cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    for inside in (False, True):
        for closed in (False, True):
            whole = run(ThinkSplitter(in_thinking=inside, closed=closed), [text])
            assert run(ThinkSplitter(in_thinking=inside, closed=closed), parts) == whole


@given(cut_texts([word for word in WORDS if word != "`"]))
def test_only_markers_and_the_white_space_beside_them_are_taken_out(cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    shown = "".join(piece.text for piece in run(ThinkSplitter(), parts))
    markers = "|".join(map(re.escape, ("<think>", "</think>", *TURN_ENDS)))
    assert "".join(shown.split()) == "".join(re.sub(markers, "", text).split())


@given(cut_texts(WORDS))
def test_with_markers_kept_the_pieces_are_the_whole_text(cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    for inside in (False, True):
        pieces = run(ThinkSplitter(in_thinking=inside, keep_markers=True), parts)
        assert "".join(piece.text for piece in pieces) == text


def test_kept_markers_are_part_of_the_reasoning() -> None:
    pieces = run(ThinkSplitter(keep_markers=True), ["<think>\na</think>\nb"])
    assert pieces == [Piece("reasoning", "<think>\na</think>"), Piece("answer", "\nb")]


def test_with_thinking_off_nothing_is_reasoning() -> None:
    splitter = ThinkSplitter(closed=True)
    assert channels(run(splitter, ["<think>\nHm.\n</think>\n\nFour."])) == ("", "Hm.\nFour.")


def test_text_that_is_no_marker_is_shown_at_once() -> None:
    splitter = ThinkSplitter()
    assert splitter.push("Four") == [Piece("answer", "Four")]
    assert splitter.push(" is") == [Piece("answer", " is")]
    assert splitter.push(" </") == [Piece("answer", " ")]
    assert splitter.push("b>") == [Piece("answer", "</b>")]


def test_a_span_opens_and_closes_where_its_markers_are_complete() -> None:
    splitter = ThinkSplitter()
    assert not splitter.in_reasoning
    assert splitter.push("<think") == []
    assert not splitter.in_reasoning
    assert splitter.push(">") == []
    assert splitter.in_reasoning
    assert splitter.push("a</think>") == [Piece("reasoning", "a")]
    assert not splitter.in_reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
        ("Hm.\n</think>\n\nFour.", "Hm.", "Four."),
        ("<think>cut off", "cut off", ""),
        (" Four.\n", "", " Four.\n"),
        ("Use `<think>` or `</think>`.", "", "Use `<think>` or `</think>`."),
        ("`</think>` is <think>a</think>b", "a", "`</think>` is b"),
        ("<think>a</think>b <|im_end|>", "a", "b <|im_end|>"),
        ("<think></think>", "", ""),
        ("", "", ""),
    ],
)
def test_history_with_inline_thinking(text: str, reasoning: str, answer: str) -> None:
    assert strip_reasoning(text) == (reasoning, answer)
