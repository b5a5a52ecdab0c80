"""A loopback HTTP server that serves one body and misbehaves on request."""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Behaviour:
    """What the server does.

    `drop_after` closes each connection after that many body bytes; `statuses` are answered first, one per
    request; `claim` replaces the Content-Length (None = none is sent, the connection just closes);
    `hold_open` stalls after `drop_after` bytes instead of closing.
    """

    body: bytes = b""
    ranges: bool = True
    drop_after: int | None = None
    statuses: list[int] = field(default_factory=list)
    always_status: int | None = None
    content_type: str = "application/octet-stream"
    etag: str | None = '"one"'
    claim: int | str | None = "true"
    wrong_start: bool = False
    hold_open: bool = False
    requests: list[dict[str, str]] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        """Return the digest of the body."""
        return hashlib.sha256(self.body).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    behaviour: Behaviour

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with the body, or with the fault that is due."""
        plan = self.server.behaviour
        plan.requests.append(
            {"path": self.path, **{name.lower(): value for name, value in self.headers.items()}}
        )
        status = plan.statuses.pop(0) if plan.statuses else plan.always_status
        if status is not None:
            self._plain(status)
            return
        first = self._first_byte(plan)
        if first is not None and first >= len(plan.body):
            self._plain(416)
            return
        self._send(plan, first)

    def _plain(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _first_byte(self, plan: Behaviour) -> int | None:
        wanted = self.headers.get("Range")
        revision = self.headers.get("If-Range")
        if not plan.ranges or wanted is None or (revision is not None and revision != plan.etag):
            return None
        return int(wanted.removeprefix("bytes=").rstrip("-"))

    def _send(self, plan: Behaviour, first: int | None) -> None:
        start = first or 0
        body = plan.body[start:]
        self.send_response(200 if first is None else 206)
        self.send_header("Content-Type", plan.content_type)
        if plan.etag is not None:
            self.send_header("ETag", plan.etag)
        if first is not None:
            shown = start + 1 if plan.wrong_start else start
            self.send_header("Content-Range", f"bytes {shown}-{len(plan.body) - 1}/{len(plan.body)}")
        if plan.claim == "true":
            self.send_header("Content-Length", str(len(body)))
        elif plan.claim is not None:
            self.send_header("Content-Length", str(plan.claim))
        self.end_headers()
        self.wfile.write(body if plan.drop_after is None else body[: plan.drop_after])
        if plan.hold_open and plan.drop_after is not None:
            # stall until the client goes away
            self.connection.settimeout(60)
            self.connection.recv(1)
        self.close_connection = True


@contextmanager
def serving(behaviour: Behaviour, *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on a free loopback port; yield the base address without a slash at its end."""
    server = _Server(("127.0.0.1", 0), _Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.behaviour = behaviour
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
