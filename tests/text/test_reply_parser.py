"""Whole replies: channels, stop strings and tool calls together, for every way of cutting them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from reply_kit import assert_split_invariant, channels, cut_texts, run, two_parts
from tools_kit import TOOLS

from hipfire.base.errors import ValidationError
from hipfire.text.reply_format import ReplyFormat
from hipfire.text.reply_parser import Piece, ReplyParser, ToolCallText

PLAIN = ReplyFormat()
HERMES = ReplyFormat("think", "hermes")
XML = ReplyFormat("think", "qwen_xml")
GEMMA = ReplyFormat("gemma", "gemma")

JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
)
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
PARIS = ToolCallText("get_weather", {"city": "Paris"}, False)
CALL_STOP = ToolCallText("get_weather", {"city": "STOP"}, False)


@dataclass(frozen=True)
class Sample:
    """A reply, how it is parsed, and what must come out."""

    fmt: ReplyFormat
    text: str
    reasoning: str
    answer: str
    calls: tuple[ToolCallText, ...] = ()
    stop: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"tools": TOOLS})


OFF = {"tools": TOOLS, "closed": True}
INSIDE = {"tools": TOOLS, "in_thinking": True}
STOP = {"tools": TOOLS, "stops": ["STOP"]}
NOW = ToolCallText("now", {}, True)
MARKUP = "a <think>b</think> <tool_call>"
BROKEN = "So \n<tool_call>words</tool_call> on\n"
GEMMA_REPLY = f"<|channel>thought\nHm.<channel|>{GEMMA_CALL}"
XML_REPLY = f"Hm.</think>\n\nI look.\n{XML_CALL}\n{XML_CALL}\n"
SAMPLES = {
    "plain": Sample(PLAIN, MARKUP, "", MARKUP),
    "prose, then call": Sample(HERMES, f"I look.\n\n{JSON_CALL}", "", "I look.", (PARIS,)),
    "thought, then call": Sample(HERMES, f"<think>\nHm.</think>\n\n{JSON_CALL}", "Hm.", "", (PARIS,)),
    "thought, prose, calls": Sample(XML, XML_REPLY, "Hm.", "I look.", (PARIS, PARIS), None, INSIDE),
    "thinking off, call": Sample(XML, XML_CALL, "", "", (PARIS,), None, OFF),
    "bare function": Sample(XML, "<function=now></function>", "", "", (NOW,)),
    "gemma": Sample(GEMMA, GEMMA_REPLY, "Hm.", "", (PARIS,)),
    "gemma, thinking off": Sample(GEMMA, f"Well. {GEMMA_CALL}", "", "Well.", (PARIS,), None, OFF),
    "no tools": Sample(HERMES, f"I look.\n{JSON_CALL}", "", f"I look.\n{JSON_CALL}", options={}),
    "no dialect": Sample(ReplyFormat("think"), JSON_CALL, "", JSON_CALL),
    "broken call": Sample(HERMES, BROKEN, "", BROKEN),
    "call that is cut off": Sample(HERMES, JSON_CALL[:50], "", JSON_CALL[:50]),
    "prose between calls": Sample(HERMES, f"a {JSON_CALL} b {JSON_CALL} c", "", "a b  c", (PARIS, PARIS)),
    "unfinished opener": Sample(HERMES, "a \n<tool_", "", "a \n<tool_"),
    "white space at the end": Sample(HERMES, "a \n", "", "a \n"),
    "opener in a thought": Sample(HERMES, "<think>a <tool_call></think>b", "a <tool_call>", "b"),
    "stop": Sample(HERMES, "<think>a STOP</think>b STOP c", "a STOP", "b ", (), "STOP", STOP),
    "stop in a call": Sample(HERMES, JSON_CALL.replace("Paris", "STOP"), "", "", (CALL_STOP,), None, STOP),
    "stop before a call": Sample(HERMES, f"a STOP {JSON_CALL}", "", "a ", (), "STOP", STOP),
    "stop behind a call": Sample(HERMES, f"{JSON_CALL}a STOP b", "", "a ", (PARIS,), "STOP", STOP),
    "stop in a broken call": Sample(HERMES, "a <tool_call>b STOP", "", "a <tool_call>b ", (), "STOP", STOP),
    "stop over a thought": Sample(HERMES, "a ST<think>b</think>OP c", "b", "a ", (), "STOP", STOP),
    "stop that begins like a marker": Sample(
        HERMES, "a </thin b", "", "a ", (), "</thin ", {"stops": ["</thin "]}
    ),
    "half a stop at the end": Sample(GEMMA, "a ST", "", "a ST", options=STOP),
    "stop of white space": Sample(HERMES, "a\n\nb", "", "a", (), "\n\n", {"stops": ["\n\n"], "tools": TOOLS}),
    "thought after a stop": Sample(HERMES, "a STOP<think>b", "", "a ", (), "STOP", STOP),
}


def parser(name: str, **more: Any) -> ReplyParser:
    sample = SAMPLES[name]
    return ReplyParser(sample.fmt, **{"in_thinking": False, **sample.options, **more})


@pytest.mark.parametrize("name", SAMPLES)
def test_reply(name: str) -> None:
    sample = SAMPLES[name]
    made = parser(name)
    assert channels(run(made, [sample.text])) == (sample.reasoning, sample.answer)
    assert made.matched == sample.stop
    assert made.calls() == sample.calls


@pytest.mark.parametrize("name", SAMPLES)
def test_every_split(name: str) -> None:
    sample = SAMPLES[name]
    assert_split_invariant(lambda: parser(name), sample.text, two_parts)
    assert_split_invariant(lambda: parser(name, keep_markers=True), sample.text, two_parts)
    for parts in two_parts(sample.text):
        made = parser(name)
        run(made, parts)
        assert (made.matched, made.calls()) == (sample.stop, sample.calls)


WORDS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|channel>thought\n",
        "<channel|>",
        "STOP",
        "ST",
    ),
    *(JSON_CALL, XML_CALL, GEMMA_CALL, '{"name": "now"}', "<function=", "\n", " ", "<", "a", "é🙂"),
]


@pytest.mark.parametrize("fmt", [PLAIN, HERMES, XML, GEMMA], ids=["plain", "hermes", "xml", "gemma"])
@given(cut=cut_texts(WORDS))
def test_any_split_of_any_text_gives_the_same_reply(fmt: ReplyFormat, cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    results = []
    for cutting in ([text], parts):
        made = ReplyParser(fmt, in_thinking=False, stops=["STOP", "TOO"], tools=TOOLS)
        results.append((run(made, cutting), made.matched, made.calls(), made.repairs()))
    assert results[0] == results[1]


@pytest.mark.parametrize("fmt", [PLAIN, HERMES, XML, GEMMA], ids=["plain", "hermes", "xml", "gemma"])
@given(cut=cut_texts(WORDS))
def test_without_calls_and_stops_no_text_is_lost(fmt: ReplyFormat, cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    made = ReplyParser(fmt, in_thinking=False, tools=TOOLS, keep_markers=True)
    shown = "".join(piece.text for piece in run(made, parts))
    if not made.calls():
        assert sorted(shown) == sorted(text)


def test_ordinary_text_is_shown_at_once_with_long_stops_and_tools() -> None:
    made = ReplyParser(HERMES, in_thinking=False, stops=["=" * 40], tools=TOOLS)
    assert made.push("Paris") == [Piece("answer", "Paris")]
    for part in (" is", " the", " capital", "."):
        assert made.push(part) == [Piece("answer", part)]


def test_a_call_is_withheld_from_its_opener_on() -> None:
    made = ReplyParser(HERMES, in_thinking=False, tools=TOOLS)
    assert made.push("I look.\n") == [Piece("answer", "I look.")]
    assert made.push(JSON_CALL) == []
    assert made.calls() == ()
    assert made.finish() == []
    assert made.calls() == (PARIS,)


def test_repairs_are_told_one_line_each() -> None:
    made = ReplyParser(HERMES, in_thinking=False, tools=TOOLS)
    made.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": "3\\n"}')
    assert made.finish() == [
        Piece("answer", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": "3\\n"}')
    ]
    made = ReplyParser(HERMES, in_thinking=False, tools=TOOLS)
    made.push('<tool_call>{"name": "get_weather", "parameters": {"city": "Paris", "days": "3\\n"}}')
    made.finish()
    assert made.calls() == (ToolCallText("get_weather", {"city": "Paris", "days": 3}, True),)
    assert made.repairs() == (
        'get_weather: arguments taken from "parameters"',
        "get_weather: closing marker missing",
        "get_weather: argument days: string '3\\n' made integer",
    )


def test_kept_markers_stay_with_the_reasoning() -> None:
    made = ReplyParser(HERMES, in_thinking=False, keep_markers=True)
    assert channels(run(made, ["<think>a</think>b"])) == ("<think>a</think>", "b")


def test_the_reply_tells_whether_it_is_thinking() -> None:
    made = ReplyParser(GEMMA, in_thinking=True)
    assert made.in_reasoning
    made.push("Hm.<channel|>")
    assert not made.in_reasoning
    assert not ReplyParser(PLAIN, in_thinking=False).in_reasoning


def test_after_the_end_there_is_nothing() -> None:
    made = ReplyParser(HERMES, in_thinking=False)
    made.push("a <")
    assert made.finish() == [Piece("answer", "<")]
    assert made.finish() == []
    assert made.push("more") == []
    made = ReplyParser(HERMES, in_thinking=False, stops=["."])
    assert made.push("a. b") == [Piece("answer", "a")]
    assert made.push("c") == []
    assert made.finish() == []


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValidationError):
        ReplyParser(PLAIN, in_thinking=False, stops=[""])


def test_the_parser_loads_without_torch() -> None:
    code = "import sys, hipfire.text.reply_parser; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
