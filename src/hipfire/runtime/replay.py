"""Decode steps without Python: the first step of a batch size is recorded, later ones are replayed.

What differs between steps (tokens, slots, positions) stands in tensors that the recorded kernels read, so a
program serves every step of its batch size. Replay runs the same kernels on the same kinds of buffers as a
step that is run operation by operation, and gives the same bytes. This file does not know what the kernels
are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from hipfire.kernels.cpu.engine import CpuEngine, Launch, Program
from hipfire.kernels.cpu.tape import describe
from hipfire.kernels.tape import TapeFacts
from hipfire.layers.context import StepContext
from hipfire.runtime.route import Batch, Forward, Request, Route, single_tokens

# batch sizes whose programs are kept; the one used longest ago goes first
MOST_PROGRAMS = 8
# results of a batch size whose memory is used again once nobody holds them
MOST_RESULTS = 4


class _Recorded:
    """A program with its inputs and its result as arrays, so that little time is spent around a step."""

    def __init__(
        self, tokens: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor, program: Program
    ) -> None:
        self._kept = (tokens, rows, logits)
        self._tokens, self._rows, self._logits = tokens.numpy(), rows.numpy(), logits.numpy()
        self._results: list[np.ndarray[Any, Any]] = [np.empty_like(self._logits)]
        # how many references Python counts where there is none but the list's differs between its versions
        self._unheld = self._holders(0)
        self.program = program

    def run(self, batch: Batch) -> torch.Tensor:
        self._fill(batch)
        self.program.run()
        return self.copy()

    def relaunch(self, batch: Batch, engine: CpuEngine) -> torch.Tensor:
        """Run the step launch by launch, each with all threads waiting for it."""
        self._fill(batch)
        for launch in self.program.launches:
            engine.launch(
                launch.kernel,
                *launch.arguments,
                reads=launch.reads,
                writes=launch.writes,
                units=launch.units,
            )
        return self.copy()

    def _fill(self, batch: Batch) -> None:
        for index, (segment, tokens) in enumerate(batch):
            self._tokens[index] = tokens[0]
            self._rows[index, 0], self._rows[index, 1] = segment.slot, segment.start

    def copy(self) -> torch.Tensor:
        """Return the logits, copied by this thread: torch would wake a pool of its own for it.

        Fresh memory of that size costs more than the copy, so results that nobody holds any more are used
        again: a tensor, and every view of it, holds the array whose memory it shows.
        """
        for index in range(len(self._results)):
            if self._holders(index) == self._unheld:
                break
        else:
            if len(self._results) >= MOST_RESULTS:
                return torch.from_numpy(self._logits.copy())
            index = len(self._results)
            self._results.append(np.empty_like(self._logits))
        np.copyto(self._results[index], self._logits)
        return torch.from_numpy(self._results[index])

    def _holders(self, index: int) -> int:
        return sys.getrefcount(self._results[index])


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Let torch fill new memory, so that what a step does not write is the same every time.

    It does so while it is told to be deterministic, unless that was switched off.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class DecodeReplay:
    """The recorded decode steps of a model on the CPU engine: `runtime.route.Retained`.

    `forward(tokens, step)` runs the whole model and returns the logits of every token.
    """

    def __init__(self, engine: CpuEngine, forward: Forward) -> None:
        self.request: Request = "prepared"
        self._engine = engine
        self._forward = forward
        self._programs: dict[int, _Recorded] = {}
        self._possible = True
        self._replays = self._relaunches = 0
        self._eager: Sequence[Launch] = ()

    def program(self, batch_size: int) -> Program | None:
        """Return the program of a batch size, or None while there is none."""
        recorded = self._programs.get(batch_size)
        return None if recorded is None else recorded.program

    def again(self, batch: Batch) -> torch.Tensor | None:
        """Replay a step of one token of each segment, each in a slot of its own.

        Returns logits [len(batch), vocab] that no later step changes, or None if there is no program for such
        a batch.
        """
        recorded = self._programs.get(len(batch))
        if recorded is None or self.request == "eager" or not single_tokens(batch):
            return None
        if len(self._programs) > 1:
            # taken out and put back: the dictionary's order is the order of use
            self._programs[len(batch)] = self._programs.pop(len(batch))
        if self.request == "relaunched":
            self._relaunches += 1
            return recorded.relaunch(batch, self._engine)
        self._replays += 1
        return recorded.run(batch)

    def first(self, step: StepContext, tokens: Sequence[int]) -> torch.Tensor:
        """Run such a step operation by operation, and keep its program if there can be one."""
        ids = torch.tensor(tokens)
        if not self._possible:
            return self._forward(ids, step)
        self._engine.record()
        program = None
        try:
            with _filled_memory() if self.request == "eager" else nullcontext():
                logits = self._forward(ids, step)
        finally:
            program = self._engine.finish()
        if program is None:
            self._possible = False
            return logits
        if self.request == "eager":
            self._eager = program.launches
            return logits
        if len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        recorded = _Recorded(ids, step.rows, logits, program)
        self._programs[len(tokens)] = recorded
        return recorded.copy()

    def forget(self) -> None:
        """Drop all programs."""
        self._programs.clear()
        self._eager = ()

    def route(self) -> Route:
        """Return which way steps take."""
        return Route(
            requested=self.request,
            selected=self.request if self._possible else "eager",
            replays=self._replays,
            relaunches=self._relaunches,
            sizes=tuple(sorted(self._programs)),
            fallback_reason=None if self._possible else "an operation of a step ran outside of the engine",
        )

    def facts(self, batch_size: int) -> TapeFacts | None:
        """Return what is known of the program of a batch size, or None while there is none."""
        program = self.program(batch_size)
        return None if program is None else describe(program.launches)

    def scratch(self, batch_size: int) -> list[tuple[str, torch.Tensor]]:
        """Return what the launches of such a step write, caches among it.

        While steps are eager, it is what the last one wrote.
        """
        program = self.program(batch_size)
        launches = self._eager if self.request == "eager" or program is None else program.launches
        return [
            (f"{index:04d} {launch.kernel.name} {place}", tensor)
            for index, launch in enumerate(launches)
            for place, tensor in enumerate(launch.writes)
        ]

    def guards(self) -> list[tuple[str, torch.Tensor]]:
        """Return nothing: results of the CPU engine have no guard zones."""
        return []
