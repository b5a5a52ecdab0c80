"""One streamed chat request as a client makes it, and what came back.

The body's bytes are sent exactly as given, so that their hash names the request. Whatever breaks the stream
is a `fault` of the reply, never an exception: a harness must report what it saw. This file does not know
prompts, detectors or processes.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

STREAM_TYPE: Final = "text/event-stream"
MAX_BODY: Final = 64 << 20
ERROR_PREVIEW: Final = 300
MAX_CALLS: Final = 256


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int


@dataclass(slots=True)
class Reply:
    """What one request gave.

    `pieces` are (milliseconds since the request, visible text) in order. `fault` says in one line why the
    reply is not whole; "" if it is. `ttft_s` is the time to the first piece of any channel.
    """

    id: str = ""
    status: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    hipfire: dict[str, Any] = field(default_factory=dict)
    pieces: list[tuple[float, str]] = field(default_factory=list)
    ttft_s: float | None = None
    wall_s: float = 0.0
    fault: str = ""


class StreamError(Exception):
    """The stream is not what the protocol says."""


def chat(address: Address, body: bytes, timeout_s: float) -> Reply:
    """POST `body` to /v1/chat/completions and return the reply; `timeout_s` bounds all of it."""
    reply = Reply()
    start = time.monotonic()
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json", "Accept": STREAM_TYPE}
        )
        response = connection.getresponse()
        reply.status = response.status
        if response.status != 200 or STREAM_TYPE not in (response.getheader("Content-Type") or ""):
            raise StreamError(f"status {response.status}: {_preview(response)}")
        _read_stream(reply, response, start, start + timeout_s)
    except StreamError as error:
        reply.fault = str(error)
    except (OSError, http.client.HTTPException) as error:
        reply.fault = f"{type(error).__name__}: {error}"
    finally:
        reply.wall_s = time.monotonic() - start
        connection.close()
    return reply


def get_json(address: Address, path: str, timeout_s: float) -> Any:
    """Return the JSON that a GET gives, or None if there is no answer or none in JSON."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read(MAX_BODY))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _read_stream(reply: Reply, response: http.client.HTTPResponse, start: float, deadline: float) -> None:
    ended = False
    for data in _events(response, deadline):
        if data == "[DONE]":
            ended = True
            break
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise StreamError(f"a frame is not JSON: {data[:ERROR_PREVIEW]!r}") from None
        if not isinstance(chunk, dict):
            raise StreamError("a frame is not an object")
        if chunk.get("error") is not None:
            raise StreamError(f"error in the stream: {_error_text(chunk['error'])}")
        try:
            _take(reply, chunk, time.monotonic() - start)
        except (AttributeError, TypeError) as error:
            raise StreamError(f"a chunk has fields of the wrong type: {error}") from None
    if not ended:
        raise StreamError("the stream ended without [DONE]")
    if reply.finish is None:
        raise StreamError("the stream ended without a finish_reason")


def _events(response: http.client.HTTPResponse, deadline: float) -> Iterator[str]:
    """Yield the data of each server-sent event; comments and other fields are skipped."""
    lines: list[str] = []
    while raw := response.readline():
        if time.monotonic() > deadline:
            raise StreamError("the reply took too long")
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if not line:
            if lines:
                yield "\n".join(lines)
            lines = []
        elif line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
    if lines:
        raise StreamError("the stream ended within an event")


def _take(reply: Reply, chunk: dict[str, Any], elapsed_s: float) -> None:
    """Add one chunk to the reply."""
    reply.id = reply.id or str(chunk.get("id") or "")
    reply.usage.update(chunk.get("usage") or {})
    reply.timings.update(chunk.get("timings") or {})
    reply.hipfire.update(chunk.get("hipfire") or {})
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        content, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or ()
        if reply.ttft_s is None and (content or reasoning or calls):
            reply.ttft_s = elapsed_s
        if content:
            reply.content += content
            reply.pieces.append((elapsed_s * 1000, content))
        reply.reasoning += reasoning
        for call in calls:
            merge_call(reply.tool_calls, call)
        reply.finish = choice.get("finish_reason") or reply.finish


def merge_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Add a piece of a tool call to the calls: names and ids are set, arguments are joined, by index."""
    index = delta.get("index", len(calls))
    if not 0 <= index < MAX_CALLS:
        raise StreamError(f"a tool call has the index {index}")
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _preview(response: http.client.HTTPResponse) -> str:
    text = response.read(MAX_BODY).decode("utf-8", errors="replace")
    try:
        return _error_text(json.loads(text).get("error"))
    except (ValueError, AttributeError):
        return text[:ERROR_PREVIEW]


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:ERROR_PREVIEW]
