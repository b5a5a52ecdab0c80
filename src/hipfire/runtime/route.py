"""What replayed decode steps have in common on every device: which way steps take, and the proof of it.

A route is one of three: `eager` runs a step operation by operation, `prepared` replays it as one program or
graph, `relaunched` starts its recorded launches one by one. This file knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.tape import TapeFacts
from hipfire.layers.context import Segment, StepContext

# `prepared` falls back to `eager` where a step cannot be replayed; the other two are asked for by proofs
Request = Literal["eager", "prepared", "relaunched"]
Batch = Sequence[tuple[Segment, Sequence[int]]]
Forward = Callable[[torch.Tensor, StepContext], torch.Tensor]


class ReplayError(InternalError):
    """A step that was replayed failed. Its caches are not to be trusted; later steps are not replayed."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which way decode steps take.

    `selected` is what the next step of a prepared batch size does. `replays` counts steps that were replayed,
    `relaunches` those started from their tape, `sizes` are the batch sizes that are prepared.
    `fallback_reason` says why steps are not replayed, if they are not.
    """

    requested: Request
    selected: Request
    replays: int
    relaunches: int
    sizes: tuple[int, ...]
    fallback_reason: str | None = None


class Retained(Protocol):
    """Decode steps that are recorded once for each batch size and run again."""

    request: Request

    def again(self, batch: Batch) -> torch.Tensor | None:
        """Run a recorded step on these tokens, or return None where there is none for such a batch."""

    def first(self, step: StepContext, tokens: Sequence[int]) -> torch.Tensor:
        """Run a step of one token of each segment, and see to it that it can be run again."""

    def forget(self) -> None:
        """Drop everything recorded; a fault is not forgotten."""

    def route(self) -> Route:
        """Return which way steps take."""

    def facts(self, batch_size: int) -> TapeFacts | None:
        """Return what is known of the recorded step of a batch size, or None while there is none."""

    def scratch(self, batch_size: int) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, the memory of intermediate results, as the last step of that size left it."""

    def guards(self) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, memory that no step may write."""


def single_tokens(batch: Batch) -> bool:
    """Tell whether a batch is one token of each segment, each in a slot of its own."""
    if any(segment.length != 1 for segment, _ in batch):
        return False
    return len(batch) == 1 or len({segment.slot for segment, _ in batch}) == len(batch)
