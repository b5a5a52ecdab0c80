"""One client of a load run: it sends a request as its plan says, and tells how that ended.

It reads HTTP itself, so that a second answer, bytes after the end, or an end that is missing are seen, where
a lenient library would hide them. Nothing raises: whatever goes wrong is a fault of the outcome. This file
knows no kinds of request.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from typing import Any, Final

from hipfire.validate.harness_client import Address
from hipfire.validate.load_requests import CHAT_PATH, RETRY_CODES, End, Request

PREVIEW: Final = 200
BLOCK: Final = 16 * 1024
MAX_LINE: Final = 1 << 20
# closes with a reset where an ordinary close would say goodbye
RESET: Final = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Outcome:
    """How a request ended.

    `texts` are those of its choices as far as they were read, `batch` how many turns shared a step, `code`
    and `detail` an error's code and message, or what a fault is. `hung` says that the answer never came.
    """

    number: int
    kind: str
    end: End = "fault"
    status: int = 0
    code: str = ""
    detail: str = ""
    texts: list[str] = field(default_factory=list)
    pieces: int = 0
    batch: int = 0
    wall_s: float = 0.0
    retry_after: bool = False
    hung: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"wall_s": round(self.wall_s, 3)}


class BrokenError(Exception):
    """An answer is not what HTTP or the API says."""


class _LeftError(Exception):
    """The client has left, as it was meant to."""


class _Line:
    """One connection, read against a deadline."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until
        self._file: BufferedReader = sock.makefile("rb")

    def read(self, count: int) -> bytes:
        """Return exactly so many bytes."""
        self._wait()
        data = self._file.read(count)
        if len(data) < count:
            raise BrokenError("the connection ended within the answer")
        return data

    def line(self, missing: str = "the connection ended within the answer") -> str:
        """Return one line without its end; `missing` is the fault if there is none."""
        self._wait()
        data = self._file.readline(MAX_LINE)
        if not data.endswith(b"\n"):
            raise BrokenError(missing)
        return data.decode("latin-1").rstrip("\r\n")

    def expect_end(self) -> None:
        """Raise unless the server closes now: the answer is complete."""
        self._wait()
        if self._file.read(1):
            raise BrokenError("bytes follow the end of the answer")

    def close(self) -> None:
        """Let go of the socket."""
        self._file.close()

    def _wait(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)


def perform(address: Address, request: Request, timeout_s: float) -> Outcome:
    """Send a request and return how it ended; after `timeout_s` it hangs, which is a fault."""
    outcome = Outcome(request.number, request.kind)
    began = time.monotonic()
    leaves = request.patience_s is not None
    patience = min(timeout_s, request.patience_s) if request.patience_s is not None else timeout_s
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as sock:
            if request.abrupt:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            _send(sock, address, request)
            if not request.reads:
                time.sleep(patience)
                raise _LeftError
            _receive(sock, request, outcome, began + patience)
    except _LeftError:
        outcome.end = "left"
    except TimeoutError:
        outcome.hung = not leaves
        outcome.end = "left" if leaves else "fault"
        outcome.detail = "" if leaves else f"no end within {timeout_s:g} s"
    except (OSError, BrokenError) as error:
        outcome.end, outcome.detail = "fault", str(error) or type(error).__name__
    outcome.wall_s = time.monotonic() - began
    return outcome


