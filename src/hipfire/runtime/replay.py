"""Decode steps without Python: the first step of a batch size is recorded, later ones are replayed.

What differs between steps (tokens, slots, positions) stands in tensors that the recorded kernels read, so a
program serves every step of its batch size. Replay runs the same kernels on the same kinds of buffers as a
step that is run operation by operation, and gives the same bytes. This file does not know what the kernels
are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hipfire.kernels.cpu.engine import CpuEngine, Program
from hipfire.layers.context import Segment, StepContext

# batch sizes whose programs are kept; the one used longest ago goes first
MOST_PROGRAMS = 8
# results of a batch size whose memory is used again once nobody holds them
MOST_RESULTS = 4

Forward = Callable[[torch.Tensor, StepContext], torch.Tensor]


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

    def run(self, batch: Sequence[tuple[Segment, Sequence[int]]]) -> torch.Tensor:
        for index, (segment, tokens) in enumerate(batch):
            self._tokens[index] = tokens[0]
            self._rows[index, 0], self._rows[index, 1] = segment.slot, segment.start
        self.program.run()
        return self.copy()

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


class DecodeReplay:
    """The recorded decode steps of a model on the CPU engine.

    `forward(tokens, step)` runs the whole model and returns the logits of every token.
    """

    def __init__(self, engine: CpuEngine, forward: Forward) -> None:
        self._engine = engine
        self._forward = forward
        self._programs: dict[int, _Recorded] = {}
        self._possible = True

    def program(self, batch_size: int) -> Program | None:
        """Return the program of a batch size, or None while there is none."""
        recorded = self._programs.get(batch_size)
        return None if recorded is None else recorded.program

    def again(self, batch: Sequence[tuple[Segment, Sequence[int]]]) -> torch.Tensor | None:
        """Replay a step of one token of each segment, each in a slot of its own.

        Returns logits [len(batch), vocab] that no later step changes, or None if there is no program for such
        a batch.
        """
        recorded = self._programs.get(len(batch))
        if recorded is None or any(segment.length != 1 for segment, _ in batch):
            return None
        if len(batch) > 1 and len({segment.slot for segment, _ in batch}) < len(batch):
            return None
        if len(self._programs) > 1:
            # taken out and put back: the dictionary's order is the order of use
            self._programs[len(batch)] = self._programs.pop(len(batch))
        return recorded.run(batch)

    def first(self, step: StepContext, tokens: Sequence[int]) -> torch.Tensor:
        """Run such a step operation by operation, and keep its program if there can be one."""
        ids = torch.tensor(tokens)
        if not self._possible:
            return self._forward(ids, step)
        self._engine.record()
        program = None
        try:
            logits = self._forward(ids, step)
        finally:
            program = self._engine.finish()
        if program is None:
            self._possible = False
            return logits
        if len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        recorded = _Recorded(ids, step.rows, logits, program)
        self._programs[len(tokens)] = recorded
        return recorded.copy()
