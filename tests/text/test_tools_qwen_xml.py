"""Calls in Qwen's XML dialect."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools_kit import TOOLS, tool

from hipfire.text.tools import ParsedCalls, parse_calls


def parsed(text: str, tools: list[dict[str, Any]] | None = None) -> ParsedCalls:
    return parse_calls("qwen_xml", text, TOOLS if tools is None else tools)


def call(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def found(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(made.name, made.arguments) for made in parsed(text).calls]


def test_a_plain_call_needs_no_repair() -> None:
    made = parsed(call("get_weather", city="Paris", days="3", metric="true"))
    arguments = {"city": "Paris", "days": 3, "metric": True}
    assert [tuple(one) for one in made.calls] == [("get_weather", arguments, False)]
    assert made.rest == ""
    assert made.repairs == ()


def test_calls_without_arguments_and_several_calls() -> None:
    assert found(call("now")) == [("now", {})]
    assert found("<tool_call><function=now></function></tool_call>") == [("now", {})]
    text = "\n".join(call("get_weather", city=city) for city in ("Paris", "Rome", "Oslo"))
    assert [arguments["city"] for _, arguments in found(text)] == ["Paris", "Rome", "Oslo"]


@pytest.mark.parametrize(
    "text",
    [
        "02134",
        "true",
        "1e5",
        "null",
        '{"a": 1}',
        "  indented\n\n",
        "",
        "a </parameter> b",
        "<b>bold</b>\n</x>",
        "x </function> y",
        "</tool_call> in a line",
        "é🙂",
    ],
)
def test_text_stays_the_text_that_it_is(text: str) -> None:
    assert found(call("write_file", path="a", text=text)) == [("write_file", {"path": "a", "text": text})]


def test_values_on_the_line_of_their_tags() -> None:
    text = "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>"
    assert found(text) == [("get_weather", {"city": "Paris"})]


def test_types_come_from_the_schema() -> None:
    typed = tool(
        "f",
        number="number",
        items={"type": "array", "items": {"type": "integer"}},
        thing={"type": "object", "properties": {"on": {"type": "boolean"}}},
        nothing="null",
        choice={"enum": ["low", 3]},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        either={"type": ["string", "integer"]},
        open={},
    )
    text = call(
        "f",
        number="1.5",
        items='["1", 2]',
        thing='{"on": "true"}',
        nothing="null",
        choice="3",
        maybe="null",
        either="5",
        open="[1]",
    )
    made = parsed(text, [typed]).calls[0]
    assert made.arguments == {
        "number": 1.5,
        "items": [1, 2],
        "thing": {"on": True},
        "nothing": None,
        "choice": 3,
        "maybe": None,
        "either": "5",
        "open": [1],
    }


def test_a_parameter_that_the_schema_lacks_stays_text() -> None:
    assert found(call("get_weather", city="Paris", zip="02134", flag="true"))[0][1] == {
        "city": "Paris",
        "zip": "02134",
        "flag": "true",
    }


def test_without_a_schema_json_is_read_as_json() -> None:
    arguments = {"a": "3", "b": "true", "c": "02134", "d": "[1]", "e": "words"}
    assert found(call("unknown", **arguments)) == [
        ("unknown", {"a": 3, "b": True, "c": "02134", "d": [1], "e": "words"})
    ]


REPAIRED = {
    "no tag at the end of the function": call("get_weather", city="Paris").replace("</function>", ""),
    "no tag at the end of a value": call("get_weather", city="Paris").replace("</parameter>\n", ""),
    "the same on one line": "<tool_call><function=get_weather><parameter=city>Paris</function></tool_call>",
    "no block": "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
    "no closing marker": call("get_weather", city="Paris").removesuffix("</tool_call>"),
    "JSON behind the head": '<tool_call>\n<function=get_weather>{"city": "Paris"}</function>\n</tool_call>',
}


@pytest.mark.parametrize("name", REPAIRED)
def test_repaired(name: str) -> None:
    made = parsed(REPAIRED[name])
    assert [tuple(one) for one in made.calls] == [("get_weather", {"city": "Paris"}, True)]
    assert made.repairs
    assert made.rest == ""


def test_a_value_without_closing_tag_does_not_swallow_the_next() -> None:
    text = call("get_weather", city="Paris", days="3").replace("Paris\n</parameter>", "Paris")
    assert found(text) == [("get_weather", {"city": "Paris", "days": 3})]


def test_the_json_dialect_is_read_too() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert [tuple(one) for one in parsed(text).calls] == [("get_weather", {"city": "Paris"}, False)]


WHOLE = call("get_weather", city="Paris", days="3")


@pytest.mark.parametrize("end", range(WHOLE.index("</function>") + len("</function>")))
def test_a_call_that_was_cut_off_is_none(end: int) -> None:
    text = WHOLE[:end]
    assert parsed(text) == ParsedCalls((), text, ())


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>words</tool_call>",
        "<function=>x</function>",
        "<function=f",
        "the <function= tag",
        "<tool_call>",
    ],
)
def test_what_is_no_call_comes_back_whole(text: str) -> None:
    assert parsed(text) == ParsedCalls((), text, ())


@pytest.mark.parametrize("end", ["", "</parameter>", "</parameter></function>"])
def test_a_reply_that_is_all_openers_is_read_in_a_moment(end: str) -> None:
    for opener in (
        "<function=f><parameter=a>",
        "<tool_call>\n<function=f>\n<parameter=a>\n",
        "<parameter=a>\n",
    ):
        text = "<tool_call><function=f>" + opener * 20_000 + end
        began = time.perf_counter()
        made = parsed(text)
        assert time.perf_counter() - began < 2
        assert made.calls or made.rest == text


@given(st.dictionaries(st.sampled_from(["path", "text"]), st.text('ab<>/="\n }', max_size=20)))
def test_any_text_comes_through(arguments: dict[str, str]) -> None:
    assert found(call("write_file", **arguments)) == [("write_file", arguments)]
