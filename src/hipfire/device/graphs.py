"""Graphs of launches: what a function launches is captured once and then launched as one piece.

A graph holds the addresses of its arguments, so nothing may be allocated while it is captured: at the replay
that memory could be someone else's. Capturing does not run anything. The same code serves CUDA and HIP, whose
graphs torch offers under one name. This file does not know what is launched.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import cuda

from hipfire.base.errors import InternalError


class Graph:
    """A captured graph on one device."""

    def __init__(self, graph: Any, device: torch.device) -> None:
        self._graph = graph
        self._device = device

    def replay(self) -> None:
        """Launch everything again, on the device's current stream; InternalError if that fails."""
        if self._graph is None:
            raise InternalError("a graph was replayed after its release")
        try:
            with cuda.device(self._device):
                self._graph.replay()
        except RuntimeError as error:
            raise InternalError(f"the replay of a graph failed: {_line(error)}") from error

    def release(self) -> None:
        """Give the graph's resources back; InternalError the second time."""
        if self._graph is None:
            raise InternalError("a graph was released twice")
        graph, self._graph = self._graph, None
        graph.reset()


class Capturer:
    """Captures graphs on one device, whichever device is the current one.

    All of it happens on one side stream. Libraries keep a workspace for each stream and allocate it at the
    first call there: `warm_up` makes that call before a capture does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with cuda.device(device):
            self._stream = cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run on the side stream, after all that was launched before and before all that is launched next."""
        with cuda.device(self._device):
            outer = cuda.current_stream(self._device)
            self._stream.wait_stream(outer)
            try:
                with cuda.stream(self._stream):
                    run()
            finally:
                outer.wait_stream(self._stream)

    def capture(self, run: Callable[[], object]) -> Graph:
        """Return the graph of what `run` launches. It must have run before, so that all is compiled.

        Raises InternalError if something cannot be captured or if device memory was allocated; a HipfireError
        that `run` raises goes through. Either way nothing is left of the capture.
        """
        with cuda.device(self._device):
            self._stream.wait_stream(cuda.current_stream(self._device))
            # the side stream must be idle: what is pending there is no part of the graph
            self._stream.synchronize()
            graph = cuda.CUDAGraph()
            with cuda.stream(self._stream), _no_collection():
                self._record(graph, run)
        return Graph(graph, self._device)

    def _record(self, graph: Any, run: Callable[[], object]) -> None:
        try:
            # other threads go on with their work: only calls of this one could spoil the capture
            graph.capture_begin(capture_error_mode="thread_local")
            before = self._allocations()
            try:
                run()
                taken = self._allocations() - before
            except BaseException:
                # ends the capture, which is invalid by now and says so
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:
            self._discard(graph)
            raise InternalError(f"launches could not be captured: {_line(error)}") from error
        except BaseException:
            self._discard(graph)
            raise
        if taken:
            self._discard(graph)
            raise InternalError(f"device memory was allocated {taken} times while launches were captured")

    def _allocations(self) -> int:
        """Return how often device memory was allocated so far."""
        count: int = cuda.memory_stats(self._device).get("allocation.all.allocated", 0)
        return count

    @staticmethod
    def _discard(graph: Any) -> None:
        with contextlib.suppress(RuntimeError):
            graph.reset()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from destroying old graphs and tensors now: such calls would spoil a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(run: Callable[[], object], device: torch.device) -> Graph:
    """Return the graph of what `run` launches on `device`; as `Capturer.capture`, on a stream of its own."""
    return Capturer(device).capture(run)


def _line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
