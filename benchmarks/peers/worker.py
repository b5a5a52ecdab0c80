"""The asking side of a worker: a child process that answers in lines of JSON and never outlives its owner.

This file does not know what workers do.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from hipfire.base.env import let_threads_sleep
from hipfire.base.errors import HipfireError
from hipfire.base.printable import one_line

BENCHMARKS = Path(__file__).parents[1]
# compiling all kernels on a slow machine takes minutes; nothing else takes as long
LIMIT_SECONDS = 1800.0
GRACE_SECONDS = 10.0
# both sides are told their number of threads; a variable such as OMP_WAIT_POLICY, which importing hipfire
# sets for itself, must not reach the peer
_THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "VECLIB_", "NUMEXPR_")
_LOG_TAIL = 4096


class WorkerError(HipfireError):
    """A worker reported a failure, ended before it was told to, or said nothing for too long."""


def worker_environment(*, own: bool) -> dict[str, str]:
    """Return the environment of a worker: this process's, less what would change how threads work.

    `own` is for hipfire's worker: its threads wait as the command's do, and it keeps this process's path of
    Python modules, which another environment's Python must not see.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_THREAD_VARIABLES)
    }
    paths = [str(BENCHMARKS)]
    if own:
        let_threads_sleep(environment)
        paths.extend(filter(None, [environment.get("PYTHONPATH")]))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


class Worker:
    """A running worker; as a context it ends the process, at once if an exception goes through."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        # a temporary file cannot fill up and block the worker as a pipe would
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=environment,
                # Ctrl-C is for the asking program, which then ends the worker
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"the {name} worker cannot be started: {error.strerror or error}") from error
        self._stdin = cast(IO[str], self._process.stdin)
        self._stdout = cast(IO[str], self._process.stdout)
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Return the number of the worker's process."""
        return self._process.pid

    def ask(self, do: str, *, limit: float = LIMIT_SECONDS, **fields: Any) -> dict[str, Any]:
        """Send a request and return its answer; WorkerError if there is none within `limit` seconds."""
        try:
            self._stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._stdin.flush()
        except OSError as error:
            raise self._ended(do) from error
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            raise WorkerError(f"the {self.name} worker did not answer to {do!r} in {limit:g} s") from None
        if line is None:
            raise self._ended(do)
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"the {self.name} worker answered {do!r} with {one_line(line)!r}") from None
        if "error" in answer:
            raise WorkerError(f"the {self.name} worker failed at {do!r}: {answer['error']}")
        return dict(answer)

    def close(self, *, at_once: bool = False) -> None:
        """End the process: by the end of its input, or at once."""
        if at_once:
            self._process.kill()
        # what was still to be written may have nobody to read it
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def _read(self) -> None:
        for line in self._stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _ended(self, do: str) -> WorkerError:
        """Return what is known about a worker that is gone."""
        try:
            status = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerError(f"the {self.name} worker closed its output at {do!r}")
        how = f"exit code {status}"
        if status < 0:
            how = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        last = f": {one_line(lines[-1])}" if lines else ""
        return WorkerError(f"the {self.name} worker ended at {do!r} ({how}){last}")
