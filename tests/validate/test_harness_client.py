"""The harness's client: whatever a server sends, it ends with a reply that says what was seen."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hipfire.validate.harness_client import Address, Reply, chat, get_json

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TEXT = b'data: {"id": "a", "choices": [{"delta": {"content": "Hi"}}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@contextmanager
def serving(answer: bytes, received: list[bytes] | None = None) -> Iterator[Address]:
    """A server that answers one request with these bytes and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                data = connection.recv(1 << 16)
                while b"\r\n\r\n" not in data or (b"POST" in data and not data.endswith(b"}")):
                    data += connection.recv(1 << 16)
                if received is not None:
                    received.append(data)
                connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        thread.join(timeout=10)


def ask(answer: bytes, timeout_s: float = 10.0) -> Reply:
    with serving(answer) as address:
        return chat(address, b"{}", timeout_s)


def test_a_whole_stream_with_everything_that_may_come_between() -> None:
    stream = (
        b": keepalive\r\n\r\nevent: x\nid: 1\nretry: 5\n\n"
        b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n'
        b'data: {"id": "a", "choices": [{"delta": {"role": "assistant", "content": null}}]}\r\n\r\n'
        b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
        b'data:{"choices":\ndata: [{"delta": {"content": "H\\u00e9"}}]}\n\n'
        + 'data: {"choices": [{"delta": {"content": "llo ☂"}}], "timings": {"prefill_ms": 2}}\n\n'.encode()
        + END
        + b'data: {"choices": [{"delta": {"content": "after the end"}}]}\n\n'
    )
    reply = ask(HEAD + stream)
    assert (reply.fault, reply.finish, reply.id) == ("", "stop", "a")
    assert (reply.reasoning, reply.content) == ("hm", "Héllo ☂")
    assert (reply.usage, reply.timings) == ({"prompt_tokens": 3}, {"prefill_ms": 2})
    assert [text for _, text in reply.pieces] == ["Hé", "llo ☂"]
    assert reply.ttft_s is not None
    assert 0 <= reply.ttft_s <= reply.wall_s


def test_the_bytes_of_the_body_arrive_as_they_are() -> None:
    received: list[bytes] = []
    with serving(HEAD + END, received) as address:
        chat(address, '{"a":  "é"}'.encode(), 10.0)
    assert received[0].endswith('\r\n\r\n{"a":  "é"}'.encode())


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (HEAD + TEXT, "the stream ended without [DONE]"),
        (HEAD + TEXT + b"data: [DONE]\n\n", "the stream ended without a finish_reason"),
        (HEAD + TEXT + b'data: {"choices": [{"del', "the stream ended within an event"),
        (HEAD + TEXT + b'data: {"choices": [{"del\n\n', "a frame is not JSON"),
        (HEAD + TEXT + b"data: " + b"[" * 10**5 + b"\n\n", "a frame is not JSON"),
        (HEAD + b"data: [1]\n\n", "a frame is not an object"),
        (HEAD + b'data: {"choices": [{"delta": "x"}]}\n\n', "fields of the wrong type"),
        (HEAD + b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "fields of the wrong type"),
        (
            HEAD + b'data: {"choices": [{"delta": {"tool_calls": [{"index": 1000000000}]}}]}\n\n',
            "has the index",
        ),
        (HEAD + b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n', "error in the stream: gone"),
        (
            b"HTTP/1.1 400 Bad\r\nContent-Length: 27\r\n\r\n" + b'{"error":{"message":"bad"}}',
            "status 400: bad",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\noops", "status 200: oops"),
        (b"", "RemoteDisconnected"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
    ],
)
def test_a_broken_answer_is_a_fault_and_keeps_what_came(answer: bytes, fault: str) -> None:
    reply = ask(answer)
    assert fault in reply.fault
    assert reply.content == ("Hi" if TEXT in answer else "")


def test_silence_ends_with_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
        reply = chat(address, b"{}", 0.2)
    assert "timed out" in reply.fault
    assert reply.wall_s < 5


def test_a_stream_of_comments_ends_with_the_timeout() -> None:
    def drip(listener: socket.socket, stop: threading.Event) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(HEAD)
            while not stop.wait(0.05):
                try:
                    connection.sendall(b": keepalive\n\n")
                except OSError:
                    return

    assert dripped(drip).fault == "the reply took too long"


def dripped(drip: Callable[[socket.socket, threading.Event], None]) -> Reply:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener, stop))
        thread.start()
        reply = chat(Address("127.0.0.1", listener.getsockname()[1]), b"{}", 0.4)
        stop.set()
        thread.join(timeout=10)
    return reply


def test_questions_without_an_answer_give_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert get_json(Address("127.0.0.1", port), "/health", 1.0) is None
    with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{x") as address:
        assert get_json(address, "/health", 5.0) is None
    with serving(b'HTTP/1.1 503 No\r\nContent-Length: 8\r\n\r\n{"a": 1}') as address:
        assert get_json(address, "/health", 5.0) == {"a": 1}
