"""Connections with limits: how many there are, and how long a client may take to ask for something.

Extends uvicorn's protocol, which has neither limit. This file knows no routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hipfire.server.errors import OverloadedError, SlowClientError, headers_of, openai_body, status_of
from hipfire.server.sse import to_json


class LimitedProtocol(H11Protocol):
    """One connection. `limited` makes the class that uvicorn is given."""

    header_timeout_s: float = 0.0
    max_connections: int = 0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start the clock for its first request."""
        super().connection_made(transport)
        if self.max_connections and len(self.connections) > self.max_connections:
            self._refuse(OverloadedError("too many connections are open", hint="try again later"))
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Read; a later request's first bytes start the clock, its last header line stops it."""
        if self.transport.is_closing():
            return
        self._watch()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()

    def on_response_complete(self) -> None:
        """Go on; what has come of the next request starts its clock."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock for a request's head, unless it runs or a request is being answered."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._header_timer is None and self.header_timeout_s and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._header_timer = None
        self._refuse(SlowClientError(f"no request came within {self.header_timeout_s:g} s"))

    def _refuse(self, error: Exception) -> None:
        """Answer without the application, and close."""
        body = to_json(openai_body(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **{name.lower(): value for name, value in headers_of(error).items()},
        }
        lines = [f"HTTP/1.1 {status_of(error)} Refused"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def limited(*, header_timeout_s: float, max_connections: int) -> type[LimitedProtocol]:
    """Return the protocol class with these limits; 0 is none."""
    values = {"header_timeout_s": header_timeout_s, "max_connections": max_connections}
    return type("Limited", (LimitedProtocol,), values)
