"""Calls in the Hermes dialect: as the template asks for them, nearly so, and not at all."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools_kit import TOOLS

from hipfire.text.tools import ParsedCalls, parse_calls


def parsed(text: str) -> ParsedCalls:
    return parse_calls("hermes", text, TOOLS)


def block(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


PARIS = {"city": "Paris"}
PLAIN = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def found(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parsed(text).calls]


@pytest.mark.parametrize(
    "text",
    [
        block(PLAIN),
        PLAIN.join(("<tool_call>", "</tool_call>")),
        block(json.dumps(json.loads(PLAIN), indent=2)),
    ],
)
def test_plain_calls_need_no_repair(text: str) -> None:
    made = parsed(text)
    assert [tuple(call) for call in made.calls] == [("get_weather", PARIS, False)]
    assert made.rest == ""
    assert made.repairs == ()


def test_a_call_without_arguments() -> None:
    for inner in (
        '{"name": "now"}',
        '{"name": "now", "arguments": {}}',
        '{"name": "now", "arguments": null}',
    ):
        assert [tuple(call) for call in parsed(block(inner)).calls] == [("now", {}, False)]


def test_several_calls_of_one_function_keep_their_order() -> None:
    cities = ["Paris", "Rome", "Oslo"]
    lines = [json.dumps({"name": "get_weather", "arguments": {"city": city}}) for city in cities]
    for text in ("\n".join(map(block, lines)), block("\n".join(lines)), block(f"[{','.join(lines)}]")):
        assert [arguments["city"] for _, arguments in found(text)] == cities
        assert parsed(text).rest == ""


def test_markers_inside_strings_are_part_of_them() -> None:
    text = "<tool_call>a</tool_call> and <tool_call>"
    inner = json.dumps({"name": "write_file", "arguments": {"path": "a", "text": text}})
    assert found(block(inner)) == [("write_file", {"path": "a", "text": text})]


REPAIRED = {
    "nested opener": (f"<tool_call>\n<tool_call>\n{PLAIN}\n</tool_call>", "opener repeated"),
    "no closer": (f"<tool_call>\n{PLAIN}", "closing marker missing"),
    "arguments beside the name": (block('{"name": "get_weather", "city": "Paris"}'), "beside the name"),
    "parameters": (block('{"name": "get_weather", "parameters": {"city": "Paris"}}'), '"parameters"'),
    "args": (block('{"name": "get_weather", "args": {"city": "Paris"}}'), '"args"'),
    "arguments as text": (
        block('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'),
        "JSON text",
    ),
    "function object": (block(f'{{"type": "function", "function": {PLAIN}}}'), '"function"'),
    "function as name": (block('{"function": "get_weather", "arguments": {"city": "Paris"}}'), '"function"'),
    "plain head": (block('<plain>get_weather</param>{"city": "Paris"}'), "from a tag"),
    "function head": (block('<function=get_weather>{"city": "Paris"}</function>'), "from a tag"),
    "quoted function head": (block('<function="get_weather">\n{"city": "Paris"}'), "from a tag"),
    "tool head": (block('<tool name="get_weather">{"city": "Paris"}</tool>'), "from a tag"),
    "head over arguments": (block('<tool name="get_weather">{"arguments": {"city": "Paris"}}'), "from a tag"),
    "tags for both": (
        block('<name>get_weather</name><arguments>{"city": "Paris"}</arguments>'),
        "from a tag",
    ),
    "surplus brace": (block(PLAIN + "}"), "surplus"),
    "missing brace": (block(PLAIN[:-1]), "syntax"),
    "missing braces": (block(PLAIN[:-2]), "syntax"),
    "trailing comma": (block('{"name": "get_weather", "arguments": {"city": "Paris",},}'), "syntax"),
    "single quotes": (block("{'name': 'get_weather', 'arguments': {'city': 'Paris'}}"), "syntax"),
    "code fence": (block(f"```json\n{PLAIN}\n```"), ""),
    "cut only in the closer": (f"<tool_call>{PLAIN}</tool_", "closing marker missing"),
}


@pytest.mark.parametrize("name", REPAIRED)
def test_repaired(name: str) -> None:
    text, line = REPAIRED[name]
    made = parsed(text)
    assert [(call.name, call.arguments) for call in made.calls] == [("get_weather", PARIS)]
    if line:
        assert made.calls[0].repaired
        assert any(line in repair and repair.startswith("get_weather: ") for repair in made.repairs)
        assert all("\n" not in repair for repair in made.repairs)


def test_python_words_and_quotes_inside_quotes_are_mended() -> None:
    text = block("{'name': 'get_weather', 'arguments': {'city': \"L'Aquila\", 'metric': True, 'days': None}}")
    assert found(text) == [("get_weather", {"city": "L'Aquila", "metric": True, "days": None})]
    text = block("""{'name': 'write_file', 'arguments': {'path': 'it\\'s', 'text': 'say "hi"\\n'}}""")
    assert found(text) == [("write_file", {"path": "it's", "text": 'say "hi"\n'})]


def test_line_breaks_inside_strings_are_kept() -> None:
    text = block('{"name": "write_file", "arguments": {"path": "a", "text": "one\n\ttwo"}}')
    assert found(text) == [("write_file", {"path": "a", "text": "one\n\ttwo"})]


def test_a_name_among_the_arguments_is_an_argument() -> None:
    assert found(block('<function=add_user>{"name": "Ann", "age": 3}')) == [
        ("add_user", {"name": "Ann", "age": 3})
    ]
    assert found(block('{"name": "add", "type": "admin", "id": 3}')) == [("add", {"type": "admin", "id": 3})]


NO_CALLS = [
    "<tool_call>",
    "<tool_call></tool_call>",
    block("just words"),
    block('{"city": "Paris"}'),
    block('{"name": "", "arguments": {}}'),
    block('{"name": 3, "arguments": {}}'),
    block('{"name": "get_weather", "arguments": ["Paris"]}'),
    block('{"name": "get_weather", "arguments": "Paris"}'),
    block('{"name": "get_weather", "arguments": {"days": NaN}}'),
    block('{"name": "get_weather", "arguments": {"days": 1e999}}'),
    block('{"name": "get_weather", "arguments": {"days": 1 2}}'),
    block('{"name": "get_weather", "arguments": {"city": }}'),
    block('{"name": "get_weather", "arguments": {"city": "Paris"]}'),
    block('Sure: {"name": "get_weather", "arguments": {"city": "Paris"}'),
    block("[]"),
    block('[{"name": "now"}, 3]'),
    block('{"a":' * 5000),
    block('{"name": "now", "arguments": {"a":' + "[" * 80 + "]" * 80 + "}}"),
    "no opener at all",
    "",
]


@pytest.mark.parametrize("text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_comes_back_whole(text: str) -> None:
    assert parsed(text) == ParsedCalls((), text, ())


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(f"<tool_call>\n{PLAIN}")))
def test_a_call_that_was_cut_off_is_none(end: int) -> None:
    text = f"<tool_call>\n{PLAIN}"[:end]
    assert parsed(text) == ParsedCalls((), text, ())


def test_text_around_calls_is_kept() -> None:
    made = parsed(f"{block(PLAIN)}\nThen:\n{block('broken')}\n{block(PLAIN)} Done.\n")
    assert len(made.calls) == 2
    assert made.rest == f"Then:\n{block('broken')}\n Done."


def test_half_a_surrogate_pair_never_leaves() -> None:
    text = block(
        '{"name": "write_file", "arguments": {"path": "\\ud83d", "text": "\\ud83d\\ude00", "\\udc00": 1}}'
    )
    assert found(text) == [("write_file", {"path": "\ufffd", "text": "😀", "\ufffd": 1})]


def test_a_reply_that_is_all_openers_is_read_in_a_moment() -> None:
    began = time.perf_counter()
    for opener in ("<tool_call>", "<tool_call>{", '<tool_call>{"name": "f", ', "<tool_call><plain>f</plain>"):
        text = opener * 20_000
        assert parsed(text) == ParsedCalls((), text, ())
    assert len(parsed("<tool_call>" * 20_000 + PLAIN).calls) == 1
    assert time.perf_counter() - began < 4


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.booleans())
def test_any_arguments_come_through(arguments: dict[str, Any], escaped: bool) -> None:
    inner = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=escaped)
    assert found(block(inner)) == [("f", arguments)]


@given(st.text("{}[]\",:'\\ abTrue1<>/_=\n", max_size=40), st.booleans())
def test_no_text_raises_or_is_lost(text: str, closed: bool) -> None:
    whole = "<tool_call>" + text + ("</tool_call>" if closed else "")
    made = parsed(whole)
    assert made.calls or made.rest == whole
    json.dumps([call.arguments for call in made.calls], allow_nan=False)
