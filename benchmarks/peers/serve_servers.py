"""Both servers as processes of their own, with the same file and the same number of threads, and their ends.

This file does not know what they are asked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hipfire.base.errors import HipfireError
from hipfire.base.printable import one_line
from hipfire.checkpoint.library import Library, LocalModel
from hipfire.validate.harness_client import Address, get_json
from hipfire.validate.harness_home import isolated_home, server_words
from hipfire.validate.harness_server import ServerPlan, end_group, start
from peers.report import OWN, PEER
from peers.serve_environment import SERVER
from peers.worker import worker_environment

HOST = "127.0.0.1"
# compiling all kernels on a slow machine takes minutes
WARM_SECONDS = 1200.0
PEER_SECONDS = 120.0
POLL_SECONDS = 0.25
PAUSE_SECONDS = 2.0


class ServeError(HipfireError):
    """A server did not start, or did not answer as it should."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What both servers are told: the file, threads, the context of one request, and requests at once.

    `chunk` is how many tokens of a prompt hipfire reads before it looks at other requests.
    """

    path: Path
    threads: int
    context: int
    slots: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Side:
    """A server that is up: where, what it calls the model, and its process group."""

    name: str
    address: Address
    model: str
    group: int
    settings: str = ""

    def pids(self) -> tuple[int, ...]:
        """Return the processes that the server consists of, as far as the system tells."""
        return tuple(pid for pid, group in _process_groups() if group == self.group)


@contextmanager
def own_server(
    setup: Setup, model: LocalModel, library: Library, log: Path, tell: Callable[[str], None]
) -> Iterator[Side]:
    """Run hipfire's server, warm, in a home of its own; NotWarmError if it does not come up."""
    with isolated_home(None, model, library.registry) as home:
        address = Address(HOST, free_port())
        words = server_words(
            None, home, port=address.port, kv="bf16", max_seq=setup.context, threads=setup.threads
        )
        words += ["--slots", str(setup.slots), "--prefill-chunk", str(setup.chunk)]
        plan = ServerPlan(
            words=words,
            environment=home.environment(None, worker_environment(own=True)),
            folder=home.folder,
            log=log,
            address=address,
            model=model.path,
            library=home.library,
            warm_timeout_s=WARM_SECONDS,
            pause_s=PAUSE_SECONDS,
            poll_s=POLL_SECONDS,
        )
        server = start(plan, tell)
        try:
            if server.process is None:
                raise ServeError(f"{OWN}'s server is not a process of this run")
            settings = f"{setup.slots} slots, chunks of {setup.chunk} tokens, bfloat16 cache"
            yield Side(OWN, address, str(server.health["model"]), server.process.pid, settings)
        finally:
            server.stop()


@contextmanager
def peer_server(setup: Setup, python: Path, log: Path, *, flash: bool) -> Iterator[Side]:
    """Run the server of llama-cpp-python; ServeError if it does not come up."""
    address = Address(HOST, free_port())
    words = [
        str(python),
        "-m",
        SERVER,
        "--model",
        str(setup.path),
        "--host",
        HOST,
        "--port",
        str(address.port),
    ]
    words += ["--n_threads", str(setup.threads), "--n_threads_batch", str(setup.threads)]
    # by default it keeps the logits of every token, and ends a reply as soon as somebody else asks
    words += ["--logits_all", "false", "--interrupt_requests", "false"]
    words += ["--n_ctx", str(setup.context), "--flash_attn", str(flash).lower(), "--verbose", "false"]
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environment(own=False),
                # Ctrl-C is for the asking program, which then ends the server
                start_new_session=True,
            )
        except OSError as error:
            raise ServeError(f"{PEER}'s server cannot be started: {error.strerror or error}") from error
    side = Side(PEER, address, "", process.pid, f"flash attention {'on' if flash else 'off'}, float16 cache")
    try:
        yield replace(side, model=_wait_ready(process, address, log))
    finally:
        end_group(process)


def free_port() -> int:
    """Return a port of the loopback address that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def post_json(side: Side, path: str, body: object, timeout_s: float) -> tuple[dict[str, object], float]:
    """POST a request that is answered in one piece; return the answer and its wall time in seconds.

    Raises ServeError for another status than 200 and for what is no JSON object.
    """
    connection = http.client.HTTPConnection(side.address.host, side.address.port, timeout=timeout_s)
    began = time.perf_counter()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        wall = time.perf_counter() - began
        answer = json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServeError(f"{side.name} did not answer {path}: {error}") from error
    finally:
        connection.close()
    if response.status != 200 or not isinstance(answer, dict):
        raise ServeError(
            f"{side.name} answered {path} with status {response.status}: {one_line(str(answer))}"
        )
    return answer, wall


def _wait_ready(process: subprocess.Popen[bytes], address: Address, log: Path) -> str:
    """Return what the peer calls its model, once it answers."""
    deadline = time.monotonic() + PEER_SECONDS
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            last = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise ServeError(f"{PEER}'s server ended with code {code}: {one_line(last[0])}")
        answer = get_json(address, "/v1/models", PAUSE_SECONDS)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            return str(answer["data"][0]["id"])
        time.sleep(POLL_SECONDS)
    raise ServeError(f"{PEER}'s server did not answer within {PEER_SECONDS:g} s")


def _process_groups() -> Iterator[tuple[int, int]]:
    """Yield (process, its group) of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the name before the last bracket may hold anything
            words = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            yield int(path.parent.name), int(words[2])
