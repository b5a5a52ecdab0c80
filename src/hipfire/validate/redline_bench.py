"""Where the redline harness runs its steps: a model in this process, or one in the engine's daemon.

Both load with the same parameters, so one recording of both has one key. This file judges nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hipfire.base.errors import TransportError
from hipfire.engine.client import Daemon
from hipfire.engine.daemon_model import LoadedResident, ModelLoader
from hipfire.engine.wire import decode_message
from hipfire.engine.wire_messages import Load
from hipfire.validate.redline_options import RedlineOptions

T = TypeVar("T")
Result = Mapping[str, Any]
# what a daemon adds to a result so that its asker recognizes it
_ENVELOPE = frozenset({"type", "request"})
_LOADED = ("model", "arch", "dim", "layers", "vocab", "max_seq", "kv_mode", "weights", "slots", "threads")


class Bench(Protocol):
    """A loaded model whose decode steps can be recorded and compared; HipfireError where they cannot."""

    @property
    def loaded(self) -> Result:
        """Return what was loaded, and as what."""

    def capture(self, context: int, batch: int) -> Result:
        """Record a step anew and return what it is known by."""

    def shadow(self, context: int, positions: int, batch: int) -> Result:
        """Compare steps taken three ways."""

    def measure(self, context: int, iterations: int) -> Result:
        """Return the time of so many steps of one sequence."""


class LocalBench:
    """A model in this process."""

    def __init__(self, model: Path, options: RedlineOptions) -> None:
        message = decode_message({"type": "load", "model": str(model), "params": options.load_fields()})
        assert isinstance(message, Load)
        loader = ModelLoader()
        loader.admit(message, None)
        self._resident: LoadedResident = loader.load(message, lambda done, total, what: None)

    @property
    def loaded(self) -> Result:
        """Return what was loaded, and as what."""
        return _identity(self._resident.describe())

    def capture(self, context: int, batch: int) -> Result:
        """Record a step anew and return what it is known by."""
        return self._resident.redline_capture(context, batch)

    def shadow(self, context: int, positions: int, batch: int) -> Result:
        """Compare steps taken three ways."""
        return self._resident.redline_shadow(context, positions, batch)

    def measure(self, context: int, iterations: int) -> Result:
        """Return the time of so many steps of one sequence."""
        return self._resident.bench_decode(context, iterations)


class DaemonBench:
    """A model in the engine's daemon, asked in its own protocol; made by `daemon_bench`."""

    def __init__(self, loop: asyncio.Runner, daemon: Daemon, loaded: Result, timeout: float) -> None:
        self._loop = loop
        self._daemon = daemon
        self._timeout = timeout
        self.loaded: Result = _identity(loaded)

    def capture(self, context: int, batch: int) -> Result:
        """Record a step anew and return what it is known by."""
        return self._ask("redline_capture", context_tokens=context, batch=batch)

    def shadow(self, context: int, positions: int, batch: int) -> Result:
        """Compare steps taken three ways."""
        return self._ask("redline_shadow", context_tokens=context, positions=positions, batch=batch)

    def measure(self, context: int, iterations: int) -> Result:
        """Return the time of so many steps of one sequence."""
        return self._ask("bench_decode", context_tokens=context, iterations=iterations)

    def _ask(self, kind: str, **fields: Any) -> Result:
        reply = _within(self._loop, self._daemon.request(kind, **fields), self._timeout)
        return {name: value for name, value in reply.items() if name not in _ENVELOPE}


@contextmanager
def daemon_bench(
    model: Path, options: RedlineOptions, environment: Mapping[str, str], log: Path | None
) -> Iterator[DaemonBench]:
    """Start a daemon, load the model there, and end the daemon afterwards.

    Raises TransportError if it does not start, dies, or gives no answer in time.
    """
    command = [sys.executable, "-m", "hipfire.engine.daemon"]
    with asyncio.Runner() as loop:
        daemon = loop.run(Daemon.start(command, environment, log, ready_seconds=options.timeout))
        try:
            loading = daemon.request("load", model=str(model), params=options.load_fields())
            loaded = _within(loop, loading, options.timeout)
            yield DaemonBench(loop, daemon, loaded, options.timeout)
        finally:
            loop.run(daemon.close())


def timed(bench: Bench, options: RedlineOptions) -> Result:
    """Return the times of several runs of decode steps, on a machine that may have other work."""
    began = time.perf_counter()
    runs = [dict(bench.measure(options.context, options.iterations)) for _ in range(options.measures)]
    rates = sorted(run["tok_s"] for run in runs)
    middle = rates[len(rates) // 2] if rates else None
    return {"runs": runs, "tok_s_median": middle, "seconds": round(time.perf_counter() - began, 3)}


def _identity(described: Result) -> Result:
    return {name: described[name] for name in _LOADED if name in described}


def _within(loop: asyncio.Runner, work: Coroutine[Any, Any, T], seconds: float) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)

    try:
        return loop.run(bounded())
    except TimeoutError as error:
        raise TransportError(f"the engine gave no answer within {seconds:g} s") from error
