"""What a request may be: how large, how slow, how deep, and which text is JSON at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_backend import MODEL, Hold, Say
from server_kit import Live, eventually, serving

from hipfire.server import limits
from hipfire.server.errors import FieldError, MalformedError
from hipfire.server.fields import Fields
from hipfire.server.limits import MAX_DEPTH, MAX_PARTS, parse_json

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving([Say("Hello!")], max_request_bytes=65_536, header_timeout_s=0.3, max_connections=20) as live:
        yield live


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | TEXT


@settings(max_examples=60)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20))
def test_every_json_object_is_read_as_python_reads_it(value: object) -> None:
    for ascii_only in (True, False):
        text = json.dumps({"x": value}, ensure_ascii=ascii_only).encode()
        assert parse_json(text) == {"x": value}


BAD = {
    "nothing": b"",
    "no object": b"[1]",
    "text": b'"x"',
    "two objects": b"{} {}",
    "cut": b'{"a": [1',
    "cut text": b'{"a": "b',
    "not UTF-8": b'{"a": "\xff"}',
    "half a character": b'{"a": "\xc3"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "key twice": b'{"a": 1, "a": 2}',
    "key twice inside": b'{"a": [{"b": 1, "b": 2}]}',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "too large a number": b'{"a": 1e999}',
    "too long a number": b'{"a": ' + b"9" * 5000 + b"}",
    "high surrogate": b'{"a": "\\ud800"}',
    "low surrogate": b'{"\\udc00": 1}',
    "surrogates in the wrong order": b'{"a": "\\udc00\\ud800"}',
    "control character": b'{"a": "\n"}',
    "deep lists": b'{"a": ' + b"[" * 30_000,
    "deep objects": b'{"a":' * 5_000,
    "form": b"model=x&messages=y",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_json_object_is_refused_on_every_route(live: Live, name: str) -> None:
    with pytest.raises(MalformedError):
        parse_json(BAD[name])
    for path in PATHS:
        response = live.post(path, BAD[name])
        assert response.status_code == 400
        assert "error" in response.json()
    assert live.post(PATHS[0], CHAT).status_code == 200


def test_brackets_in_text_are_not_depth() -> None:
    deep = "[" * 500 + '\\"' + "{" * 500
    assert parse_json(json.dumps({"a": deep}).encode()) == {"a": deep}
    allowed: object = 1
    for _ in range(MAX_DEPTH - 1):
        allowed = [allowed]
    assert parse_json(json.dumps({"a": allowed}).encode())
    with pytest.raises(MalformedError, match="nested"):
        parse_json(json.dumps({"a": [allowed]}).encode())


def test_number_of_lists_and_objects_is_bounded() -> None:
    def nested(count: int) -> bytes:
        return json.dumps({"a": [{}] * (count - 2), "text": "[{" * 60_000}).encode()

    assert parse_json(nested(MAX_PARTS))
    with pytest.raises(MalformedError, match=f"more than {MAX_PARTS} lists"):
        parse_json(nested(MAX_PARTS + 1))


def test_large_body_is_read_beside_the_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, goal = threading.Event(), threading.Event()

    def slow(data: bytes) -> dict[str, Any]:
        if len(data) > 2**18:
            reading.set()
            assert goal.wait(10)
        return parse_json(data)

    monkeypatch.setattr(limits, "parse_json", slow)
    with serving([Say("Hello!")]) as live:
        large = {**CHAT, "messages": [{"role": "user", "content": "x" * 2**19}]}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(live.post, PATHS[0], large)
            try:
                assert reading.wait(10)
                assert live.get("/health").status_code == 200
            finally:
                goal.set()
            assert answer.result().status_code == 200


def test_unknown_field_with_a_very_long_name_is_refused_at_once() -> None:
    name = "abcdefgh" * 2**18
    began = time.perf_counter()
    with pytest.raises(FieldError) as caught:
        Fields({name: 1}, "options").finish()
    # to compare it with the known names takes a second and more
    assert time.perf_counter() - began < 0.2
    assert len(caught.value.line()) + len(caught.value.param) < 300


def test_time_to_check_grows_with_the_length_only() -> None:
    def seconds(count: int) -> float:
        text = b'{"a": "' + b'\\"' * count + b'", "b": [' + b"{}," * count + b"{}]}"
        began = time.perf_counter()
        parse_json(text)
        return time.perf_counter() - began

    small = min(seconds(4_000) for _ in range(5))
    assert min(seconds(16_000) for _ in range(5)) < 10 * small


@pytest.mark.parametrize("path", PATHS)
def test_announced_size_is_refused_before_the_body_comes(live: Live, path: str) -> None:
    with live.connect() as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


def test_chunked_body_is_cut_off_where_it_grows_too_large(live: Live) -> None:
    with live.connect() as connection:
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        # half of the limit too much, and no end in sight
        for _ in range(6):
            connection.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert live.post(PATHS[0], CHAT).status_code == 200


def test_body_that_stops_coming_is_given_up(live: Live) -> None:
    with live.connect() as connection:
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n"
        connection.sendall(head.encode() + b'{"model":')
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nHost: local"])
def test_head_that_stops_coming_is_given_up(live: Live, sent: bytes) -> None:
    with live.connect() as connection:
        connection.sendall(sent)
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 408 ")


def answer_of(connection: socket.socket) -> bytes:
    """Return one answer that ends with a JSON object."""
    data = b""
    while not data.endswith(b"}"):
        part = connection.recv(65536)
        assert part, "the connection was closed"
        data += part
    return data


def test_second_head_on_a_connection_has_its_own_clock(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.5)
        # a connection that waits between requests is not a slow one
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        # but one that has begun with the next is
        assert answer_of(connection).startswith(b"HTTP/1.1 408 ")


def test_turn_may_take_longer_than_a_head(live: Live) -> None:
    gate = threading.Event()
    threading.Timer(0.6, gate.set).start()
    live.backend.scripts = [[Hold(gate), Say("late")]]
    response = live.post(PATHS[0], CHAT)
    assert response.json()["choices"][0]["message"]["content"] == "late"
    live.backend.scripts = [[Say("Hello!")]]


def test_connections_beyond_the_limit_are_told_so(live: Live) -> None:
    eventually(lambda: live.get("/health").status_code == 200)
    held = [live.connect() for _ in range(20)]
    try:
        time.sleep(0.05)
        with live.connect() as more:
            answer = more.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after" in answer
        assert b"too many connections" in answer
    finally:
        for each in held:
            each.close()
    assert eventually(lambda: live.get("/health").status_code == 200)


def test_bad_head_is_400(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
