"""A client of the load run: one end is one end, and whatever else a server sends is a fault."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hipfire.validate.harness_client import Address
from hipfire.validate.load_client import Outcome, perform
from hipfire.validate.load_requests import Request

BODY = b'{"model": "m"}'
PLAIN = Request(1, "plain", BODY)
STREAM = Request(1, "stream", BODY, stream=True)
TWO = Request(1, "two", BODY, stream=True, choices=2)
DONE = "data: [DONE]\n\n"


def whole(status: int, value: object, *, extra: str = "", headers: str = "") -> bytes:
    data = json.dumps(value)
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}"
    )
    return f"{head}\r\n{data}{extra}".encode()


def stream(*events: str, end: str = "0\r\n\r\n") -> bytes:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return (head + "".join(f"{len(event):x}\r\n{event}\r\n" for event in events) + end).encode()


def chunk(text: str, finish: str | None = None, index: int = 0) -> str:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def error_of(code: str) -> dict[str, object]:
    return {"error": {"message": "no luck", "type": "server_error", "param": None, "code": code}}


def reply(*texts: str) -> dict[str, object]:
    made = [
        {"index": index, "message": {"content": text}, "finish_reason": "stop"}
        for index, text in enumerate(texts)
    ]
    return {"choices": made, "hipfire": {"batch": 3}}


@contextmanager
def answering(handle: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Serve one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                handle(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            thread.join(10)


def read_request(connection: socket.socket) -> None:
    """Read all of a request: closing with unread bytes would reset the connection."""
    data = b""
    while not data.endswith(BODY):
        data += connection.recv(65536)


def ask(request: Request, answer: bytes, *, pause_s: float = 0.0, timeout_s: float = 5.0) -> Outcome:
    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(answer)
        time.sleep(pause_s)

    with answering(handle) as address:
        return perform(address, request, timeout_s)


def test_answers_that_are_whole() -> None:
    outcome = ask(PLAIN, whole(200, reply("Hello")))
    assert (outcome.end, outcome.texts, outcome.batch) == ("answered", ["Hello"], 3)
    outcome = ask(STREAM, stream(": keepalive\n\n", chunk("Hel"), chunk("lo"), chunk("", "stop"), DONE))
    assert (outcome.end, outcome.texts, outcome.pieces) == ("answered", ["Hello"], 2)
    # events may be cut anywhere
    joined = chunk("a") + chunk("b", "stop", 1) + chunk("", "length") + DONE
    outcome = ask(TWO, stream(*joined))
    assert (outcome.end, outcome.texts) == ("answered", ["a", "b"])


def test_errors_that_have_a_type() -> None:
    outcome = ask(PLAIN, whole(503, error_of("transient"), headers="Retry-After: 1\r\n"))
    assert (outcome.end, outcome.status, outcome.code) == ("unavailable", 503, "transient")
    assert outcome.retry_after
    outcome = ask(STREAM, whole(404, error_of("model_not_found")))
    assert (outcome.end, outcome.status, outcome.detail) == ("refused", 404, "no luck")
    outcome = ask(STREAM, stream(chunk("Hel"), f"data: {json.dumps(error_of('transport'))}\n\n", DONE))
    assert (outcome.end, outcome.code, outcome.texts) == ("unavailable", "transport", ["Hel"])
    late = json.dumps(error_of("context_length_exceeded"))
    outcome = ask(STREAM, stream(": keepalive\n\n", f"data: {late}\n\n", DONE))
    assert (outcome.end, outcome.status, outcome.code) == ("refused", 200, "context_length_exceeded")


FINISHED = (chunk("Hi"), chunk("", "stop"))
FAULTS = {
    "no answer came": (PLAIN, b""),
    "does not begin with a status line": (PLAIN, b"hello\r\n\r\n"),
    "has no length": (PLAIN, b"HTTP/1.1 200 OK\r\n\r\n{}"),
    "length cannot be read": (PLAIN, b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}"),
    "ended within the answer": (PLAIN, whole(200, reply("Hello"))[:-3]),
    "bytes follow the end": (PLAIN, whole(200, reply("Hello"), extra="more")),
    "was not asked for": (PLAIN, stream(*FINISHED, DONE)),
    "a stream was asked for": (STREAM, whole(200, reply("Hello"))),
    "2 choices came, 1 were": (PLAIN, whole(200, reply("a", "b"))),
    "has no finish": (
        PLAIN,
        whole(200, {"choices": [{"index": 0, "message": {"content": ""}, "finish_reason": None}]}),
    ),
    "the answer lacks": (PLAIN, whole(200, {"id": 1})),
    "an error without": (PLAIN, whole(500, {"detail": "broken"})),
    "this is not JSON": (STREAM, stream("data: {\n\n", DONE)),
    "is not an object": (STREAM, stream("data: []\n\n", DONE)),
    "has no data": (STREAM, stream("event: x\n\n", DONE)),
    "a chunk lacks": (STREAM, stream('data: {"choices": [{}]}\n\n', DONE)),
    "without [DONE]": (STREAM, stream(*FINISHED)),
    "0 of 1 choices have a finish": (STREAM, stream(chunk("Hi"), DONE)),
    "1 of 2 choices have a finish": (TWO, stream(*FINISHED, DONE)),
    "goes on after its finish": (STREAM, stream(*FINISHED, chunk("", "stop"), DONE)),
    "follows [DONE]": (STREAM, stream(*FINISHED, DONE, DONE)),
    "follows an error": (
        STREAM,
        stream(f"data: {json.dumps(error_of('transient'))}\n\n", chunk("x"), DONE),
    ),
    "connection ended within": (STREAM, stream(*FINISHED, DONE, end="")),
}


@pytest.mark.parametrize("words", FAULTS)
def test_anything_else_is_a_fault(words: str) -> None:
    request, answer = FAULTS[words]
    outcome = ask(request, answer)
    assert outcome.end == "fault"
    assert words in outcome.detail
    assert not outcome.hung


def test_an_answer_that_never_ends_hangs_although_the_server_sends_signs_of_life() -> None:
    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(stream(chunk("Hi"), end=""))
        with contextlib.suppress(OSError):
            for _ in range(12):
                time.sleep(0.05)
                connection.sendall(b"d\r\n: keepalive\n\n\r\n")

    with answering(handle) as address:
        outcome = perform(address, STREAM, 0.3)
    assert (outcome.end, outcome.hung, outcome.detail) == ("fault", True, "no end within 0.3 s")
    assert 0.3 <= outcome.wall_s < 1.0


def test_a_refused_connection_is_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
    assert perform(address, PLAIN, 1.0).end == "fault"


@pytest.mark.parametrize("abrupt", [False, True])
def test_a_client_leaves_in_the_middle_of_a_stream(abrupt: bool) -> None:
    seen: list[str] = []

    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(stream(chunk("a"), chunk("b"), chunk("c"), end=""))
        try:
            seen.append("end" if connection.recv(1) == b"" else "data")
        except ConnectionResetError:
            seen.append("reset")

    request = Request(1, "cancel", BODY, stream=True, pieces=2, abrupt=abrupt)
    with answering(handle) as address:
        outcome = perform(address, request, 5.0)
    assert (outcome.end, outcome.texts, outcome.pieces) == ("left", ["ab"], 2)
    # unread bytes make the system reset an ordinary close too
    assert seen == ["reset"] if abrupt else seen[0] in ("end", "reset")


def test_a_client_gives_up_when_its_patience_ends() -> None:
    request = Request(1, "deadline", BODY, patience_s=0.1)
    outcome = ask(request, b"", pause_s=0.4)
    assert (outcome.end, outcome.hung) == ("left", False)
    assert 0.1 <= outcome.wall_s < 0.35
    assert ask(request, whole(200, reply("Hello"))).end == "answered"


@pytest.mark.parametrize(
    ("framing", "head", "sent"),
    [
        ("whole", b"Content-Length: 40000", 40_000),
        ("half", b"Content-Length: 40000", 20_000),
        ("announced", b"Content-Length: 40000", 16_384),
        ("chunked", b"Transfer-Encoding: chunked", 40_000 + 3 * 8 - 1 + 1),
    ],
)
def test_how_much_of_a_body_is_sent(framing: str, head: bytes, sent: int) -> None:
    received = bytearray()

    def handle(connection: socket.socket) -> None:
        connection.settimeout(5)
        while part := connection.recv(65536):
            received.extend(part)

    request = Request(
        1,
        "torn",
        b"x" * 40_000,
        framing=framing,
        patience_s=0.05,
        reads=False,  # type: ignore[arg-type]
    )
    with answering(handle) as address:
        assert perform(address, request, 5.0).end == "left"
    first, _, body = bytes(received).partition(b"\r\n\r\n")
    assert head in first
    assert len(body) == sent
