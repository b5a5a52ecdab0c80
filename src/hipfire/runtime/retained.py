"""Decode steps on a GPU without Python: each batch size is recorded once, captured as a graph, and replayed.

The first step of a batch size runs and is recorded on inputs at fixed addresses, the second is captured,
later ones fill in their tokens, slots and positions and replay the graph. What cannot be prepared, or fails
once, is run operation by operation from then on, and says so. This file knows no kernel and makes no graph
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hipfire.base import log
from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.kernels.gpu.engine import GpuEngine, GpuTape
from hipfire.kernels.gpu.tape import describe
from hipfire.kernels.tape import TapeFacts, TapeKey
from hipfire.layers.context import StepContext
from hipfire.runtime.route import Batch, Forward, ReplayError, Request, Route, single_tokens

# batch sizes whose graphs are kept; the one used longest ago goes first
MOST_GRAPHS: Final = 64


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Start the step's launches again."""


# runs a function without its launches being carried out, and returns them as a graph
Capture = Callable[[Callable[[], object]], Graph]
Regions = Callable[[], list[tuple[str, torch.Tensor]]]


class _Inputs:
    """A step's tokens and rows in one buffer on the device, filled by one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        # a step may be recorded in inference mode, and its inputs are filled outside of it too
        with torch.inference_mode(False):
            self._host = torch.empty(3 * size, dtype=torch.int64, pin_memory=pinned)
            self._device = torch.empty(3 * size, dtype=torch.int64, device=device)
            self.ids = self._device[:size]
            self.rows = self._device[size:].view(size, 2)
        self._values = self._host.numpy()
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def fill(self, batch: Batch) -> None:
        if self._copied is not None:
            # the copy of the step before may still be reading; an event that was never recorded is over
            self._copied.synchronize()
        size = len(batch)
        for index, (segment, tokens) in enumerate(batch):
            self._values[index] = tokens[0]
            place = size + 2 * index
            self._values[place], self._values[place + 1] = segment.slot, segment.start
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass
class _Recorded:
    """The step of a batch size: its inputs, launches and result, and its graph once there is one."""

    inputs: _Inputs
    tape: GpuTape
    key: TapeKey
    logits: torch.Tensor
    graph: Graph | None = None


class RetainedDecode:
    """The retained decode steps of a model on a GPU engine: `runtime.route.Retained`.

    `forward(tokens, step)` runs the whole model and returns the logits of every token. `capture` makes a
    graph of what a function launches. `scratch` and `guards` give the memory of intermediate results and what
    lies around it, for proofs. Logits are the step's own memory on the device: the next step overwrites them.
    """

    def __init__(
        self,
        engine: GpuEngine,
        forward: Forward,
        capture: Capture,
        *,
        scratch: Regions = list,
        guards: Regions = list,
    ) -> None:
        self.request: Request = "prepared"
        self._engine = engine
        self._forward = forward
        self._capture = capture
        self._scratch, self._guards = scratch, guards
        self._steps: dict[int, _Recorded] = {}
        self._fault: str | None = None
        self._replays = self._relaunches = 0

    def again(self, batch: Batch) -> torch.Tensor | None:
        """Replay a step of one token of each segment, each in a slot of its own.

        Returns logits [len(batch), vocab], or None if no graph is ready for such a batch. Raises ReplayError
        if the replay fails; the step is not tried again, and no later step is replayed.
        """
        recorded = self._steps.get(len(batch))
        if recorded is None or recorded.graph is None or self.request == "eager" or self._fault is not None:
            return None
        if not single_tokens(batch):
            return None
        if self.request == "relaunched" and (libraries := describe(recorded.tape).libraries):
            raise UnsupportedError(f"{libraries[0]} is a library's and cannot be launched again")
        if len(self._steps) > 1:
            # taken out and put back: the dictionary's order is the order of use
            self._steps[len(batch)] = self._steps.pop(len(batch))
        self._start(recorded, batch)
        return recorded.logits

    def first(self, step: StepContext, tokens: Sequence[int]) -> torch.Tensor:
        """Run a step operation by operation and record it, or capture it if that was done before."""
        self._engine.settle()
        if self.request == "eager" or self._fault is not None:
            return self._forward(torch.tensor(tokens, device=self._engine.device), step)
        batch = [(segment, (token,)) for segment, token in zip(step.segments, tokens, strict=True)]
        recorded = self._steps.get(len(batch))
        if recorded is None:
            return self._record(step, batch)
        if recorded.graph is None and not self._prepare(recorded, step, batch):
            return self._forward(recorded.inputs.ids, _context(step, recorded.inputs))
        self._start(recorded, batch)
        return recorded.logits

    def forget(self) -> None:
        """Drop all graphs and tapes, as before memory that they use is given back. A fault stays."""
        self._steps.clear()

    def route(self) -> Route:
        """Return which way steps take."""
        return Route(
            requested=self.request,
            selected=self.request if self._fault is None else "eager",
            replays=self._replays,
            relaunches=self._relaunches,
            sizes=tuple(sorted(size for size, each in self._steps.items() if each.graph is not None)),
            fallback_reason=self._fault,
        )

    def facts(self, batch_size: int) -> TapeFacts | None:
        """Return what is known of the tape of a batch size, or None while there is none."""
        recorded = self._steps.get(batch_size)
        return None if recorded is None else describe(recorded.tape)

    def scratch(self, batch_size: int) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, the memory of intermediate results, which steps of all sizes share."""
        del batch_size
        return self._scratch()

    def guards(self) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, memory that no step may write."""
        return self._guards()

    def _record(self, step: StepContext, batch: Batch) -> torch.Tensor:
        """Run a step on fixed inputs and keep its launches; where they are not fit, its result stands."""
        inputs = _Inputs(len(batch), self._engine.device)
        inputs.fill(batch)
        self._engine.record()
        try:
            logits = self._forward(inputs.ids, _context(step, inputs))
        finally:
            tape = self._engine.finish()
        facts = describe(tape)
        if facts.faults:
            self._fall_back("; ".join(facts.faults[:3]))
            return logits
        if len(self._steps) >= MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]
        self._steps[len(batch)] = _Recorded(inputs, tape, facts.key, logits)
        return logits

    def _prepare(self, recorded: _Recorded, step: StepContext, batch: Batch) -> bool:
        """Capture a step; False, and no replay from then on, if that fails or is not what was recorded."""
        recorded.inputs.fill(batch)
        context = _context(step, recorded.inputs)
        try:
            self._engine.record()
            try:
                graph = self._capture(lambda: self._forward(recorded.inputs.ids, context))
            finally:
                tape = self._engine.finish()
            if describe(tape).key != recorded.key or _addresses(tape) != _addresses(recorded.tape):
                raise InternalError("what was captured is not what was recorded")
        except Exception as error:
            self._fall_back(f"the step cannot be captured: {error}")
            self._engine.settle()
            return False
        recorded.graph = graph
        return True

    def _start(self, recorded: _Recorded, batch: Batch) -> None:
        """Run a prepared step; whatever fails ends replaying for good."""
        assert recorded.graph is not None
        try:
            recorded.inputs.fill(batch)
            if self.request == "relaunched":
                for launch in recorded.tape.launches:
                    launch.run()
                self._relaunches += 1
            else:
                recorded.graph.replay()
                self._replays += 1
        except Exception as error:
            self._fall_back(f"a replay failed: {error}")
            raise ReplayError(
                f"a decode step failed while it was replayed ({error})",
                hint="send the request again; decode steps are no longer replayed",
            ) from error

    def _fall_back(self, reason: str) -> None:
        """Replay nothing from now on, and say so once."""
        if self._fault is None:
            log.logger().warning(f"decode steps run operation by operation from now on: {reason}")
            self._fault = reason
        self._steps.clear()


def _addresses(tape: GpuTape) -> list[int]:
    return [tensor.data_ptr() for launch in tape.launches for tensor in (*launch.reads, *launch.writes)]


def _context(step: StepContext, inputs: _Inputs) -> StepContext:
    """Return a context of the same step that reads its rows from fixed inputs.

    Each run needs one of its own: what a context remembers of a capture was never computed.
    """
    rows = inputs.rows
    return StepContext(step.launcher, step.cache, step.segments, rows.device, rows=rows)
