"""What comes from a server over the wire: addresses, event streams, and errors as one line with a hint.

This file opens no connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests

from hipfire.base.errors import HipfireError, TransportError, ValidationError
from hipfire.base.printable import one_line

MAX_ERROR_CHARS = 500
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}


class RefusedError(ValidationError):
    """The server refuses the request; `status` is its HTTP status."""

    def __init__(self, message: str, status: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class FailedError(TransportError):
    """The server could not answer, or broke off."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def base(self) -> str:
        """Return the address to reach it by; an address that means "all" is reached on this machine."""
        host = WILDCARDS.get(self.host, self.host).strip("[]")
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def sse_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each event of a stream, however it is cut into chunks.

    Comments and other fields are left out. An event that the stream's end cuts off is not yielded.
    """
    held = b""
    data: list[str] = []
    for chunk in chunks:
        held += chunk
        lines = held.split(b"\n")
        held = lines.pop()
        for line in lines:
            text = line.removesuffix(b"\r").decode()
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []


def json_object(text: str, address: Address) -> Mapping[str, Any]:
    """Return the object that `text` spells; anything else is a FailedError that names the server."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise FailedError(
            f"{address} sent something that is no JSON object: {one_line(text)[:80]!r}",
            hint="is it a hipfire server?",
        )
    return value


def refusal(response: Any, address: Address) -> HipfireError:
    """Return the error that a response with a status other than 200 stands for."""
    try:
        text = response.content.decode(errors="replace")
    except requests.RequestException as error:
        text = reason(error)
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, Mapping):
        body = {"error": {"message": f"{response.reason}: {text}"}}
    return reported(body, response.status_code, address, wait=response.headers.get("Retry-After"))


def reported(
    body: Mapping[str, Any], status: int, address: Address, *, wait: str | None = None
) -> HipfireError:
    """Return the error that a body reports: RefusedError for what the client can change, else FailedError."""
    fault = body.get("error")
    message = fault.get("message") if isinstance(fault, Mapping) else fault
    said = one_line(str(message or body))[:MAX_ERROR_CHARS]
    client = isinstance(fault, Mapping) and fault.get("type") == "invalid_request_error"
    if status in (401, 403):
        return RefusedError(said, status, hint="serve.token_file names the file with the server's token")
    if client or 400 <= status < 500:
        return RefusedError(said, status)
    hint = f"try again in {wait} s" if wait else ""
    return FailedError(f"the server at {address} failed: {said}", hint=hint)


def reason(error: Exception) -> str:
    """Return what went wrong, without the objects that the library's messages are wrapped in."""
    if isinstance(error, requests.ConnectTimeout | requests.ReadTimeout):
        return "no answer in time"
    text = one_line(str(error))
    if "Connection refused" in text:
        return "connection refused"
    return text[:MAX_ERROR_CHARS] or type(error).__name__
