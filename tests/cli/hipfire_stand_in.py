"""A program that stands in for `hipfire serve` in tests of starting, finding and stopping a server.

Usage: hipfire_stand_in.py BEHAVIOUR PORT. It writes the server's record and answers GET /health.
`polite` ends with the first SIGTERM, `draining` with the second, `stubborn` with none; `dead` ends at once
with an error and `mute` never listens. `unrecorded` is polite and writes no record.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import FrameType
from typing import NoReturn

from hipfire.base import env
from hipfire.engine.lock import own_record, remove_pid_file, write_pid_file

TERMS = {"polite": 1, "unrecorded": 1, "draining": 2}


def main(behaviour: str, port: int) -> NoReturn:
    """Behave."""
    print("hipfire: starting", file=sys.stderr, flush=True)
    if behaviour == "dead":
        sys.exit("hipfire: no room for the model\n")
    if behaviour == "mute":
        while True:
            time.sleep(60)
    record = own_record(port)
    left = [TERMS.get(behaviour, 10**9)]

    def end(number: int, _: FrameType | None) -> None:
        left[0] -= 1
        if not left[0]:
            remove_pid_file(env.server_record_path(), record)
            sys.exit(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            facts = {"status": "ok", "pid": record.pid, "token": record.token, "model": "tiny:1m"}
            data = json.dumps(facts).encode()
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    signal.signal(signal.SIGTERM, end)
    server = HTTPServer(("127.0.0.1", port), Handler)
    if behaviour != "unrecorded":
        write_pid_file(env.server_record_path(), record)
    server.serve_forever(poll_interval=0.02)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
