"""A server that answers as a test's script says, and remembers what it was asked."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PID = 4242
TIMINGS = {"ttft_ms": 5.0, "prefill_ms": 250.0, "prefill_tok_s": 40.0, "decode_tok_s": 12.5}


def role() -> str:
    return _chunk({"role": "assistant"})


def text(piece: str) -> str:
    return _chunk({"content": piece})


def thought(piece: str) -> str:
    return _chunk({"reasoning_content": piece})


def finish(reason: str = "stop", **extra: Any) -> str:
    return _chunk({}, finish_reason=reason, timings=TIMINGS, hipfire={"seed": 7, **extra})


def usage(prompt: int = 10, completion: int = 3, cached: int = 4) -> str:
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return json.dumps({"choices": [], "usage": counts})


def fault(message: str, kind: str = "server_error") -> str:
    return json.dumps({"error": {"message": message, "type": kind}})


def reply(*pieces: str, reason: str = "stop", thoughts: Sequence[str] = (), **extra: Any) -> list[str]:
    """Return the events of a complete reply."""
    body = [*map(thought, thoughts), *map(text, pieces)]
    return [role(), *body, finish(reason, **extra), usage(), "[DONE]"]


@dataclass
class Script:
    """What the server does. `replies` are used up one by one; the last one serves for all later requests.

    A reply is a list of events, or (status, headers, body). The event "HANG" waits until the client leaves,
    "LINGER" does so for a moment, "DROP" cuts the connection, and one that starts with ":" is a comment.
    `left` tells that a client was seen to leave.
    """

    replies: list[Any] = field(default_factory=lambda: [reply("Hello", " world")])
    models: list[str] = field(default_factory=lambda: ["tiny:1m"])
    health: Any = field(
        default_factory=lambda: {
            "status": "ok",
            "pid": PID,
            "token": "t",
            "model": None,
            "loading_model": None,
        }
    )
    chunked: bool = True
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests for text."""
        return [body for path, body in self.asked if path.endswith("completions")]


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    """Serve the script on a free port, which it is told."""

    class Handler(_Handler):
        plan = script

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    plan: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self.plan.headers.append(dict(self.headers))
        self.plan.asked.append((self.path, {}))
        if self.path == "/health":
            return self._send(200, self.plan.health)
        if self.path == "/v1/models":
            return self._send(200, {"object": "list", "data": [{"id": name} for name in self.plan.models]})
        if self.path == "/stats":
            return self._send(200, {"requests_served": 5, "queue_depth": 0, "running": 1, "uptime_sec": 3725})
        return self._send(404, {"error": {"message": "no such route", "type": "invalid_request_error"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.plan.headers.append(dict(self.headers))
        self.plan.asked.append((self.path, body))
        plan = self.plan.replies.pop(0) if len(self.plan.replies) > 1 else self.plan.replies[0]
        if isinstance(plan, tuple):
            self._send(*plan[:1], plan[2], plan[1])
        else:
            self._stream(plan)

    def _send(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked") if self.plan.chunked else None
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with suppress(BrokenPipeError, ConnectionResetError):
            for event in events:
                if event == "HANG":
                    self._await_leaving(20)
                    return
                if event == "LINGER":
                    self._await_leaving(0.3)
                    continue
                if event == "DROP":
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self._write(event if event.startswith(":") else f"data: {event}\n\n")
            self.wfile.write(b"0\r\n\r\n" if self.plan.chunked else b"")

    def _write(self, line: str) -> None:
        data = line.encode() if not line.startswith(":") else f"{line}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self.plan.chunked else data)
        self.wfile.flush()

    def _await_leaving(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ready, _, _ = select.select([self.connection], [], [], 0.05)
            if ready and not self.connection.recv(1):
                self.plan.left.set()
                return


def _chunk(delta: dict[str, Any], *, finish_reason: str | None = None, **extra: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return json.dumps({"object": "chat.completion.chunk", "choices": [choice], **extra})
