"""A small client of a running server: health, models, and replies as streams of text.

It never uses a proxy: the server is on this machine or named by its owner. This file prints nothing and
knows no settings; what a reply looks like on a terminal is for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import requests

from hipfire.base.printable import one_line
from hipfire.cli.remote_wire import (
    Address,
    FailedError,
    json_object,
    reason,
    refusal,
    reported,
    sse_events,
)

CONNECT_SECONDS = 3.0
# the server breaks its silence every 15 seconds
SILENCE_SECONDS = 120.0

Channel = Literal["answer", "reasoning"]


class Piece(NamedTuple):
    """Text of a reply and the channel that it belongs to."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """What a server says of itself; `status` is "ok", "restarting" or "unhealthy"."""

    status: str
    pid: int | None
    token: str | None
    model: str | None
    loading: str | None


@dataclass
class Reply:
    """A reply as it comes: iterate over its pieces, then read what came with them.

    `usage`, `timings` and `extra` are the server's own objects, empty where it sent none. Leaving the context
    before the end closes the connection, by which the server stops generating. Iterating raises FailedError
    when the server breaks off, and the error that it reports otherwise.
    """

    response: Any
    address: Address
    answer: str = ""
    reasoning: str = ""
    finish: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.response.close()

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces in the order of their arrival."""
        events = self._events()
        for event in events:
            if event == "[DONE]":
                # a server that still sends must not take us for gone: it would forget the turn
                with suppress(FailedError):
                    deque(events, maxlen=0)
                return
            yield from self._read(json_object(event, self.address))
        raise FailedError(
            f"{self.address} ended the reply before it was complete", hint="look at its log and ask again"
        )

    def _events(self) -> Iterator[str]:
        # a body without chunks of its own has to be read byte by byte to come at once
        size = None if self.response.raw.chunked else 1
        try:
            yield from sse_events(self.response.iter_content(chunk_size=size))
        except (requests.RequestException, UnicodeDecodeError) as error:
            raise FailedError(
                f"the reply of {self.address} broke off: {reason(error)}",
                hint="look at its log and ask again",
            ) from error

    def _read(self, chunk: Mapping[str, Any]) -> Iterator[Piece]:
        if "error" in chunk:
            raise reported(chunk, 500, self.address)
        for name, target in (("usage", "usage"), ("timings", "timings"), ("hipfire", "extra")):
            if isinstance(chunk.get(name), Mapping):
                setattr(self, target, chunk[name])
        # a chunk without choices carries figures only
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.finish = choice.get("finish_reason") or self.finish
            self.calls += delta.get("tool_calls") or ()
            thought = delta.get("reasoning_content")
            if thought:
                self.reasoning += thought
                yield Piece("reasoning", thought)
            text = delta.get("content") or choice.get("text")
            if text:
                self.answer += text
                yield Piece("answer", text)


class Remote:
    """A server at an address; `token` is what it asks of its clients, if anything."""

    def __init__(self, address: Address, *, token: str | None = None) -> None:
        self.address = address
        self._session = _session()
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def health(self, *, seconds: float = 0.5) -> Health | None:
        """Return what the server says of itself, or None if nothing that is hipfire answers in time."""
        try:
            # before it has said that it is hipfire, it is not shown the token
            with _session() as session:
                response = session.get(f"{self.address.base}/health", timeout=seconds)
            facts = response.json()
        except (requests.RequestException, ValueError):
            return None
        if not isinstance(facts, Mapping) or not isinstance(facts.get("status"), str) or "pid" not in facts:
            return None
        return Health(
            facts["status"], facts["pid"], facts.get("token"), facts.get("model"), facts.get("loading_model")
        )

    def models(self) -> list[str]:
        """Return the names that the server gives its models."""
        listed = self._get("/v1/models").get("data")
        return [str(entry["id"]) for entry in listed or () if isinstance(entry, Mapping) and "id" in entry]

    def stats(self) -> Mapping[str, Any]:
        """Return the server's counters."""
        return self._get("/stats")

    def chat(self, body: Mapping[str, Any]) -> Reply:
        """Ask for the next turn of a conversation; `body` has OpenAI's fields without those of streaming."""
        return self._stream("/v1/chat/completions", body)

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """Ask for the continuation of a text."""
        return self._stream("/v1/completions", body)

    def _get(self, path: str) -> Mapping[str, Any]:
        with self._send("GET", path, None) as response:
            try:
                return json_object(response.content.decode(errors="replace"), self.address)
            except requests.RequestException as error:
                raise self._lost(error) from error

    def _stream(self, path: str, body: Mapping[str, Any]) -> Reply:
        response = self._send(
            "POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        kind = response.headers.get("Content-Type", "")
        if not kind.startswith("text/event-stream"):
            response.close()
            raise FailedError(
                f"{self.address} answered with {one_line(kind) or 'no type'} instead of a stream",
                hint="is it a hipfire server?",
            )
        return Reply(response, self.address)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = self._session.request(
                method,
                self.address.base + path,
                json=body,
                stream=True,
                timeout=(CONNECT_SECONDS, SILENCE_SECONDS),
                allow_redirects=False,
            )
        except requests.RequestException as error:
            raise self._lost(error) from error
        if response.status_code == 200:
            return response
        with response:
            raise refusal(response, self.address)

    def _lost(self, error: Exception) -> FailedError:
        return FailedError(
            f"the server at {self.address} cannot be reached: {reason(error)}",
            hint="`hipfire ps` shows whether it runs",
        )


def _session() -> requests.Session:
    session = requests.Session()
    # variables for proxies, and passwords in .netrc, are meant for the internet
    session.trust_env = False
    return session
