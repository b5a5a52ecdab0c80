"""The three APIs beside one another: the same turn says the same, and bad input harms none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_backend import MODEL, Call, Say, think
from server_kit import Live, serving

CHAT_ROUTES = ("/v1/chat/completions", "/v1/messages", "/api/chat")
ROUTES = (*CHAT_ROUTES, "/api/generate", "/v1/messages/count_tokens", "/api/show")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with serving() as live:
        yield live


def body(route: str, content: object = "Hello", **fields: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"model": MODEL, **fields}
    if route == "/api/generate":
        return {**made, "prompt": content, "stream": False}
    if route == "/api/show":
        return made
    made["messages"] = [{"role": "user", "content": content}]
    if route == "/v1/messages":
        made["max_tokens"] = 50
    if route == "/api/chat":
        made["stream"] = False
    return made


def said(route: str, reply: dict[str, Any]) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Return reasoning, text and calls of a reply, whatever its API."""
    if route == "/v1/messages":
        kinds: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
        for block in reply["content"]:
            kinds[block["type"]].append(block)
        thoughts = "".join(block["thinking"] for block in kinds["thinking"])
        text = "".join(block["text"] for block in kinds["text"])
        return thoughts, text, [(block["name"], block["input"]) for block in kinds["tool_use"]]
    message = reply["message"] if route == "/api/chat" else reply["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    loaded = [
        (call["name"], json.loads(call["arguments"]) if route.startswith("/v1") else call["arguments"])
        for call in calls
    ]
    return message.get("reasoning_content", message.get("thinking", "")), message["content"] or "", loaded


@pytest.mark.parametrize("route", CHAT_ROUTES)
def test_one_turn_says_the_same_through_every_api(server: Live, route: str) -> None:
    server.backend.scripts[:] = [[think("Hm.\n"), Say("Looking: 'ü' "), Call("weather", {"city": "Köln"})]]
    tool = {"name": "weather", "input_schema": WEATHER} if route == "/v1/messages" else FUNCTION
    reply = server.post(route, body(route, tools=[tool])).json()
    assert said(route, reply) == ("Hm.\n", "Looking: 'ü' ", [("weather", {"city": "Köln"})])
    # what the engine is told does not depend on the API either
    assert server.backend.seen[-1].messages == ({"role": "user", "content": "Hello"},)
    assert server.backend.seen[-1].tools == (FUNCTION,)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"model": "tiny:1m", "model": "other"}',
        b'{"model": "tiny:1m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny:1m", "prompt": "\\udc00"}',
        b'{"model": "tiny:1m", "temperature": NaN}',
        b'{"model": "\xff"}',
        b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": 5}',
        b'{"model": "tiny:1m", "messages": {}, "prompt": []}',
        b'{"model": "tiny:1m", "messages": [[]], "prompt": [[]]}',
    ],
)
def test_bad_input_is_refused_and_harms_nothing(server: Live, route: str, sent: bytes) -> None:
    seen = len(server.backend.seen)
    response = server.post(route, sent)
    assert response.status_code == 400
    assert response.json()["error"]
    assert len(server.backend.seen) == seen


@pytest.mark.parametrize("route", CHAT_ROUTES)
def test_an_empty_message_has_an_answer_and_the_next_request_works(server: Live, route: str) -> None:
    server.backend.scripts[:] = [[Say("Hi")]]
    assert server.post(route, body(route, "")).status_code == 200
    assert said(route, server.post(route, body(route)).json())[1] == "Hi"


@pytest.mark.parametrize("route", [*CHAT_ROUTES, "/api/generate"])
def test_a_template_of_the_clients_own_is_refused(server: Live, route: str) -> None:
    response = server.post(route, body(route, chat_template="{{ 1 }}"))
    assert response.status_code == 400
    assert "chat_template" in response.text


def test_a_body_that_is_too_large_is_refused_in_each_apis_shape() -> None:
    with serving(max_request_bytes=4096) as live:
        for route in CHAT_ROUTES:
            response = live.post(route, body(route, "x" * 5000))
            assert response.status_code == 413
            error = response.json()["error"]
            assert "4096 bytes" in (error if isinstance(error, str) else error["message"])
