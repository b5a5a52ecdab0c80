"""Gemma's thought channel: every fault that earlier routers had, and every way of cutting a reply."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from reply_kit import assert_split_invariant, channels, cut_texts, run

from hipfire.text.gemma_router import MARKERS, GemmaRouter
from hipfire.text.markup import Piece

# reply, thinking off, reasoning, answer
SAMPLES = {
    "thought, then answer": ("<|channel>thought\nHm.\n<channel|>Four.", False, "Hm.\n", "Four."),
    "newline behind the channel": ("<|channel>thought\nHm.<channel|>\nFour.", False, "Hm.", "Four."),
    "empty thought": ("<|channel>thought\n<channel|>Four.", False, "", "Four."),
    "header without newline": ("<|channel>thoughtHm.<channel|>Four.", False, "Hm.", "Four."),
    "orphan channel": ("<|channel>\nFour.", False, "", "Four."),
    "channel of another name": ("<|channel>final\nFour.", False, "", "final\nFour."),
    "direct answer": ("Four.", False, "", "Four."),
    "direct answer that looks like a header": (
        "<|channel is what I type.",
        False,
        "",
        "<|channel is what I type.",
    ),
    "white space, then thought": ("\n<|channel>thought\nHm.<channel|>Four.", False, "Hm.", "Four."),
    "white space, then answer": ("\n Four.", False, "", "\n Four."),
    "never closed": ("<|channel>thought\nand on", False, "and on", ""),
    "thought again": ("a<|channel>thought\nb<channel|>c", False, "", "abc"),
    "thinking off": ("Four.", True, "", "Four."),
    "thinking off, thought all the same": ("<|channel>thought\nHm.<channel|>\nFour.", True, "", "Hm.Four."),
    "stray markers": ("a<turn|>b<|turn>c<|channel|>d<channel|>e", False, "", "abcde"),
    "markers inside the thought": ("<|channel>thought\na<|channel>b<turn|>c<channel|>d", False, "abc", "d"),
    "marker and payload": ("<|channel>thought\n<channel|>thoughtful", False, "", "thoughtful"),
    "lone unfinished header": ("<|chan", False, "", ""),
    "unfinished marker behind an answer": ("Four.<|chan", False, "", "Four."),
    "unfinished marker in a thought": ("<|channel>thought\nHm.<|tur", False, "Hm.", ""),
    "complete header at the end": ("<|channel>thought", False, "", ""),
    "complete orphan at the end": ("<|channel>", False, "", ""),
    "half a header at the end": ("<|channel>thou", False, "", ""),
    "less-than at the end": ("is 3 <", False, "", "is 3 <"),
    "pipe at the end": ("f <|", False, "", "f <|"),
    "tag-like end": ("a <chann", False, "", "a <chann"),
    "one newline only": ("<|channel>thought\n\nHm.<channel|>\n\nFour.", False, "\nHm.", "\nFour."),
    "only white space": (" \n", False, "", " \n"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_channels_of(name: str) -> None:
    text, closed, reasoning, answer = SAMPLES[name]
    assert channels(run(GemmaRouter(closed=closed), [text])) == (reasoning, answer)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("keep", [False, True])
def test_every_split_of(name: str, keep: bool) -> None:
    text, closed, *_ = SAMPLES[name]
    assert_split_invariant(lambda: GemmaRouter(closed=closed, keep_markers=keep), text)


WORDS = [*MARKERS, "\n", " ", "<", "<|", "<|chan", "nel>", "thought", "a", "é🙂", "|>"]


@given(cut_texts(WORDS))
@example(("<|channel>thought\n", ["<|channel>", "thought", "\n"]))
@example(("a<channel|>\nb", ["a<channel|>", "\n", "b"]))
def test_any_split_of_any_text_gives_the_same_pieces(cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    for options in ({}, {"closed": True}, {"in_thinking": True}):
        assert run(GemmaRouter(**options), parts) == run(GemmaRouter(**options), [text])


@given(cut_texts(WORDS))
def test_with_markers_kept_the_pieces_are_the_whole_text(cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    pieces = run(GemmaRouter(keep_markers=True), parts)
    assert "".join(piece.text for piece in pieces) == text


@given(cut_texts(WORDS))
def test_with_thinking_off_nothing_is_reasoning(cut: tuple[str, list[str]]) -> None:
    assert channels(run(GemmaRouter(closed=True), cut[1]))[0] == ""


def test_ordinary_answer_text_is_shown_at_once_and_never_piles_up() -> None:
    router = GemmaRouter()
    assert router.push("Four") == [Piece("answer", "Four")]
    for part in (" is", " the", " answer", ".", "\n"):
        assert router.push(part) == [Piece("answer", part)]
    assert router.finish() == []


def test_ordinary_reasoning_text_is_shown_at_once() -> None:
    router = GemmaRouter()
    assert router.push("<|channel>thought") == []
    assert router.in_reasoning
    assert router.push("\n") == []
    assert router.push("Two") == [Piece("reasoning", "Two")]
    assert router.push(" and") == [Piece("reasoning", " and")]


def test_a_marker_with_text_behind_it_loses_only_the_marker() -> None:
    router = GemmaRouter(in_thinking=True)
    assert router.push("<channel|>Four.") == [Piece("answer", "Four.")]
    assert router.push("<turn|>Five.") == [Piece("answer", "Five.")]


def test_what_waits_for_a_header_comes_out_at_the_end_if_it_is_none() -> None:
    router = GemmaRouter()
    assert router.push("<") == []
    assert router.finish() == [Piece("answer", "<")]


def test_a_cap_closes_the_thought_and_later_markers_are_still_taken_out() -> None:
    router = GemmaRouter(in_thinking=True)
    assert router.push("Hm. ") == [Piece("reasoning", "Hm. ")]
    # what the engine feeds when the cap is reached
    assert router.push("<channel|>") == []
    assert not router.in_reasoning
    rest = [*router.push("Four<channel|>.<|channel>thought\nmore"), *router.finish()]
    assert channels(rest) == ("", "Four.more")


def test_kept_markers_are_part_of_the_reasoning() -> None:
    pieces = run(GemmaRouter(keep_markers=True), ["<|channel>thought\na<channel|>\nb"])
    assert pieces == [Piece("reasoning", "<|channel>thought\na<channel|>"), Piece("answer", "\nb")]
