"""A real `hipfire serve` in a home of its own, on a free port."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hipfire.checkpoint.library import LocalModel, open_library
from hipfire.validate.harness_client import Address
from hipfire.validate.harness_home import isolated_home
from hipfire.validate.harness_server import Server, ServerPlan, start

MODEL = "smollm2:135m"
MAX_SEQ = 1024
SLOTS = 2
# starting takes two seconds, and half a minute where kernels are compiled first
WARM_SECONDS = 240.0


@dataclass(frozen=True)
class Served:
    """A server that runs; `url` has no slash at its end."""

    url: str
    home: Path
    server: Server
    http: httpx.Client

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Return the server's process, which leads a group of its own."""
        assert self.server.process is not None
        return self.server.process

    def stats(self) -> dict[str, Any]:
        """Return the answer of GET /stats."""
        made: dict[str, Any] = self.http.get("/stats").json()
        return made

    def counters(self, *names: str) -> list[int]:
        """Return counters of GET /metrics once no turn runs: a reply's last bytes come before its count."""
        assert self.idle()
        text = self.http.get("/metrics").text
        return [int(re.findall(rf"^hipfire_{name}_total (\d+)$", text, re.MULTILINE)[0]) for name in names]

    def idle(self) -> bool:
        """Return whether no turn runs or waits, after a moment to notice that clients have left."""
        return eventually(lambda: (self.stats()["running"], self.stats()["queue_depth"]) == (0, 0))

    def chat(self, **fields: Any) -> dict[str, Any]:
        """Return OpenAI's reply to a chat that is not streamed."""
        answer = self.http.post("/v1/chat/completions", json={"model": MODEL, **fields})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return whether a condition comes true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def installed() -> LocalModel:
    """Return the model; skip the test where it is not installed."""
    model = open_library().find(MODEL)
    if model is None:
        pytest.skip(f"not run: {MODEL} is not installed (hipfire pull {MODEL})")
    return model


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """Run a server with the model in memory; nothing of it is left when the context is left."""
    model = installed()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with isolated_home(None, model, open_library().registry) as home:
        words = [sys.executable, "-m", "hipfire.cli", "serve", MODEL, f"127.0.0.1:{port}"]
        plan = ServerPlan(
            words=[*words, f"--max-seq={MAX_SEQ}", f"--slots={SLOTS}"],
            environment=home.environment(None),
            folder=home.folder,
            log=home.folder / "log",
            address=Address("127.0.0.1", port),
            model=model.path,
            library=home.library,
            warm_timeout_s=WARM_SECONDS,
            pause_s=0.5,
            poll_s=0.1,
        )
        server = start(plan, lambda line: None)
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=url, verify=False, trust_env=False, timeout=60) as http:
                yield Served(url, home.folder, server, http)
        finally:
            assert server.stop()
