"""A scripted model behind an HTTP server that speaks the parts of the OpenAI API that a harness sees.

Run as `python scripted_server.py serve MODEL HOST PORT [--kv-mode M] [--max-seq N]`, like the real command.
The script is a JSON file named by SCRIPT_FILE:

replies      a list of replies, one for each request; the last one repeats
health       extra fields of /health;  stats: extra fields of /stats
first_loads  requests of /health that are told that the model is being loaded
deaths       a file with the number of starts that still end with a traceback
child        a file for the id of a child process that outlives its parent
edits        a file to which a line is added at the start
log          a line for standard error at the start

A reply has content, reasoning, calls, finish, usage (False leaves it out), cached, split (characters per
chunk), and instead of an answer: status (an HTTP error), stream_error, or cut (no end of the stream).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Scripted:
    """What the server knows: its script, its command line, and every conversation that it has seen."""

    def __init__(self, script: dict[str, Any], words: list[str]) -> None:
        self.script = script
        self.model, self.host, self.port = words[1], words[2], int(words[3])
        self.flags = dict(zip(words[4::2], words[5::2], strict=True))
        self.asked = 0
        self.health_asked = 0
        self.seen: list[list[str]] = []

    def health(self) -> dict[str, Any]:
        self.health_asked += 1
        loading = self.health_asked <= self.script.get("first_loads", 0)
        name = None if loading else self.model
        own: dict[str, Any] = {
            "status": "ok",
            "model": name,
            "loading_model": self.model if loading else None,
        }
        own["pid"] = os.getpid()
        own.update(self.script.get("health", {}))
        return own

    def stats(self) -> dict[str, Any]:
        told = {"kv_mode": self.flags.get("--kv-mode"), "max_seq": self.flags.get("--max-seq")}
        return {"engine": told | self.script.get("stats", {})}

    def next_reply(self) -> dict[str, Any]:
        replies = self.script["replies"]
        self.asked += 1
        reply: dict[str, Any] = replies[min(self.asked, len(replies)) - 1]
        return reply

    def reused(self, tokens: list[str]) -> int:
        """The longest prefix that an earlier conversation has too; the last token never counts."""
        best = 0
        for other in self.seen:
            same = 0
            while same < min(len(other), len(tokens) - 1) and other[same] == tokens[same]:
                same += 1
            best = max(best, same)
        return best


def tokens_of(messages: list[dict[str, Any]]) -> list[str]:
    return [word for message in messages for word in (message["role"], *str(message["content"]).split())]


def chunks(reply: dict[str, Any], usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an answer: role, reasoning, content, calls, the end, usage."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant"})
    if reply.get("reasoning"):
        yield chunk({"reasoning_content": reply["reasoning"]})
    content, size = reply.get("content", ""), reply.get("split", 7)
    for start in range(0, len(content), size):
        yield chunk({"content": content[start : start + size]})
    for index, (name, arguments) in enumerate(reply.get("calls", [])):
        half = len(arguments) // 2
        first = {"index": index, "id": f"call_{index}", "type": "function"}
        yield chunk({"tool_calls": [first | {"function": {"name": name, "arguments": arguments[:half]}}]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]})
    finish = reply.get("finish", "tool_calls" if reply.get("calls") else "stop")
    yield chunk({}, finish) | {"timings": {"prefill_ms": 5.0, "prefill_tok_s": 800.0, "decode_tok_s": 40.0}}
    if reply.get("usage", True):
        yield {"id": "chatcmpl-1", "choices": [], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    scripted: Scripted

    def log_message(self, *args: object) -> None:
        del args

    def do_GET(self) -> None:
        answers = {"/health": self.scripted.health, "/stats": self.scripted.stats}
        self.send_json(200, answers[self.path]())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = self.scripted.next_reply()
        if "status" in reply:
            self.send_json(
                reply["status"], {"error": {"message": "scripted refusal", "type": "server_error"}}
            )
            return
        tokens = tokens_of(body["messages"])
        cached = reply.get("cached", self.scripted.reused(tokens))
        self.scripted.seen.append([*tokens, "assistant", *str(reply.get("content", "")).split()])
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": len(reply.get("content", "").split()),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keepalive\r\n\r\n")
        for number, chunk in enumerate(chunks(reply, usage)):
            if number and "stream_error" in reply:
                chunk = {"error": {"message": reply["stream_error"], "type": "server_error"}}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if number and ("stream_error" in reply or reply.get("cut")):
                break
        if not reply.get("cut"):
            self.wfile.write(b"data: [DONE]\n\n")

    def send_json(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    script = json.loads(Path(os.environ["SCRIPT_FILE"]).read_text())
    print(script.get("log", "starting"), file=sys.stderr, flush=True)
    if "deaths" in script:
        count = Path(script["deaths"])
        left = int(count.read_text())
        if left:
            count.write_text(str(left - 1))
            raise RuntimeError("a scripted death")
    if "edits" in script:
        with Path(script["edits"]).open("a") as file:
            file.write("changed\n")
    if "child" in script:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        Path(script["child"]).write_text(str(child.pid))
    Handler.scripted = Scripted(script, sys.argv[1:])
    address = (Handler.scripted.host, Handler.scripted.port)
    ThreadingHTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
