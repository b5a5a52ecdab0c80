"""The server as a process of its own, with a daemon whose turns do what their prompts say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_kit import eventually, frames, http_client

from hipfire.base.errors import TransportError, ValidationError
from hipfire.engine.lock import is_alive
from hipfire.server.main import bind, run_server
from hipfire.server.options import ServeOptions

SCRIPTED_CORE = Path(__file__).parents[1] / "engine" / "scripted_core.py"
CHILD = """
import json, sys
from hipfire.base import log
from hipfire.server.main import run_server
from hipfire.server.options import ServeOptions
log.configure()
options = ServeOptions(port=0, daemon_command=(sys.executable, sys.argv[1]), **json.loads(sys.argv[2]))
code = run_server(options, ready=lambda where: print(where, flush=True))
print(sorted({"torch", "numba", "transformers"} & sys.modules.keys()), flush=True)
sys.exit(code)
"""


@dataclass
class Process:
    child: subprocess.Popen[str]
    home: Path
    client: httpx.Client

    def complete(self, prompt: str, model: str = "tiny", **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, **fields}
        return self.client.post("/v1/completions", json=body)

    def daemon_pid(self) -> int:
        return int(json.loads((self.home / "daemon.pid").read_text())["pid"])


@contextlib.contextmanager
def running(home: Path, **options: Any) -> Iterator[Process]:
    """Start a server and its daemon; neither outlives the context."""
    (home / "models").mkdir()
    for name in ("tiny", "broken", "refused"):
        (home / "models" / f"{name}.hf4").write_bytes(b"model")
    environment = {**os.environ, "HIPFIRE_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("HIPFIRE_MODELS_DIR", None)
    command = [sys.executable, "-c", CHILD, str(SCRIPTED_CORE), json.dumps(options)]
    with (home / "log").open("w") as log:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert child.stdout is not None
    try:
        url = child.stdout.readline().strip()
        assert url, (home / "log").read_text()
        with http_client(url) as client:
            yield Process(child, home, client)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait(10)
        child.stdout.close()


def test_life_of_a_server(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        record = json.loads((tmp_path / "serve.pid").read_text())
        health = server.client.get("/health").json()
        assert (health["pid"], health["token"]) == (record["pid"], record["token"])
        assert record["pid"] == server.child.pid
        assert f":{record['port']}" in str(server.client.base_url)
        reply = server.complete("say:good say:day").json()
        assert reply["choices"][0]["text"] == "goodday"
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        engine = server.client.get("/stats").json()["engine"]
        assert (engine["arch"], engine["max_seq"]) == ("scripted", 4096)
        assert str(tmp_path) not in server.client.get("/stats").text
        # one that has no room leaves the model that is there; one that is damaged costs it
        refused = server.complete("say:x", model="refused")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory")
        assert "2048 MiB" in refused.text
        assert server.client.get("/health").json()["model"] == "tiny"
        damaged = server.complete("say:x", model="broken")
        assert damaged.status_code == 500
        assert "a tensor is damaged" in damaged.text
        assert str(tmp_path) not in damaged.text
        assert server.client.get("/health").json()["model"] is None

        # the daemon is killed in the middle of a stream
        pid = server.daemon_pid()
        body = {"model": "tiny", "prompt": "say:a " + "wait " * 10 + "sleep:30", "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = []
            for line in stream.iter_lines():
                lines.append(line)
                if '"text":"a"' in line:
                    os.kill(pid, signal.SIGKILL)
        *_, error, end = frames(lines)
        assert (error["error"]["code"], end) == ("transient", "[DONE]")
        assert server.complete("say:again").json()["choices"][0]["text"] == "again"
        assert server.daemon_pid() != pid
        assert server.client.get("/stats").json()["running"] == 0

        # a reply that runs when the server is told to stop is finished; new ones are not taken
        answers: list[httpx.Response] = []
        slow = threading.Thread(target=lambda: answers.append(server.complete("sleep:0.6 say:done")))
        slow.start()
        assert eventually(lambda: server.client.get("/stats").json()["running"] == 1)
        pid = server.daemon_pid()
        server.child.send_signal(signal.SIGTERM)
        slow.join(10)
        assert answers[0].json()["choices"][0]["text"] == "done"
        assert server.child.wait(10) == 0
        assert server.child.stdout is not None
        assert server.child.stdout.read().strip() == "[]"
        assert not (tmp_path / "serve.pid").exists()
        assert eventually(lambda: not is_alive(pid))
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, drain_timeout_s=60) as server:
        # the engine does not listen for a minute
        body = {"model": "tiny", "prompt": "say:a sleep:60", "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert "text" in next(lines)
            pid = server.daemon_pid()
            server.child.send_signal(signal.SIGINT)
            time.sleep(0.5)
            # the port is free at once, the running reply has its time
            assert server.child.poll() is None
            with pytest.raises(httpx.TransportError):
                http_client(str(server.client.base_url)).get("/health")
            server.child.send_signal(signal.SIGINT)
            assert server.child.wait(5) == 0
        assert eventually(lambda: not is_alive(pid))
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_address_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{port}.*choose another port"):
            run_server(ServeOptions(port=port))
        with pytest.raises(TransportError):
            bind("localhost", port)


def test_address_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ValidationError, match="token"):
        run_server(ServeOptions(host="0.0.0.0", port=0))
    with pytest.raises(ValidationError, match="no address"):
        run_server(ServeOptions(host="no-such-host.invalid", port=0, allow_open_bind=True))


def test_one_port_for_all_addresses_of_a_name() -> None:
    sockets = bind("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
    finally:
        for each in sockets:
            each.close()


def test_engine_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_HOME", str(tmp_path))
    monkeypatch.delenv("HIPFIRE_MODELS_DIR", raising=False)
    with pytest.raises(TransportError):
        run_server(ServeOptions(port=0, daemon_command=(sys.executable, "-c", "raise SystemExit(3)")))
    assert not (tmp_path / "serve.pid").exists()
    with pytest.raises(ValidationError, match="nothing"):
        run_server(ServeOptions(port=0, model="nothing"))
