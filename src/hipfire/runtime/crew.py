"""The processes of a model that is spread over several: the first one starts the others and ends them.

It tells them through pipes what to do. A process that ends without being told to ends the model: the others
are ended, and whatever is asked next says why. This file knows no model and no step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from hipfire.base.errors import InternalError
from hipfire.device.collective import ProcessGroup, join
from hipfire.runtime.parallel_messages import Message, Stop, encode
from hipfire.runtime.parallel_weights import Shard
from hipfire.runtime.shard import Part

T = TypeVar("T")

WORKER = (sys.executable, "-m", "hipfire.runtime.parallel_worker")
# a process that was told to stop may still be giving memory back
_STOP_S = 30.0
_HINT = "load the model again"


class PartnerError(InternalError):
    """A process that holds a part of the model is lost. The model cannot be used any more."""


class Crew:
    """The other processes of a model, and this one's end of their group.

    `task` is what a worker is told besides its rank (it reads one line of JSON); `command` starts one.
    `direct` is as in `device.collective.join`. Use it as a context while the model is loaded: if that fails,
    the others are ended.
    """

    def __init__(
        self,
        devices: Sequence[str],
        task: Mapping[str, Any],
        *,
        command: Sequence[str] = WORKER,
        direct: bool = True,
    ) -> None:
        self.size = len(devices)
        self._folder = Path(tempfile.mkdtemp(prefix="hipfire-"))
        self._fault: str | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._group: ProcessGroup | None = None
        try:
            for rank, name in enumerate(devices[1:], 1):
                place = {"folder": str(self._folder), "rank": rank, "size": self.size, "device": name}
                line = json.dumps({**task, **place, "direct": direct})
                self._workers.append(_Worker(rank, command, line, self._lost))
            for worker in self._workers:
                # one that cannot even start would be waited for in vain
                worker.started.wait()
            self.check()
            device = torch.device(devices[0])
            self._group = self._checked(lambda: join(self._folder, 0, self.size, device, direct=direct))
        except BaseException:
            self.close(at_once=True)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the numbers of the other processes."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def group(self) -> ProcessGroup:
        """Return this process's end of the group."""
        if self._group is None:
            raise PartnerError("the processes of this model were ended", hint=_HINT)
        return self._group

    @property
    def shard(self) -> Shard:
        """Return what this process, the first, has of the model."""
        return Shard(Part(0, self.size), self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self.close(at_once=True)
            # what went wrong here by itself is told as it is
            lost = isinstance(error, InternalError) and not isinstance(error, PartnerError)
            if lost and self._fault is not None:
                raise self._error() from error

    def wait(self) -> None:
        """Wait until all have loaded their part; PartnerError with the reason if one could not."""
        for worker in self._workers:
            worker.ready.wait()
        self.check()

    def check(self) -> None:
        """Raise PartnerError if a process is lost."""
        if self._fault is not None:
            raise self._error()

    def tell(self, message: Message) -> None:
        """Send all others a message; PartnerError if one is lost."""
        self.check()
        data = encode(message)
        for worker in self._workers:
            worker.send(data)
        self.check()

    def together(self, run: Callable[[], T]) -> T:
        """Run what the others were told of. If it fails here, they wait for something that never comes."""
        try:
            result = self._checked(run)
            self.check()
            return result
        except BaseException as error:
            self._lost(0, f"a step failed in the first process: {error}")
            raise

    def close(self, *, at_once: bool = False) -> None:
        """End the other processes and leave the group. Nothing may run on it any more.

        With `at_once`, or if one is lost, they are not left the time to give their memory back themselves.
        """
        if self._closing:
            return
        self._closing = True
        for worker in self._workers:
            worker.stop(at_once=at_once or self._fault is not None)
        group, self._group = self._group, None
        if group is not None:
            if at_once:
                group.abort()
            # all have to leave before any of them has left
            group.close()
        for worker in self._workers:
            worker.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _checked(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except InternalError as error:
            # the pipe of a process that ended may be seen later than the group's connection to it
            for worker in self._workers:
                worker.settle()
            if self._fault is not None:
                raise self._error() from error
            raise

    def _error(self) -> PartnerError:
        return PartnerError(f"{self._fault}", hint=_HINT)

    def _lost(self, rank: int, reason: str) -> None:
        """Note the first loss, and end all others: they would wait for the lost one for good."""
        with self._lock:
            if self._closing or self._fault is not None:
                return
            self._fault = reason
        for worker in self._workers:
            if worker.rank != rank:
                worker.kill()
        if self._group is not None:
            self._group.abort()


class _Worker:
    """Another process: a pipe to it, and a thread that reads what it reports until it ends."""

    def __init__(
        self, rank: int, command: Sequence[str], task: str, lost: Callable[[int, str], None]
    ) -> None:
        self.rank = rank
        self.started, self.ready = threading.Event(), threading.Event()
        self._lost = lost
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # a key that interrupts the first process is its own matter
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._thread = threading.Thread(target=self._listen, name=f"part-{rank}", daemon=True)
        self._thread.start()
        self.send(f"{task}\n".encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        # a pipe without a reader: the listening thread finds out why
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def settle(self) -> None:
        """Give a process that is about to end, and the thread that hears of it, a moment."""
        self._thread.join(1.0)

    def kill(self) -> None:
        self._process.kill()

    def stop(self, *, at_once: bool) -> None:
        if at_once:
            self.kill()
        self.send(encode(Stop()))

    def join(self) -> None:
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        reason = ""
        for line in self._process.stdout:
            report = json.loads(line)
            if "error" in report:
                reason = report["error"]
            self.started.set()
            if "ready" in report:
                self.ready.set()
        code = self._process.wait()
        why = reason or f"its process ended with status {code}"
        self._lost(self.rank, f"part {self.rank} of the model is lost: {why}")
        self.started.set()
        self.ready.set()
