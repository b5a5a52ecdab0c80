"""Sending a turn to a client: delayed head, frames, keepalives, errors in mid-stream, and who is still there.

An API adapter writes one asynchronous generator of bytes, and this file sends them. It knows no API and no
turn: what frames mean is the adapter's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hipfire.base import log
from hipfire.base.errors import HipfireError
from hipfire.server.errors import headers_of, status_of

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
Frames = AsyncGenerator[bytes, None]


class Last(bytes):
    """The frame after which a client has everything.

    The generator is resumed after it only if the client was still there when the bytes were handed to the
    socket, so code after `yield Last(...)` may commit the turn. In any other case it is closed at the yield.
    """


class ClientGoneError(Exception):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one API tells errors: the JSON body of a response, and the bytes in a stream that has begun."""

    body: Callable[[Exception], dict[str, Any]]
    frame: Callable[[Exception], bytes]

    def response(self, error: Exception) -> Response:
        """Return the response that tells `error`."""
        return Response(
            to_json(self.body(error)), status_of(error), headers_of(error), media_type="application/json"
        )


def to_json(value: object) -> bytes:
    """Return compact JSON in UTF-8; NaN and infinities are refused with ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # a model's bytes never make half of a surrogate pair, but echoed text could
    return text.encode("utf-8", "replace")


def data_frame(value: object, event: str = "") -> bytes:
    """Return one server-sent event that holds `value` as JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + to_json(value) + b"\n\n"


class TurnResponse(Response):
    """A response whose bytes come from a generator that runs a turn.

    With `stream` false the generator yields one `Last`, the whole body. With `stream` true the head goes out
    with the first frame or after `head_delay` seconds, whichever is sooner, and `preamble` with it; then
    `keepalive` goes out after every `silence` seconds without a frame. An error before the head is a
    response of its own; a later one is a frame, and the stream ends. A client that leaves closes the
    generator at once, in whatever it waits for.
    """

    def __init__(
        self,
        frames: Frames,
        errors: ErrorShape,
        *,
        stream: bool,
        media_type: str = "application/json",
        preamble: bytes = b"",
        keepalive: bytes = KEEPALIVE,
        head_delay: float = 15.0,
        silence: float = 15.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, dict(headers or {}), media_type)
        self._frames = frames
        self._errors = errors
        self._stream = stream
        self._preamble = preamble
        self._keepalive = keepalive
        self._head_delay = head_delay
        self._silence = silence
        self._step: asyncio.Task[bytes | None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generator and send what it yields."""
        gone = asyncio.create_task(_disconnect(receive))
        try:
            try:
                first = await self._next(gone, self._head_delay if self._stream else None)
            except ClientGoneError:
                raise
            except Exception as error:
                report(error)
                await self._errors.response(error)(scope, receive, send)
                return
            if self._stream:
                await self._send_stream(first, gone, send)
            else:
                await self._send_whole(first or b"", gone, send)
        except ClientGoneError:
            return
        finally:
            gone.cancel()
            await self._close()

    async def _send_whole(self, body: bytes, gone: asyncio.Task[None], send: Send) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        # the message stays open until the turn is settled, although the client has all of it
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._settle(gone)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_stream(self, first: bytes | None, gone: asyncio.Task[None], send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        frame, lead = first, self._preamble
        while frame is not None:
            # nothing yet: the generator's frame is still being made
            await send(_body(lead + (frame or self._keepalive)))
            lead = b""
            if isinstance(frame, Last):
                await self._settle(gone)
                break
            try:
                frame = await self._next(gone, self._silence)
            except ClientGoneError:
                raise
            except Exception as error:
                report(error)
                await send(_body(self._errors.frame(error)))
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, gone: asyncio.Task[None], seconds: float | None) -> bytes | None:
        """Return the next frame, None at the end, b"" if it takes longer than `seconds`."""
        if self._step is None:
            self._step = asyncio.create_task(_advance(self._frames))
        await asyncio.wait({self._step, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGoneError
        if not self._step.done():
            return b""
        step, self._step = self._step, None
        return step.result()

    async def _settle(self, gone: asyncio.Task[None]) -> None:
        """Resume the generator after its last frame, unless the client has left before it had that."""
        if gone.done():
            raise ClientGoneError
        try:
            await _advance(self._frames)
        except Exception as error:
            # the client has its answer, so nobody but the log can be told
            report(error)

    async def _close(self) -> None:
        if self._step is not None:
            self._step.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._step
        await self._frames.aclose()


def report(error: Exception) -> None:
    """Log an error; one that hipfire did not foresee with its traceback."""
    if isinstance(error, HipfireError):
        log.logger().info(f"request ended with {status_of(error)}: {error.line()}")
    else:
        log.logger().error(f"a request failed: {error!r}", exc_info=error)


async def _advance(frames: Frames) -> bytes | None:
    return await anext(frames, None)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has closed its connection; its request was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
