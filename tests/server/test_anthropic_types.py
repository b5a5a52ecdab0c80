"""What requests of Anthropic's API mean, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from hipfire.base.errors import HipfireError
from hipfire.engine.turn import ResponseFormat, Thinking, ToolChoice, TurnKey
from hipfire.server.anthropic_types import MessagesRequest, read_count, read_messages

KEY = TurnKey("msg-1", 1)
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "Tells <the> weather & é",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}


def read(**fields: Any) -> MessagesRequest:
    return read_messages({"model": "tiny", "max_tokens": 100, "messages": HELLO, **fields}, KEY)


def told(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Return the messages that the engine is given."""
    turn = read(messages=list(messages), **fields).turn
    assert turn.messages is not None
    return [dict(message) for message in turn.messages]


def test_a_plain_request_leaves_everything_else_to_the_model() -> None:
    asked = read()
    assert (asked.model, asked.stream, asked.thoughts) == ("tiny", False, True)
    assert asked.turn.messages == ({"role": "user", "content": "Hello"},)
    assert asked.turn.generation.max_tokens == 100
    assert asked.turn.fit
    assert asked.turn.sampling_given == frozenset()
    assert (asked.turn.thinking, asked.turn.tool_choice) == (Thinking(), ToolChoice())


def test_each_optional_field_as_null_is_as_if_absent() -> None:
    names = ("system", "stream", "stop_sequences", "temperature", "top_p", "top_k", "thinking", "tools")
    more = ("tool_choice", "metadata", "output_config", "cache_control", "service_tier", "container", "speed")
    assert read(**dict.fromkeys((*names, *more))) == read()


def test_an_explicit_zero_is_a_choice() -> None:
    turn = read(temperature=0, top_p=0, top_k=0).turn
    assert turn.sampling_given == frozenset({"temperature", "top_p", "top_k"})
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (0.0, 0.0, 0)


def test_the_system_prompt_comes_first_as_text_or_as_blocks() -> None:
    blocks = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "Rhyme."},
    ]
    assert told(*HELLO, system=blocks)[0] == {"role": "system", "content": "Be brief.\nRhyme."}
    assert told(*HELLO, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert told(*HELLO, system="")[0]["role"] == "user"


def test_a_tool_loop_becomes_calls_and_results_in_their_order() -> None:
    second = {"type": "tool_use", "id": "t2", "name": "clock", "input": {}}
    messages = told(
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": "x"},
                {"type": "text", "text": "Looking."},
                CALL,
                second,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no clock"},
                {"type": "text", "text": "And?"},
            ],
        },
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
        {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ]
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "I must look.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "Rain"},
        {"role": "tool", "tool_call_id": "t2", "name": "clock", "content": "Error: no clock"},
        {"role": "user", "content": "And?"},
    ]


def test_turns_of_one_role_are_joined_so_that_templates_see_them_alternate() -> None:
    messages = told(
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "Three"}]},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[0]["content"] == "One\nTwo\nThree"
    assert messages[1]["content"] == "A"
    assert messages[1]["tool_calls"][0]["id"] == "t1"
    assert messages[2]["content"] == ""


def test_tools_reach_the_model_verbatim() -> None:
    turn = read(tools=[WEATHER]).turn
    assert turn.tools == (
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells <the> weather & é",
                "parameters": WEATHER["input_schema"],
            },
        },
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            ToolChoice("named", "weather", False),
        ),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: ToolChoice) -> None:
    assert read(tools=[WEATHER], tool_choice=choice).turn.tool_choice == expected


@pytest.mark.parametrize(
    ("thinking", "effort", "expected", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 64}, None, Thinking(True, None, 64), True),
        ({"type": "disabled"}, None, Thinking(False), True),
        ({"type": "adaptive", "display": "omitted"}, "max", Thinking(None, "max"), False),
    ],
)
def test_thinking(thinking: dict[str, Any], effort: str | None, expected: Thinking, shown: bool) -> None:
    asked = read(thinking=thinking, output_config={"effort": effort})
    assert (asked.turn.thinking, asked.thoughts) == (expected, shown)


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_context_management_that_changes_nothing_is_taken(edits: list[dict[str, Any]]) -> None:
    assert read(context_management={"edits": edits}) == read()
    with pytest.raises(HipfireError, match="context_management"):
        read(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})


def test_a_schema_shapes_the_answer() -> None:
    schema = {"type": "object"}
    turn = read(output_config={"format": {"type": "json_schema", "schema": schema}}).turn
    assert turn.response_format == ResponseFormat("json_schema", schema)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The"}]}, "last message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "strict": True}]}, "tools[0].strict"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "clock"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"cache_control": {"type": "for ever"}}, "cache_control.type"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"max_token": 5}, "did you mean max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(HipfireError) as caught:
        read(**fields)
    assert caught.value.kind in ("validation", "unsupported")
    assert named in caught.value.line()


def test_counting_takes_the_same_prompt_and_generates_nothing() -> None:
    fields = {"model": "tiny", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted = read_count(fields, KEY).turn
    assert counted.messages == read(system="Be brief.", tools=[WEATHER]).turn.messages
    assert counted.generation.max_tokens == 0
    with pytest.raises(HipfireError, match="max_tokens"):
        read_count({**fields, "max_tokens": 5}, KEY)
