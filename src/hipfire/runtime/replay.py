"""Decode steps without Python: the first step of a batch size is recorded, later ones are replayed.

What differs between steps (tokens, slots, positions) stands in tensors that the recorded kernels read, so a
program serves every step of its batch size. Replay runs the same kernels on the same kinds of buffers as a
step that is run operation by operation, and gives the same bytes. This file does not know what the kernels
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hipfire.kernels.cpu.engine import CpuEngine, Program
from hipfire.layers.context import Segment, StepContext

# batch sizes whose programs are kept; the one used longest ago goes first
MOST_PROGRAMS = 8

Forward = Callable[[torch.Tensor, StepContext], torch.Tensor]


class _Recorded:
    """A program with its inputs and its result as arrays, so that little time is spent around a step."""

    def __init__(
        self, tokens: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor, program: Program
    ) -> None:
        self._kept = (tokens, rows, logits)
        self.tokens, self.rows, self.logits = tokens.numpy(), rows.numpy(), logits.numpy()
        self.program = program

    def run(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        self.tokens[:] = tokens
        self.rows[:] = [(segment.slot, segment.start) for segment in segments]
        self.program.run()
        return self.copy()

    def copy(self) -> torch.Tensor:
        """Return the logits, copied by this thread: torch would wake a pool of its own for it."""
        return torch.from_numpy(self.logits.copy())


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

    def step(
        self, make_step: Callable[[], StepContext], segments: Sequence[Segment], tokens: Sequence[int]
    ) -> torch.Tensor:
        """Run one token of each segment; returns logits [len(tokens), vocab] that no later step changes."""
        recorded = self._programs.pop(len(tokens), None)
        if recorded is None:
            return self._record(make_step(), tokens)
        # taken out and put back: the dictionary's order is the order of use
        self._programs[len(tokens)] = recorded
        return recorded.run(tokens, segments)

    def _record(self, step: StepContext, tokens: Sequence[int]) -> torch.Tensor:
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
