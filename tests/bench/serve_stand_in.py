"""A made-up server of chats for the tests of benchmarks/serve_peers.py: it knows how long everything takes.

Its tokens are words. It reads a prompt in `read_s` seconds a word and writes a word of a reply in `token_s`
seconds; with `lock` it serves one request at a time, as the peer's does.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hipfire.validate.harness_client import Address
from peers.report import OWN
from peers.serve_servers import Side


@dataclass
class StandIn:
    """What the server does, and what it was asked: the body of every request, in order."""

    token_s: float = 0.0
    read_s: float = 0.0
    lock: bool = False
    timed: bool = True
    cached: int = 0
    status: int = 200
    stream_error: str = ""
    finish: str = "length"
    said: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self.turn if self.lock else contextlib.nullcontext():
            yield

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a reply, each when it is due."""
        with self.alone():
            time.sleep(self.read_s * len(body["messages"][0]["content"].split()))
            count = body["max_tokens"] if self.said is None else self.said
            for number in range(count):
                if number:
                    time.sleep(self.token_s)
                yield {"choices": [{"delta": {"content": f"w{number} "}, "finish_reason": None}]}
            yield {"choices": [{"delta": {}, "finish_reason": self.finish}]}
        if "stream_options" in body:
            yield {"choices": [], "usage": {"completion_tokens": count}}

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        words = len(body["prompt"].split())
        with self.alone():
            time.sleep(self.read_s * words)
        usage: dict[str, Any] = {"prompt_tokens": words}
        usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        told = {"timings": {"prefill_ms": 1000 * self.read_s * words}} if self.timed else {}
        return {"usage": usage, **told}


@contextlib.contextmanager
def serving(behaviour: StandIn, name: str = OWN) -> Iterator[Side]:
    """Run the server in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            del args

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behaviour.asked.append(body)
            if behaviour.status != 200 or "prompt" in body:
                self.answer(behaviour.status, body)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            # a client that sees an error leaves
            with contextlib.suppress(ConnectionError):
                for chunk in behaviour.chat(body):
                    chunk = (
                        {"error": {"message": behaviour.stream_error}} if behaviour.stream_error else chunk
                    )
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, status: int, body: dict[str, Any]) -> None:
            refusal = {"error": {"message": "no such luck"}}
            data = json.dumps(behaviour.completion(body) if status == 200 else refusal).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield Side(name, Address("127.0.0.1", server.server_address[1]), "some", os.getpgrp(), "as it is")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