def _send(sock: socket.socket, address: Address, request: Request) -> None:
    head = [f"POST {CHAT_PATH} HTTP/1.1", f"Host: {address.host}:{address.port}", "Connection: close"]
    head += ["Content-Type: application/json"]
    head += [
        "Transfer-Encoding: chunked"
        if request.framing == "chunked"
        else f"Content-Length: {len(request.body)}"
    ]
    sock.sendall("\r\n".join([*head, "", ""]).encode("ascii"))
    body = request.body
    if request.framing == "half":
        sock.sendall(body[: len(body) // 2])
    elif request.framing == "announced":
        # the server need not read what it will refuse, and a reset could overtake its answer
        sock.sendall(body[:BLOCK])
    elif request.framing == "chunked":
        for start in range(0, len(body), BLOCK):
            part = body[start : start + BLOCK]
            sock.sendall(f"{len(part):x}\r\n".encode("ascii") + part + b"\r\n")
    else:
        sock.sendall(body)


def _receive(sock: socket.socket, request: Request, outcome: Outcome, until: float) -> None:
    line = _Line(sock, until)
    try:
        outcome.status, headers = _head(line)
        outcome.retry_after = "retry-after" in headers
        if headers.get("content-type", "").startswith("text/event-stream"):
            if outcome.status != 200 or not request.stream:
                raise BrokenError(f"an event stream with status {outcome.status} was not asked for")
            _Stream(request, outcome).take(line, headers)
        else:
            body = b"".join(_parts(line, headers))
            line.expect_end()
            _take_whole(request, outcome, body)
    finally:
        line.close()


def _head(line: _Line) -> tuple[int, dict[str, str]]:
    words = line.line("no answer came").split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise BrokenError("the answer does not begin with a status line")
    headers: dict[str, str] = {}
    while text := line.line():
        name, _, value = text.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


def _parts(line: _Line, headers: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the body's parts as they come."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(line.line(), 16):
                yield line.read(size)
                line.read(2)
            line.read(2)
        elif "content-length" in headers:
            yield line.read(int(headers["content-length"]))
        else:
            raise BrokenError("the answer has no length")
    except ValueError as error:
        raise BrokenError(f"the answer's length cannot be read: {error}") from error


def _take_whole(request: Request, outcome: Outcome, body: bytes) -> None:
    """Note an answer that came in one piece: a completion, or an error."""
    value = _object(body)
    if outcome.status != 200:
        _note_error(outcome, value.get("error"))
        return
    if request.stream:
        raise BrokenError("a stream was asked for and a whole answer came")
    try:
        choices = value["choices"]
        if [choice["index"] for choice in choices] != list(range(request.choices)):
            raise BrokenError(f"{len(choices)} choices came, {request.choices} were asked for")
        if not all(choice["finish_reason"] in ("stop", "length") for choice in choices):
            raise BrokenError("a choice has no finish")
        outcome.texts = [str(choice["message"]["content"]) for choice in choices]
        outcome.batch = int((value.get("hipfire") or {}).get("batch", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenError(f"the answer lacks what it must have: {error!r}") from error
    outcome.end = "answered"


class _Stream:
    """The events of a stream, which must have one end: a finish for each choice or one error, then [DONE]."""

    def __init__(self, request: Request, outcome: Outcome) -> None:
        self._request = request
        self._outcome = outcome
        self._finished: set[int] = set()
        self._failed = False
        self._done = False

    def take(self, line: _Line, headers: Mapping[str, str]) -> None:
        """Read to the end, or until the client leaves."""
        self._outcome.texts = [""] * self._request.choices
        held = b""
        for part in _parts(line, headers):
            *events, held = (held + part).split(b"\n\n")
            for event in events:
                self._event(event)
        line.expect_end()
        if held or not self._done:
            raise BrokenError("the stream ended without [DONE]")
        if not self._failed:
            if len(self._finished) != self._request.choices:
                raise BrokenError(f"{len(self._finished)} of {self._request.choices} choices have a finish")
            self._outcome.end = "answered"

    def _event(self, event: bytes) -> None:
        if event.startswith(b":"):
            return
        if self._done:
            raise BrokenError("an event follows [DONE]")
        if event == b"data: [DONE]":
            self._done = True
            return
        if self._failed:
            raise BrokenError("an event follows an error")
        if not event.startswith(b"data: "):
            raise BrokenError(f"an event has no data: {event[:PREVIEW]!r}")
        chunk = _object(event[6:])
        if "error" in chunk:
            self._failed = True
            _note_error(self._outcome, chunk["error"])
            return
        try:
            for choice in chunk["choices"]:
                self._choice(choice["index"], choice["delta"].get("content") or "", choice["finish_reason"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise BrokenError(f"a chunk lacks what it must have: {error!r}") from error

    def _choice(self, index: int, text: str, finish: str | None) -> None:
        if index in self._finished:
            raise BrokenError(f"choice {index} goes on after its finish")
        self._outcome.texts[index] += text
        if finish is not None:
            self._finished.add(index)
        if text:
            self._outcome.pieces += 1
            if self._request.pieces is not None and self._outcome.pieces >= self._request.pieces:
                raise _LeftError


def _note_error(outcome: Outcome, error: object) -> None:
    if not isinstance(error, dict) or not all(error.get(name) for name in ("message", "type", "code")):
        raise BrokenError(f"an error without message, type or code: {str(error)[:PREVIEW]}")
    outcome.code, outcome.detail = str(error["code"]), str(error["message"])[:PREVIEW]
    again = outcome.status == 503 or outcome.code in RETRY_CODES
    outcome.end = "unavailable" if again else "refused"


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BrokenError(f"this is not JSON: {data[:PREVIEW]!r}") from None
    if not isinstance(value, dict):
        raise BrokenError("the JSON is not an object")
    return value
