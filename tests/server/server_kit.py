"""Servers on free ports, in a thread of the test's process, around a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from scripted_backend import MODEL, Script, ScriptedBackend

from hipfire.checkpoint.library import Library
from hipfire.checkpoint.registry import Registry
from hipfire.engine.turn import TurnRequest
from hipfire.server.app import create_app
from hipfire.server.main import Server, bind, server_config
from hipfire.server.options import ServeOptions
from hipfire.server.service import Service

OTHER = "other"


def make_library(folder: Path, *names: str) -> Library:
    """Return a library of files that hold nothing."""
    for name in names or (MODEL, OTHER):
        (folder / f"{name}.hf4").write_bytes(b"model")
    return Library(folder, Registry({}, {}, "test"))


@dataclass
class Live:
    """A server that runs; `url` has no slash at its end."""

    url: str
    port: int
    service: Service
    backend: ScriptedBackend
    client: httpx.Client

    def connect(self) -> socket.socket:
        """Return a plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.client.post(path, content=content, headers=headers, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Ask for something."""
        return self.client.get(path, **options)


def http_client(url: str = "") -> httpx.Client:
    """Return a client that is quick to make: it reads no certificates."""
    return httpx.Client(base_url=url, verify=False, trust_env=False, timeout=10)


@contextlib.contextmanager
def serving(
    *scripts: Script | Callable[[TurnRequest], Script],
    backend: ScriptedBackend | None = None,
    token: str | None = None,
    **options: Any,
) -> Iterator[Live]:
    """Run a server; each script is one turn's, the last one every later turn's."""
    engine = backend or ScriptedBackend()
    if scripts:
        engine.scripts = list(scripts)
    chosen = ServeOptions(port=0, **{"idle_timeout_s": 0, **options})
    with tempfile.TemporaryDirectory() as folder:
        service = Service(chosen, engine, make_library(Path(folder)))
        sockets = bind(chosen.host, 0)
        started = threading.Event()
        server = Server(server_config(chosen, create_app(chosen, service, token=token)), started.set)

        async def main() -> None:
            await service.start()
            await server.serve(sockets=sockets)
            await service.close()

        thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        thread.start()
        assert started.wait(20), "the server did not start"
        port = sockets[0].getsockname()[1]
        try:
            with http_client(f"http://127.0.0.1:{port}") as client:
                yield Live(str(client.base_url), port, service, engine, client)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
            for each in sockets:
                each.close()
        assert not thread.is_alive(), "the server did not stop"


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def frames(lines: Sequence[str]) -> list[Any]:
    """Return what the data lines of a stream hold: JSON values, and "[DONE]" as it is."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
