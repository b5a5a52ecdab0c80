"""Runs compiling processes side by side, each with a time limit, and outlives their faults.

One process compiles one entry after another. If it ends or takes too long, that is the fault of the entry in
hand, and a new process goes on with the rest. This file does not know what is right for a kernel.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import InternalError

START_LIMIT_S: Final = 120.0
_WORKER: Final = "hipfire.validate.compile_gate_worker"
Job = tuple[str, str]
Answer = dict[str, Any]


class _NoAnswerError(Exception):
    """A process did not answer; says why, in words."""


@dataclass(frozen=True, slots=True)
class Compilers:
    """How compiling processes are started: of which package, with which folder for what they compile.

    `limit_s` is the most that one entry may take on one machine, in seconds.
    """

    package: str
    cache: Path
    limit_s: float = 120.0

    def listing(self) -> Answer:
        """Return what a process lists: `triton` (version), `entries` (key to machines) and `broken`.

        InternalError if it lists nothing.
        """
        with _Process(self) as process:
            return process.listing

    def run(self, jobs: Sequence[Job], count: int, done: Callable[[int], None]) -> Mapping[Job, Answer]:
        """Compile all entries (key, machine) in `count` processes; `done` is told how many are finished."""
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        answers: dict[Job, Answer] = {}
        errors: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            try:
                self._work(waiting, answers, stop)
            except BaseException as error:
                errors.append(error)
                stop.set()

        threads = [threading.Thread(target=work) for _ in range(min(count, len(jobs)))]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
                done(len(answers))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return answers

    def _work(
        self, waiting: queue.SimpleQueue[Job], answers: dict[Job, Answer], stop: threading.Event
    ) -> None:
        process: _Process | None = None
        try:
            while not stop.is_set():
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                process = process or _Process(self)
                started = time.monotonic()
                try:
                    answers[job] = process.ask(job, self.limit_s, stop)
                except _NoAnswerError as silent:
                    seconds = time.monotonic() - started
                    answers[job] = {"faults": [f"does not compile: {silent}"], "seconds": seconds}
                    process.close()
                    process = None
        finally:
            if process is not None:
                process.close()


class _Process:
    """One compiling process."""

    def __init__(self, compilers: Compilers) -> None:
        # what Triton is told by the environment is not for these processes, least of all to interpret
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        environment |= {
            "TRITON_CACHE_DIR": str(compilers.cache),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, compilers.package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            bufsize=0,
            start_new_session=True,  # its assemblers end with it
        )
        self._read = b""
        try:
            self.listing = self._answer(START_LIMIT_S, threading.Event())
        except _NoAnswerError as silent:
            self.close()
            hint = "it needs Triton, which the extra `gpu` installs"
            raise InternalError(f"no process could list the kernels: {silent}", hint=hint) from None

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, job: Job, limit_s: float, stop: threading.Event) -> Answer:
        """Return the answer to a request; `_NoAnswerError` if there is none in time, or `stop` is set."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen when the answer is missing
            self._process.stdin.write(json.dumps({"key": job[0], "target": job[1]}).encode() + b"\n")
        return self._answer(limit_s, stop)

    def close(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                pipe.close()

    def _answer(self, limit_s: float, stop: threading.Event) -> Answer:
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._read:
            if time.monotonic() > end or stop.is_set():
                raise _NoAnswerError(f"it takes more than {limit_s:g} s" if not stop.is_set() else "stopped")
            if not select.select([self._process.stdout], [], [], 0.2)[0]:
                continue
            data = self._process.stdout.read(65536)
            if not data:
                raise _NoAnswerError(self._last_words())
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        # a compiler names its fault first and prints a stack after it
        named = [line for line in lines if "LLVM ERROR" in line or "Assertion" in line]
        said = next(iter(named), lines[-1] if lines else "")
        return f"the compiler's process ended with {code}{f': {said}' if said else ''}"
