"""A server of its own for the harness: started, proven to be the right one, and ended.

Only this attempt's part of the log counts, only the started process group is ever signalled, and a server
that cannot be proven to be ours, with our model, is no server. This file does not know prompts or reports.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import HipfireError, TransportError
from hipfire.checkpoint.library import Library
from hipfire.validate.harness_client import Address, get_json

ATTEMPTS: Final = 4
HEALTH_TIMEOUT_S: Final = 5.0
END_TIMEOUT_S: Final = 40.0
# a command line that is not understood, which another attempt will not change
EXIT_USAGE: Final = 2
TAIL_LINES: Final = 40
# lines that say that a load cannot succeed any more
_FATAL_LINE: Final = re.compile(
    r"Traceback \(most recent call last\)|MemoryError|out of memory|\bMiB are available\b"
    r"|load failed|failed to load|cannot be loaded|could not be loaded|is not loaded ahead"
    r"|internal error|Fatal Python error",
    re.IGNORECASE,
)


class NotWarmError(TransportError):
    """No attempt gave a server with the model; `tail` is the end of the last attempt's log."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message, hint="the server's log says more")
        self.tail = tail


@dataclass(frozen=True, slots=True)
class LogSlice:
    """A log file from one attempt on: what earlier attempts wrote is no evidence."""

    path: Path
    offset: int

    def text(self) -> str:
        """Return what this attempt wrote."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def fatal_line(self) -> str | None:
        """Return the first line that tells of a failure, or None."""
        return next((line for line in self.text().splitlines() if _FATAL_LINE.search(line)), None)

    def tail(self) -> str:
        """Return the last lines."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to start and what must come of it: a server at `address` whose model is the file `model`.

    `library` is what the server's names of models mean. `pause_s` lies between two attempts, `poll_s`
    between two questions whether the model is there.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    address: Address
    model: Path
    library: Library
    warm_timeout_s: float
    pause_s: float
    poll_s: float


@dataclass(slots=True)
class Server:
    """A warm server. `process` is None for one that the harness did not start."""

    plan: ServerPlan
    health: Mapping[str, Any]
    process: subprocess.Popen[bytes] | None = None
    log: LogSlice | None = None
    attempts: int = 1
    failures: list[str] = field(default_factory=list)

    def stop(self) -> bool:
        """End the process group; return whether all of it is gone."""
        return self.process is None or end_group(self.process)


def start(plan: ServerPlan, say: Callable[[str], None]) -> Server:
    """Start a server and wait until it has the model; raise NotWarmError after the last attempt."""
    failures: list[str] = []
    log = LogSlice(plan.log, 0)
    for attempt in range(1, ATTEMPTS + 1):
        if attempt > 1:
            time.sleep(plan.pause_s)
        _refuse_taken(plan.address)
        log = LogSlice(plan.log, plan.log.stat().st_size if plan.log.exists() else 0)
        process = _spawn(plan)
        try:
            outcome = _wait_warm(plan, process, log)
        except BaseException:
            end_group(process)
            raise
        if not isinstance(outcome, str):
            return Server(plan, outcome, process, log, attempt, failures)
        code = process.poll()
        end_group(process)
        failures.append(f"attempt {attempt}: {outcome}")
        say(failures[-1])
        if code == EXIT_USAGE:
            break
    raise NotWarmError(f"no server came up: {failures[-1]}", log.tail())


def join(plan: ServerPlan) -> Server:
    """Return the server that already runs at the address; NotWarmError if it has not the model."""
    health = get_json(plan.address, "/health", HEALTH_TIMEOUT_S)
    fault = health_fault(health, plan)
    if fault is not None:
        raise NotWarmError(f"the server on port {plan.address.port} cannot be used: {fault}", "")
    return Server(plan, health)


def health_fault(health: object, plan: ServerPlan) -> str | None:
    """Return why this answer of /health is not that of a server with the model, or None."""
    if not isinstance(health, dict):
        return "/health does not answer"
    if health.get("status") != "ok":
        return f"/health says {health.get('status')!r}"
    if not health.get("model") or health.get("loading_model"):
        return "no model is loaded yet"
    if not names_model(str(health["model"]), plan.library, plan.model):
        return f"the model is {health['model']!r}, not {plan.model.name}"
    return None


def names_model(name: str, library: Library, path: Path) -> bool:
    """Return whether a server's name for a model means this file, links resolved."""
    try:
        found = library.find(name, fuzzy=False)
    except HipfireError:
        return False
    return found is not None and found.path.resolve() == path.resolve()


def own_process(pid: object, process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process id belongs to the group that was started."""
    try:
        return isinstance(pid, int) and os.getpgid(pid) == process.pid
    except OSError:
        return False


def end_group(process: subprocess.Popen[bytes]) -> bool:
    """End the process group of a started server, gently and then not; return whether all of it is gone."""
    try:
        return _end_group(process)
    except BaseException:
        # a second Ctrl-C is no reason to leave it running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


def _end_group(process: subprocess.Popen[bytes]) -> bool:
    for number, timeout in ((signal.SIGTERM, END_TIMEOUT_S), (signal.SIGKILL, END_TIMEOUT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            # collects the leader, without which its group would seem to live on
            process.poll()
            if not _group_lives(process.pid):
                process.wait()
                return True
            time.sleep(0.05)
    return False


@contextlib.contextmanager
def unwinding_signals() -> Iterator[None]:
    """Let a signal to end unwind the stack meanwhile, so that a started server is ended too."""

    def end(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _group_lives(group: int) -> bool:
    """Return whether a process of the group runs; one that is over but not yet collected does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = [state for state, member in _process_groups() if member == group]
    return not states or any(state != "Z" for state in states)


def _process_groups() -> Iterator[tuple[str, int]]:
    """Yield state and process group of every process, as far as the system tells."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the name before the last bracket may hold anything
            words = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield words[0], int(words[2])


def _spawn(plan: ServerPlan) -> subprocess.Popen[bytes]:
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    with plan.log.open("ab") as log:
        try:
            return subprocess.Popen(
                plan.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=plan.folder,
                env=dict(plan.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise NotWarmError(f"{plan.words[0]} cannot be started: {error.strerror}", "") from error


def _wait_warm(plan: ServerPlan, process: subprocess.Popen[bytes], log: LogSlice) -> Mapping[str, Any] | str:
    """Return the answer of /health once the model is there, or why it will not come."""
    deadline = time.monotonic() + plan.warm_timeout_s
    fault = "nothing was asked"
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            last = log.text().strip().splitlines()[-1:]
            return f"the server ended with code {code}: {' '.join(last)}"
        if (line := log.fatal_line()) is not None:
            return f"the log says: {line}"
        health = get_json(plan.address, "/health", HEALTH_TIMEOUT_S)
        fault = health_fault(health, plan) or ""
        if not fault and own_process(health.get("pid"), process):
            return dict(health)
        fault = fault or f"process {health.get('pid')} answers, which was not started here"
        time.sleep(plan.poll_s)
    return f"not warm after {plan.warm_timeout_s:g} s: {fault}"


def _refuse_taken(address: Address) -> None:
    """Raise NotWarmError if something already listens at the address: it would be taken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise NotWarmError(f"port {address.port} cannot be used: {error.strerror}", "") from error
