"""Every field of a request is honoured, or refused with 400 and its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from scripted_backend import MODEL, Say
from server_kit import Live, serving

from hipfire.engine.turn import ResponseFormat, Thinking, ToolChoice, TurnKey, TurnRequest
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields
from hipfire.server.openai_schema import CHAT, COMPLETION
from hipfire.server.openai_types import read_chat, read_completion

KEY = TurnKey("chatcmpl-1-1", 1)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving([Say("Hello!")]) as running:
        yield running


def chat(**fields: Any) -> TurnRequest:
    return read_chat({"model": MODEL, "messages": HELLO, **fields}, KEY).turns[0]


def test_zeros_are_values_and_reach_the_sampler() -> None:
    zeros = {"temperature": 0, "top_p": 0, "top_k": 0, "min_p": 0, "seed": 0}
    zeros |= {"presence_penalty": 0, "frequency_penalty": 0, "repeat_window": 0}
    turn = chat(**zeros)
    assert turn.sampling_given == {"penalty_window", *(zeros.keys() - {"repeat_window"})}
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.seed) == (0.0, 0.0, 0)
    assert turn.sampling.penalty_window == 0
    assert chat().sampling_given == frozenset()


def test_null_means_absent_for_every_field() -> None:
    for schema, read, needed in (
        (CHAT, read_chat, {"model": MODEL, "messages": HELLO}),
        (COMPLETION, read_completion, {"model": MODEL, "prompt": "Once"}),
    ):
        nulls = dict.fromkeys(schema["properties"])
        assert read({**nulls, **needed}, KEY) == read(needed, KEY)  # type: ignore[operator]


def test_null_means_absent_for_fields_that_no_one_knows_too() -> None:
    message = {"role": "user", "content": "Hello"}
    assert chat(some_newer_field=None, response_format={"type": "text", "newer": None}) == chat()
    assert chat(messages=[{**message, "refusal": None}]) == chat()
    with pytest.raises(FieldError, match="some_newer_field"):
        chat(some_newer_field=0)


def test_hints_for_caches_are_taken() -> None:
    assert chat(prompt_cache_options={"mode": "explicit", "ttl": "30m"}, prompt_cache_key="k") == chat()


def test_strict_functions_are_taken_and_the_client_is_told(live: Live) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for tool, told in ((strict, ["strict"]), (TOOL, [])):
        body = {"model": MODEL, "messages": HELLO, "tools": [tool]}
        warnings = live.post("/v1/chat/completions", body).json()["hipfire"]["config_warnings"]
        assert [text.split()[0] for text in warnings] == told


def test_documented_fields_are_the_fields_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[set[str]] = []
    finish = Fields.finish
    monkeypatch.setattr(Fields, "finish", lambda self: (known.append(self._known), finish(self))[1])
    # what can only be refused is not documented
    absent = {"audio", "modalities", "prediction", "web_search_options", "verbosity", "functions"}
    absent |= {"function_call", "moderation", "context_management"}
    chat()
    assert known[-1] - absent == CHAT["properties"].keys()
    read_completion({"model": MODEL, "prompt": "Once"}, KEY)
    assert known[-1] - absent == COMPLETION["properties"].keys()


HONOURED: list[tuple[Mapping[str, Any], str, Any]] = [
    ({"max_tokens": 5}, "generation.max_tokens", 5),
    ({"max_completion_tokens": 5}, "generation.max_tokens", 5),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "generation.max_tokens", 5),
    ({"min_tokens": 3}, "generation.min_tokens", 3),
    ({"ignore_eos": True}, "generation.ignore_eos", True),
    ({"stop": "END"}, "generation.stop", ("END",)),
    ({"stop": ["a", "b"]}, "generation.stop", ("a", "b")),
    ({"logprobs": True}, "generation.top_logprobs", 0),
    ({"logprobs": True, "top_logprobs": 3}, "generation.top_logprobs", 3),
    ({"logprobs": False}, "generation.top_logprobs", None),
    ({"repetition_penalty": 1.2}, "sampling.repeat_penalty", 1.2),
    ({"repeat_penalty": 1.2}, "sampling.repeat_penalty", 1.2),
    ({"presence_penalty": -2}, "sampling.presence_penalty", -2.0),
    ({"top_k": -1}, "sampling.top_k", -1),
    ({"seed": 2**64 - 1}, "sampling.seed", 2**64 - 1),
    ({"logit_bias": {"7": -100, "3": 1.5}}, "sampling.logit_bias", ((3, 1.5), (7, -100.0))),
    ({"logit_bias": {}}, "sampling.logit_bias", ()),
    ({"response_format": {"type": "text"}}, "response_format", ResponseFormat()),
    ({"response_format": {"type": "json_object"}}, "response_format", ResponseFormat("json_object")),
    (
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        "response_format",
        ResponseFormat("json_schema", {"type": "object"}),
    ),
    ({"tools": [], "tool_choice": "none"}, "tool_choice", ToolChoice("none")),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", ToolChoice("required")),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        ToolChoice("named", "f"),
    ),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "tool_choice", ToolChoice(parallel=False)),
    ({"reasoning_effort": "none"}, "thinking", Thinking(False)),
    ({"reasoning_effort": "auto"}, "thinking", Thinking()),
    ({"reasoning_effort": "minimal"}, "thinking", Thinking(effort="low")),
    ({"reasoning": {"effort": "high", "max_tokens": 9}}, "thinking", Thinking(None, "high", 9)),
    ({"thinking": True}, "thinking", Thinking(True)),
    ({"thinking": "off"}, "thinking", Thinking(False)),
    ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "thinking", Thinking(True, None, 64)),
    ({"enable_thinking": False}, "thinking", Thinking(False)),
    ({"max_think_tokens": 0}, "thinking", Thinking(cap=0)),
    ({"thinking_budget": "med"}, "thinking", Thinking(cap=2048)),
    ({"thinking_budget": "off"}, "thinking", Thinking(False)),
    ({"thinking_budget": 77}, "thinking", Thinking(cap=77)),
    ({"thinking_budget": "high", "max_think_tokens": 5}, "thinking", Thinking(cap=5)),
    ({"user": "me", "metadata": {"a": "b"}, "store": False}, "thinking", Thinking()),
    ({"modalities": ["text"], "service_tier": "auto", "verbosity": "medium"}, "thinking", Thinking()),
]


@pytest.mark.parametrize(("fields", "where", "value"), HONOURED, ids=lambda each: str(each)[:40])
def test_field_is_honoured(fields: Mapping[str, Any], where: str, value: Any) -> None:
    found: Any = chat(**fields)
    for name in where.split("."):
        found = getattr(found, name)
    assert found == value


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [None]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 393_217}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repeat_penalty": 0.5}, "repeat_penalty"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"seed": -1}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ["a" * 65]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "no good"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"max_think_tokens": "many"}, "max_think_tokens"),
    ({"thinking": []}, "thinking"),
    ({"thinking": {"type": "on", "more": 1}}, "thinking.more"),
    ({"thinking": "on", "enable_thinking": False}, "enable_thinking"),
    ({"thinking_budget": "some"}, "thinking_budget"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
    ({"store": True}, "store"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"verbosity": "low"}, "verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"max_token": 5}, "max_token"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=lambda each: str(each)[:40])
def test_field_is_refused_by_name(live: Live, fields: Mapping[str, Any], named: str) -> None:
    before = len(live.backend.seen)
    response = live.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO, **fields})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(live.backend.seen) == before


def test_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(FieldError, match=r"temprature.*did you mean temperature") as caught:
        chat(temprature=1)
    assert caught.value.param == "temprature"


def test_missing_fields_are_named(live: Live) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Once"}),
    ):
        response = live.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


def test_roles_have_one_name_and_all_messages_arrive(live: Live) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "name": None, "refusal": None},
        {"role": "tool_result", "content": "", "tool_call_id": "c"},
    ]
    assert live.post("/v1/chat/completions", {"model": MODEL, "messages": messages}).status_code == 200
    sent = live.backend.seen[-1].messages or ()
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2] == {"role": "assistant", "content": None}
    assert sent[1]["content"] == messages[1]["content"]
