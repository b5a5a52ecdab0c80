"""Sending a turn's bytes: what the application tells the server, message by message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from hipfire.base.errors import ValidationError
from hipfire.server.openai_replies import ERRORS
from hipfire.server.sse import Last, TurnResponse, data_frame, to_json

Frames = AsyncGenerator[bytes, None]


class Client:
    """Takes what is sent; leaves after `leaves_after` messages, or when `gone` is set."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._leaves_after = leaves_after

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if len(self.sent) == self._leaves_after:
            self.gone.set()
            # the loop notices before anything else happens
            await asyncio.sleep(0.001)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def respond(frames: Frames, client: Client, **options: Any) -> None:
    response = TurnResponse(frames, ERRORS, **{"stream": True, **options})
    scope = {"type": "http", "method": "POST", "path": "/"}
    asyncio.run(asyncio.wait_for(response(scope, client.receive, client.send), 5))


def recorded(*frames: bytes | Exception, log: list[str]) -> Frames:
    async def generate() -> Frames:
        try:
            for frame in frames:
                if isinstance(frame, Exception):
                    raise frame
                yield frame
                log.append(f"after {bytes(frame).decode()}")
        finally:
            log.append("closed")

    return generate()


def test_last_frame_is_settled_before_the_message_ends() -> None:
    log: list[str] = []
    client = Client()

    async def send(message: Any) -> None:
        log.append("end" if not message.get("more_body", True) else message["type"])

    client.send = send  # type: ignore[method-assign]
    respond(recorded(b"a", Last(b"b"), log=log), client)
    assert log == [
        "http.response.start",
        "http.response.body",
        "after a",
        "http.response.body",
        "after b",
        "closed",
        "end",
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_left_with_the_last_bytes_is_not_settled(stream: bool) -> None:
    log: list[str] = []
    respond(recorded(Last(b"b"), log=log), Client(leaves_after=2), stream=stream)
    assert log == ["closed"]


def test_generator_that_waits_is_closed_when_the_client_leaves() -> None:
    log: list[str] = []

    async def wait() -> Frames:
        try:
            yield b"a"
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        finally:
            log.append("closed")

    respond(wait(), Client(leaves_after=2))
    assert log == ["cancelled", "closed"]


def test_client_that_leaves_before_anything_comes_is_sent_nothing() -> None:
    async def wait() -> Frames:
        await asyncio.sleep(60)
        yield b""

    client = Client()
    client.gone.set()
    respond(wait(), client, stream=False)
    assert client.sent == []


def test_whole_reply_has_its_length_and_no_stream_headers() -> None:
    client = Client()
    respond(recorded(Last(b'{"a":1}'), log=[]), client, stream=False)
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-length"] == b"7"
    assert b"cache-control" not in headers
    assert client.body == b'{"a":1}'
    assert client.sent[-1]["more_body"] is False


def test_stream_has_no_length_and_is_not_to_be_stored() -> None:
    client = Client()
    respond(recorded(Last(b"x"), log=[]), client, media_type="text/event-stream", preamble=b"hello ")
    headers = dict(client.sent[0]["headers"])
    assert b"content-length" not in headers
    assert headers[b"cache-control"] == b"no-cache"
    assert client.body == b"hello x"


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ValidationError("no such thing"), 400, b"no such thing"),
        (RuntimeError("secret /path"), 500, b"internal"),
    ],
)
def test_error_before_anything_is_a_response(
    error: Exception, status: int, shown: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client()
    with caplog.at_level(logging.ERROR, logger="hipfire"):
        respond(recorded(error, log=[]), client)
    assert client.sent[0]["status"] == status
    assert shown in client.body
    assert b"secret" not in client.body
    assert ("secret" in caplog.text) is (status == 500)


def test_error_after_the_head_is_a_frame_and_the_end() -> None:
    client = Client()
    respond(recorded(b"a", RuntimeError("secret"), b"never", log=[]), client)
    assert client.body.startswith(b"adata: {")
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert b"secret" not in client.body
    assert b"never" not in client.body


def test_error_while_settling_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def generate() -> Frames:
        yield Last(b"all")
        raise RuntimeError("commit failed")

    client = Client()
    respond(generate(), client)
    assert client.body == b"all"
    assert client.sent[-1]["more_body"] is False
    assert "commit failed" in caplog.text


def test_keepalives_fill_silence_and_do_not_count_as_frames() -> None:
    async def slow() -> Frames:
        await asyncio.sleep(0.12)
        yield b"a"
        await asyncio.sleep(0.12)
        yield Last(b"b")

    client = Client()
    respond(slow(), client, head_delay=0.05, silence=0.02, preamble=b"P", keepalive=b".")
    before, after = client.body.split(b"a")
    assert before.startswith(b"P.")
    assert set(before[1:]) == set(after[:-1]) == {ord(".")}
    assert after.endswith(b"b")


@pytest.mark.parametrize("make", [to_json, data_frame])
def test_json_is_one_line_of_utf8(make: Callable[[object], bytes]) -> None:
    made = make({"text": "é\n\u2028 😀", "half": "\ud800"})
    assert made.strip().count(b"\n") == 0
    assert "é\\n\u2028 😀".encode() in made
    with pytest.raises(ValueError, match="Out of range"):
        make({"x": float("nan")})
