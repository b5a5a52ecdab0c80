"""Anthropic's API as its own client sees it, over a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from scripted_backend import MODEL, Call, End, Fail, Hold, Note, Say, Script, Wait, think
from server_kit import Live, eventually, serving

TOOL: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with serving(head_delay_s=0.15, keepalive_s=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def script(server: Live, *scripts: Script, cached: int = 0) -> None:
    server.backend.scripts[:] = scripts
    server.backend.cached_tokens = cached


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    made: anthropic.types.Message = client.messages.create(
        **{"model": MODEL, "max_tokens": 100, "messages": HELLO, **fields}
    )
    return made


def raw_events(server: Live, **fields: Any) -> list[dict[str, Any]]:
    """Return a stream's events as they came; each one's name must be its type."""
    body = {"model": MODEL, "max_tokens": 100, "messages": HELLO, "stream": True, **fields}
    text = httpx.post(f"{server.url}/v1/messages", json=body).text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def ended(server: Live) -> str:
    """Return how the last turn ended, once it has."""
    key = server.backend.seen[-1].key
    assert eventually(lambda: key in server.backend.ended)
    return server.backend.ended[key]


def test_a_streamed_chat_of_two_turns(server: Live, client: anthropic.Anthropic) -> None:
    script(server, [Say("Hällo, 世界!")], [Say("Goodbye!")], cached=8)
    messages: list[Any] = list(HELLO)
    with client.messages.stream(model=MODEL, max_tokens=100, messages=messages) as stream:
        assert "".join(stream.text_stream) == "Hällo, 世界!"
        first = stream.get_final_message()
    assert (first.stop_reason, first.role, first.model) == ("end_turn", "assistant", MODEL)
    assert ended(server) == "done"

    messages += [first.to_param(), {"role": "user", "content": "And now?"}]
    with client.messages.stream(model=MODEL, max_tokens=100, messages=messages) as stream:
        second = stream.get_final_message()
    assert [block.text for block in second.content if block.type == "text"] == ["Goodbye!"]
    assert (second.usage.input_tokens, second.usage.cache_read_input_tokens) == (4, 8)
    assert second.usage.output_tokens == 3
    assert server.backend.seen[-1].messages == (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hällo, 世界!"},
        {"role": "user", "content": "And now?"},
    )


def test_the_events_of_a_stream_come_in_their_order(server: Live) -> None:
    script(server, [think("Hm."), Say("Hi", size=9), Call("weather", {"city": "Ulm"})])
    events = raw_events(server, tools=[TOOL])
    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    assert events[0]["message"]["usage"]["input_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_are_blocks(server: Live, client: anthropic.Anthropic, stream: bool) -> None:
    calls = [Call("weather", {"city": "Köln"}), Call("weather", {"city": "Ulm", "days": [1, 2]})]
    script(server, [think("I must look."), Say("Looking."), *calls])
    if stream:
        with client.messages.stream(model=MODEL, max_tokens=100, messages=HELLO, tools=[TOOL]) as made:
            message: anthropic.types.Message = made.get_final_message()
    else:
        message = ask(client, tools=[TOOL])
    thinking, text, first, second = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "I must look."
    assert text.type == "text"
    assert text.text == "Looking."
    assert first.type == "tool_use"
    assert second.type == "tool_use"
    assert (first.input, second.input) == ({"city": "Köln"}, {"city": "Ulm", "days": [1, 2]})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == 4


def test_a_tool_loop_goes_on_with_what_the_server_sent(server: Live, client: anthropic.Anthropic) -> None:
    script(server, [think("Look."), Call("weather", {"city": "Ulm"})], [Say("Rain.")])
    first = ask(client, tools=[TOOL])
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [*HELLO, first.to_param(), {"role": "user", "content": [result]}]
    second = ask(client, tools=[TOOL], messages=messages)
    assert [block.text for block in second.content if block.type == "text"] == ["Rain."]
    told = server.backend.seen[-1].messages
    assert told is not None
    assert [message["role"] for message in told] == ["user", "assistant", "tool"]
    assert told[1]["reasoning_content"] == "Look."
    assert (told[2]["name"], told[2]["content"]) == ("weather", "rain")


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_reasoning_leaves_an_empty_block(
    server: Live, client: anthropic.Anthropic, stream: bool
) -> None:
    script(server, [think("Secret."), Say("Hi")])
    thinking = {"type": "adaptive", "display": "omitted"}
    fields: Any = {"model": MODEL, "max_tokens": 100, "messages": HELLO, "thinking": thinking}
    if stream:
        with client.messages.stream(**fields) as made:
            message = made.get_final_message()
    else:
        message = client.messages.create(**fields)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "Secret" not in message.to_json()


@pytest.mark.parametrize(
    ("end", "limit", "reason", "matched"),
    [
        (End("stop", stop="END"), 100, "stop_sequence", "END"),
        (End("length"), 1, "max_tokens", None),
        (End("length"), 100, "model_context_window_exceeded", None),
    ],
)
def test_why_a_reply_ended(
    server: Live, client: anthropic.Anthropic, end: End, limit: int, reason: str, matched: str | None
) -> None:
    script(server, [Say("Hi"), end])
    message = ask(client, max_tokens=limit, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, matched)
    assert server.backend.seen[-1].generation.stop == ("END",)


def test_warnings_are_told(server: Live) -> None:
    script(server, [Note("no such effort"), Say("Hi"), End(warnings=("capped",))])
    delta = next(event for event in raw_events(server) if event["type"] == "message_delta")
    assert delta["hipfire"]["config_warnings"] == ["capped", "no such effort"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_word_is_a_response_with_its_status(
    server: Live, client: anthropic.Anthropic, stream: bool
) -> None:
    script(server, [Fail("context_length", "5000 tokens requested but the context holds 2048")])
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, stream=stream)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "5000" in caught.value.message
    assert "2048" in caught.value.message


def test_a_failure_in_mid_stream_is_an_event(server: Live, client: anthropic.Anthropic) -> None:
    script(server, [Say("Hel"), Fail("transient", "the engine died")])
    text: list[str] = []
    with (
        client.messages.stream(model=MODEL, max_tokens=100, messages=HELLO) as stream,
        pytest.raises(anthropic.APIStatusError, match="the engine died"),
    ):
        text.extend(stream.text_stream)
    assert text == ["Hel"]


def test_errors_have_the_types_that_clients_know(server: Live, client: anthropic.Anthropic) -> None:
    script(server, [Fail("transient", "full", before_start=True)])
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        ask(client, model="no-such-model")
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(client)
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert caught.value.response.headers["retry-after"]
    broken = httpx.post(f"{server.url}/v1/messages", content=b'{"model": "\xff"}')
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    missing = httpx.get(f"{server.url}/v1/messages/batches")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_silence_is_filled_with_pings_that_clients_skip(server: Live, client: anthropic.Anthropic) -> None:
    script(server, [Wait(0.3), Say("Hi"), Wait(0.15), Say("!")])
    assert raw_events(server)[0] == {"type": "ping"}
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "Hi!"


def test_a_client_that_leaves_stops_its_turn(server: Live, client: anthropic.Anthropic) -> None:
    never = threading.Event()
    script(server, [Say("Hello"), Hold(never), Say("World")])
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HELLO) as stream:
        next(iter(stream.text_stream))
    left = time.monotonic()
    assert ended(server) == "aborted"
    assert time.monotonic() - left < 2
    assert server.backend.seen[-1].key not in server.backend.commits
    assert eventually(lambda: server.service.stats()["running"] == 0)


def test_counting_tokens_reads_no_prompt(server: Live, client: anthropic.Anthropic) -> None:
    script(server, [Wait(30)])
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == 12
    assert ended(server) == "aborted"


def test_the_token_may_come_as_an_api_key() -> None:
    with serving(token="a-long-secret-token") as running:
        good = anthropic.Anthropic(base_url=running.url, api_key="a-long-secret-token", max_retries=0)
        assert ask(good).content[0].type == "text"
        bad = anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            ask(bad)


def test_the_list_of_models_is_anthropics_too(client: anthropic.Anthropic) -> None:
    models = list(client.models.list())
    assert MODEL in [model.id for model in models]
    for model in (models[0], client.models.retrieve(models[0].id)):
        assert (model.type, model.display_name) == ("model", models[0].id)
        assert model.created_at.tzinfo is not None
