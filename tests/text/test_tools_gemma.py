"""Calls in Gemma's dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools_kit import TOOLS

from hipfire.text.tools import ParsedCalls, parse_calls

Q = '<|"|>'


def parsed(text: str) -> ParsedCalls:
    return parse_calls("gemma", text, TOOLS)


def found(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parsed(text).calls]


def written(value: Any) -> str:
    """Return a value as the dialect writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def call(name: str, **arguments: Any) -> str:
    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


PARIS = {"city": "Paris", "days": 3, "metric": True}


def test_a_plain_call_needs_no_repair() -> None:
    text = f"<|tool_call>call:get_weather{{city:{Q}Paris{Q},days:3,metric:true}}<tool_call|>"
    assert text == call("get_weather", **PARIS)
    made = parsed(text)
    assert [tuple(one) for one in made.calls] == [("get_weather", PARIS, False)]
    assert (made.rest, made.repairs) == ("", ())


def test_no_arguments_several_calls_and_nesting() -> None:
    assert found(call("now")) == [("now", {})]
    nested = {"a": {"b": [1, -2.5, {"c": "x"}, []], "d": {}}, "e": None}
    assert found(call("f", **nested) + call("f", g=1)) == [("f", nested), ("f", {"g": 1})]


def test_a_string_may_hold_every_sign_of_the_dialect() -> None:
    text = 'a {b: "c"}, [d]: <tool_call|> <|tool_call>call:x{}\n'
    assert found(call("write_file", path="p", text=text)) == [("write_file", {"path": "p", "text": text})]


@pytest.mark.parametrize(
    "text",
    [
        '<|tool_call>call:get_weather{"city": "Paris", "days": 3, "metric": true}<tool_call|>',
        f"<|tool_call> call:get_weather {{ {Q}city{Q} : {Q}Paris{Q} , days :3, metric:true, }}\n<tool_call|>",
        f'<|tool_call|>{{"name": "get_weather", "args": {json.dumps(PARIS)}}}<|/tool_call|>',
        f'<|tool_call|>{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}',
        call("get_weather", **PARIS).removesuffix("<tool_call|>"),
        call("get_weather", city="Paris", days="3", metric="true"),
    ],
)
def test_other_spellings(text: str) -> None:
    made = parsed(text)
    assert [(one.name, one.arguments) for one in made.calls] == [("get_weather", PARIS)]
    assert made.rest == ""


def test_a_bare_word_is_text() -> None:
    assert found("<|tool_call>call:get_weather{city:Paris,days:3x}<tool_call|>") == [
        ("get_weather", {"city": "Paris", "days": "3x"})
    ]


def test_a_missing_closer_is_a_repair() -> None:
    made = parsed("<|tool_call>call:now{}")
    assert made.calls[0].repaired
    assert made.repairs == ("now: closing marker missing",)


WHOLE = call("get_weather", city="Paris", days=3)


@pytest.mark.parametrize("end", range(WHOLE.index("}") + 1))
def test_a_call_that_was_cut_off_is_none(end: int) -> None:
    text = WHOLE[:end]
    assert parsed(text) == ParsedCalls((), text, ())


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>get_weather{}<tool_call|>",
        "<|tool_call>call:f[1]<tool_call|>",
        "<|tool_call>call:f{a:}<tool_call|>",
        "<|tool_call>call:f{a 1}<tool_call|>",
        "<|tool_call>call:f{a:1 b:2}<tool_call|>",
        "<|tool_call>call:f{" + "a:{" * 100 + "}" * 100 + "}<tool_call|>",
        '<|tool_call|>{"city": 1}<|/tool_call|>',
        "<|tool_call|>words<|/tool_call|>",
        f"<|tool_call>call:f{{{Q}a{Q} 1}}<tool_call|>",
    ],
)
def test_what_is_no_call_comes_back_whole(text: str) -> None:
    assert parsed(text) == ParsedCalls((), text, ())


def test_text_around_calls_is_kept() -> None:
    made = parsed(f"{call('now')} then {call('now')} end")
    assert len(made.calls) == 2
    assert made.rest == "then  end"


keys = st.text("abc_", min_size=1, max_size=4)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text('a"{}[],:<|é \n', max_size=8).filter(lambda t: Q not in t),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=4))
def test_any_arguments_come_through(arguments: dict[str, Any]) -> None:
    # a string whose end begins the closing quote cannot be told from one that is a character shorter
    text = call("f", **arguments)
    if f"<{Q}" not in text and f"|{Q}" not in text:
        assert found(text) == [("f", arguments)]
