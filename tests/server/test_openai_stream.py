"""Streams byte by byte: order, delayed head, keepalives, errors in mid-stream, and clients that leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_backend import MODEL, Call, Fail, Hold, Say, Script, Wait, think
from server_kit import Live, eventually, frames, serving

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
PATHS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(head_delay_s=0.3, keepalive_s=0.1) as running:
        yield running


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields} if "chat" in path else {"model": MODEL, "prompt": "Once", **fields}


def stream_of(live: Live, *script: Any, path: str = PATHS[0], **fields: Any) -> list[str]:
    live.backend.scripts = [list(script)]
    body = body_for(path, stream=True, **fields)
    with live.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(response.iter_lines())


def test_order_of_a_stream_is_role_pieces_finish_usage_end(live: Live) -> None:
    lines = stream_of(
        live, think("Hm"), Say("Yes"), Call("f", {"a": 1}), stream_options={"include_usage": True}
    )
    *chunks, end = frames(lines)
    assert end == "[DONE]"
    assert [list(chunk["choices"][0]["delta"]) if chunk["choices"] else "usage" for chunk in chunks] == [
        ["role"],
        ["reasoning_content"],
        ["content"],
        ["tool_calls"],
        [],
        "usage",
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["tool_calls"]
    assert ["usage" in chunk for chunk in chunks] == [False] * 5 + [True]
    assert ["timings" in chunk for chunk in chunks] == [False] * 4 + [True, False]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not [line for line in lines if line.startswith(":")]


def test_usage_is_told_only_on_request(live: Live) -> None:
    assert not [chunk for chunk in frames(stream_of(live, Say("Yes")))[:-1] if "usage" in chunk]


def test_head_waits_for_the_first_piece_and_no_longer_than_its_limit(live: Live) -> None:
    gate = threading.Event()
    live.backend.scripts = [[Hold(gate), Say("Yes")]]
    began = time.monotonic()
    with live.client.stream("POST", PATHS[0], json={**CHAT, "stream": True}) as response:
        assert time.monotonic() - began > 0.28
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": keepalive") == 2:
                gate.set()
    # the role, comments while nothing comes, then the reply
    assert [line[:1] for line in lines if line][:3] == ["d", ":", ":"]
    role, piece, *_ = frames(lines)
    assert role["choices"][0]["delta"] == {"role": "assistant"}
    assert piece["choices"][0]["delta"] == {"content": "Yes"}


def test_silence_between_pieces_is_bridged(live: Live) -> None:
    lines = stream_of(live, Say("One"), Wait(0.35), Say("two"))
    comments = [index for index, line in enumerate(lines) if line == ": keepalive"]
    pieces = [index for index, line in enumerate(lines) if '"content"' in line]
    assert len(comments) >= 2
    assert pieces[0] < comments[0] < comments[-1] < pieces[1]


@pytest.mark.parametrize("path", PATHS)
def test_error_in_mid_stream_is_a_frame_and_then_the_end(live: Live, path: str) -> None:
    lines = stream_of(live, Say("One"), Fail("transient", "the engine ended"), path=path)
    *_, error, end = frames(lines)
    assert error["error"]["message"] == "the engine ended"
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "transient")
    assert end == "[DONE]"
    assert '"finish_reason":"stop"' not in "".join(lines)


def test_error_before_the_first_piece_but_after_the_head_is_a_frame(live: Live) -> None:
    lines = stream_of(live, Wait(0.5), Fail("context_length", "too long"))
    role, error, end = frames(lines)
    assert role["choices"][0]["delta"] == {"role": "assistant"}
    assert error["error"]["code"] == "context_length_exceeded"
    assert end == "[DONE]"


def leave_during(live: Live, script: Script, path: str, *, read: bytes, stream: bool) -> None:
    """Ask, read until `read` has come, and close the connection."""
    live.backend.scripts = [script]
    content = json.dumps(body_for(path, stream=stream)).encode()
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    seen = len(live.backend.seen)
    with live.connect() as connection:
        connection.sendall(request + content)
        data = b""
        while read not in data:
            data += connection.recv(4096)
        assert eventually(lambda: len(live.backend.seen) > seen)
        time.sleep(0.03)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("moment", "stream"),
    [
        ("queued", True),
        ("queued", False),
        ("started", False),
        ("prefill", True),
        ("mid", True),
        ("mid", False),
    ],
)
def test_client_that_leaves_frees_its_place_at_once(live: Live, path: str, moment: str, stream: bool) -> None:
    never = threading.Event()
    script: Script = {
        "queued": [Wait(30, before_start=True), Say("x")],
        "started": [Hold(never), Say("x")],
        "prefill": [Hold(never), Say("x")],
        "mid": [Say("One"), Hold(never), Say("two")],
    }[moment]
    leave_during(live, script, path, read=b"One" if moment == "mid" and stream else b"", stream=stream)
    key = live.backend.seen[-1].key
    assert eventually(lambda: live.backend.ended.get(key) == "aborted", 1)
    assert key in live.backend.cancels
    assert key not in live.backend.commits
    assert eventually(lambda: live.service.gauges()["hipfire_turns_running"] == 0, 1)
    assert live.service.gauges()["hipfire_queue_depth"] == 0


def test_client_that_leaves_before_the_last_bytes_leaves_no_turn_in_the_cache(live: Live) -> None:
    gate = threading.Event()
    leave_during(live, [Say("One"), Hold(gate)], PATHS[0], read=b"One", stream=True)
    gate.set()
    key = live.backend.seen[-1].key
    assert eventually(lambda: key in live.backend.ended)
    assert live.backend.ended[key] == "aborted"
    assert key not in live.backend.commits


def test_commit_follows_the_last_bytes(live: Live) -> None:
    """The end of a stream means that the turn is settled, so the next request finds it in the cache."""
    stream_of(live, Say("Yes"))
    assert live.backend.ended.get(live.backend.seen[-1].key) == "done"
    assert live.post(PATHS[0], CHAT).status_code == 200
    assert eventually(lambda: live.backend.ended.get(live.backend.seen[-1].key) == "done")
    assert len(live.backend.commits) == len(set(live.backend.commits))


def test_turn_of_a_slow_reader_is_committed_when_it_has_read_on(live: Live) -> None:
    """While the last bytes cannot be handed to the socket, the client does not have them."""
    live.backend.scripts = [[Say("word " * 2_000_000, size=200_000)]]
    content = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with live.connect() as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert connection.recv(65536)
        time.sleep(0.3)
        key = live.backend.seen[-1].key
        assert key not in live.backend.commits
        parts = []
        while part := connection.recv(2**20):
            parts.append(part)
    data = b"".join(parts)
    assert data.count(b"word ") > 1_900_000
    assert b"[DONE]" in data
    assert live.backend.ended[key] == "done"
