"""What tests of the daemon share: its state without a process, and a process that runs the scripted core."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripted_core import ScriptedLoader

from hipfire.engine.daemon_state import DaemonState
from hipfire.engine.wire import line_of

SCRIPT = Path(__file__).with_name("scripted_core.py")


class Bench:
    """A daemon's state without a process: messages in, the replies so far out."""

    def __init__(self) -> None:
        self.loader = ScriptedLoader()
        self.sent: list[dict[str, Any]] = []
        self.state = DaemonState(self.loader, lambda line: self.sent.append(json.loads(line)))

    def tell(self, record: dict[str, Any] | bytes) -> list[dict[str, Any]]:
        """Handle a message; return what it was answered with at once."""
        before = len(self.sent)
        self.state.handle(record if isinstance(record, bytes) else line_of(record))
        return self.sent[before:]

    def load(self, model: str = "model", **fields: Any) -> list[dict[str, Any]]:
        return self.tell({"type": "load", "model": model, **fields})

    def generate(self, prompt: str, name: str = "a", attempt: int = 1, **fields: Any) -> list[dict[str, Any]]:
        return self.tell({"type": "generate", "id": name, "attempt_id": attempt, "prompt": prompt, **fields})

    def run(self) -> list[dict[str, Any]]:
        """Step until there is nothing to do; return what was sent meanwhile."""
        before = len(self.sent)
        while self.state.step():
            pass
        return self.sent[before:]

    def diag(self) -> dict[str, Any]:
        return self.tell({"type": "diag"})[0]


def types(records: list[dict[str, Any]]) -> list[str]:
    return [record["type"] for record in records]


class Process:
    """A daemon in a process of its own that runs the scripted core."""

    def __init__(self, home: Path, **streams: Any) -> None:
        self.home = home
        self.log = home / "daemon.log"
        home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "HIPFIRE_HOME": str(home)}, **{"stderr": log, **streams},
            )  # fmt: skip

    def tell(self, *records: dict[str, Any] | bytes) -> None:
        assert self.child.stdin is not None
        for record in records:
            self.child.stdin.write(record if isinstance(record, bytes) else line_of(record))
        self.child.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, self.log.read_text()
        return dict(json.loads(line))

    def hear_until(self, kind: str) -> list[dict[str, Any]]:
        heard = [self.hear()]
        while heard[-1]["type"] != kind:
            heard.append(self.hear())
        return heard

    def rest(self) -> list[dict[str, Any]]:
        assert self.child.stdout is not None
        return [json.loads(line) for line in self.child.stdout.read().splitlines()]

    def stop(self) -> None:
        self.child.kill()
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.child.wait(30)
