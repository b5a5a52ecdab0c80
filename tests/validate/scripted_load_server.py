"""A server without a model that does what a load run asks of one, and any of the faults that it must find.

Run as `python scripted_load_server.py serve MODEL HOST PORT [--slots N ...]`, like the real command. Its
engine is a child process that sleeps; requests fail while it is dead. SCRIPT_FILE names a JSON list of
faults:

hang       one answer never comes              twice      something follows the end of a stream
untyped    errors have no code                 status     bodies that are too large get another status
drift      the same question gives other text  busy       a turn stays on the books
slot       one slot is never given back        grow       memory, files and threads are kept
traceback  the log tells of a fault            dead       a killed engine is not started again
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LIMIT = int(os.environ["HIPFIRE_MAX_REQUEST_BYTES"])
PIECE_S = 0.001
# requests after which a server's behaviour changes for the worse
LATE = 60


class RefusalError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Engine:
    """The child process, started again when it is dead."""

    def __init__(self, faults: set[str]) -> None:
        self.faults = faults
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        (Path(os.environ["HIPFIRE_HOME"]) / "daemon.pid").write_text(str(self.process.pid))

    def pid(self) -> int:
        with self.lock:
            if self.process.poll() is not None and "dead" not in self.faults:
                self.start()
                raise RefusalError(503, "transient")
            if self.process.poll() is not None:
                raise RefusalError(503, "transient")
            return self.process.pid


class State:
    def __init__(self, words: list[str]) -> None:
        flags = dict(zip(words[4::2], words[5::2], strict=True))
        self.model = words[1]
        self.faults = set(json.loads(Path(os.environ["SCRIPT_FILE"]).read_text()))
        self.slots = threading.Semaphore(int(flags["--slots"]) - ("slot" in self.faults))
        self.engine = Engine(self.faults)
        self.lock = threading.Lock()
        self.counts = {"asked": 0, "served": 0, "failed": 0, "aborted": 0}
        self.running = self.posts = 0
        self.kept: list[Any] = []

    def count(self, name: str, step: int = 1) -> None:
        with self.lock:
            self.counts[name] += step

    def late(self, fault: str) -> bool:
        return fault in self.faults and self.posts > LATE


def text_of(question: str, seed: int, length: int) -> list[str]:
    digest = hashlib.sha256(f"{question}{seed}".encode()).hexdigest()
    return [f"{digest[place % 60 : place % 60 + 3]} " for place in range(length)]


def strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def no_constant(word: str) -> float:
    raise ValueError(word)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: object) -> None:
        del args

    def do_GET(self) -> None:
        state = self.state
        stuck = 1 if state.late("busy") else 0
        if self.path == "/metrics":
            asked, failed = state.counts["asked"], state.counts["failed"]
            lines = ["# TYPE hipfire_turns_running gauge", f"hipfire_turns_running {state.running + stuck}"]
            lines += [f"hipfire_requests_total {asked}", f"hipfire_requests_failed_total {failed}"]
            lines += [f"hipfire_requests_aborted_total {state.counts['aborted']}"]
            self.answer(200, "\n".join(lines).encode())
        elif self.path == "/stats":
            served = state.counts["served"]
            self.tell({"running": state.running + stuck, "queue_depth": 0, "requests_served": served})
        else:
            with contextlib.suppress(RefusalError):
                state.engine.pid()
            well = {"status": "ok", "ready": True, "model": state.model, "pid": os.getpid()}
            self.tell(well | {"loading_model": None})

    def do_POST(self) -> None:
        state = self.state
        with state.lock:
            state.posts += 1
        if state.posts == LATE and "traceback" in state.faults:
            print("Traceback (most recent call last):", file=sys.stderr, flush=True)
        if state.late("grow"):
            state.kept.append((bytearray(b"x" * (1 << 20)), Path(os.devnull).open()))  # noqa: SIM115
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        try:
            body = self.body()
            if body.get("model") == "no-such-model:1b":
                raise RefusalError(404, "model_not_found")
            if len(body["messages"][0]["content"].split()) > 2048:
                raise RefusalError(400, "context_length_exceeded")
        except RefusalError as error:
            self.refuse(error)
            return
        self.turns(body)

    def turns(self, body: dict[str, Any]) -> None:
        state, count = self.state, body.get("n", 1)
        state.count("asked", count)
        end = "failed"
        try:
            with state.slots:
                state.running += 1
                try:
                    self.say(body, count)
                    end = "served"
                finally:
                    state.running -= 1
        except RefusalError as error:
            self.refuse(error)
        except OSError:
            end = "aborted"
        finally:
            state.count(end, count)

    def say(self, body: dict[str, Any], count: int) -> None:
        state = self.state
        pid, batch, begun = state.engine.pid(), 0, False
        extra = " and more" if state.late("drift") else ""
        question = body["messages"][0]["content"]
        texts = [text_of(question, body.get("seed", 0) + index, body["max_tokens"]) for index in range(count)]
        # those who ask for more may lose their patience before
        if state.late("hang") and body["max_tokens"] < 30:
            state.faults.discard("hang")
            time.sleep(20)
        try:
            for place in range(body["max_tokens"]):
                time.sleep(PIECE_S)
                batch = max(batch, state.running)
                if state.engine.pid() != pid:
                    raise RefusalError(503, "transient")
                if body.get("stream"):
                    begun = begun or self.begin()
                    for index in range(count):
                        self.frame(self.chunk(index, texts[index][place]))
        except RefusalError as error:
            if not begun:
                raise
            self.frame({"error": self.error(error)})
            self.end()
            return
        if begun:
            for index in range(count):
                self.frame(self.chunk(index, extra, "stop"))
            self.end()
            return
        made = [
            {"index": index, "message": {"content": "".join(text) + extra}, "finish_reason": "stop"}
            for index, text in enumerate(texts)
        ]
        self.tell({"choices": made, "hipfire": {"batch": batch}})

    def chunk(self, index: int, text: str, finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}

    def begin(self) -> bool:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return True

    def frame(self, value: object) -> None:
        self.part(b"data: " + json.dumps(value).encode() + b"\n\n")

    def part(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end(self) -> None:
        self.part(b"data: [DONE]\n\n")
        if self.state.late("twice"):
            self.frame(self.chunk(0, "again", "stop"))
        self.wfile.write(b"0\r\n\r\n")

    def body(self) -> dict[str, Any]:
        data = b""
        for part in self.parts():
            data += part
            if len(data) > LIMIT:
                raise RefusalError(400 if "status" in self.state.faults else 413, "too_large")
        try:
            value = json.loads(data, object_pairs_hook=strict, parse_constant=no_constant)
        except (ValueError, RecursionError):
            raise RefusalError(400, "malformed") from None
        if not isinstance(value, dict):
            raise RefusalError(400, "malformed")
        return value

    def parts(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
        elif (length := int(self.headers["Content-Length"])) > LIMIT:
            yield b" " * length
        else:
            yield self.rfile.read(length)

    def error(self, error: RefusalError) -> dict[str, Any]:
        code = None if "untyped" in self.state.faults else error.code
        return {"message": "scripted", "type": "scripted_error", "code": code}

    def refuse(self, error: RefusalError) -> None:
        with contextlib.suppress(OSError):
            self.answer(error.status, json.dumps({"error": self.error(error)}).encode())

    def tell(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode())

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are no news."""


if __name__ == "__main__":
    print("starting", file=sys.stderr, flush=True)
    Handler.state = State(sys.argv[1:])
    Server((sys.argv[3], int(sys.argv[4])), Handler).serve_forever()
