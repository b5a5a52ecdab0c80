"""What a forward step carries with it: the launcher, the sequences in the batch, their caches.

A batch is ragged: the tokens of all sequences lie one after the other in one [T] tensor, and a `Segment` says
which rows belong to which cache slot and at which position they start. Prefill chunks and single decode steps
mix freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hipfire.kernels.launch import Launcher
from hipfire.kernels.rope import ROPE_ANGLES


class CacheStore(Protocol):
    """The part of a key/value cache that attention uses."""

    def append(
        self, launcher: Launcher, layer: int, slot: int, start: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store k and v [T, KV, D] at positions start .. start + T of a slot."""

    def view(
        self, launcher: Launcher, layer: int, slot: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `length` keys and values of a slot, [length, KV, D]."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's tokens within a step: `length` of them, the first at position `start` of `slot`."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class RopeTable:
    """Inverse frequencies [R/2] of the rotated dims, and the factor on cos and sin."""

    inverse_frequencies: torch.Tensor
    attention_scale: float = 1.0


class StepContext:
    """One step over a ragged batch; made anew for every step, passed to every layer."""

    def __init__(
        self, launcher: Launcher, cache: CacheStore, segments: Sequence[Segment], device: torch.device
    ) -> None:
        self.launcher = launcher
        self.cache = cache
        self.segments = tuple(segments)
        spans = [torch.arange(s.start, s.start + s.length, device=device) for s in self.segments]
        self.positions = torch.cat(spans)
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def angles(self, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) [T, R/2] of this step's positions, computed once per table and step."""
        key = id(table)
        if key not in self._angles:
            self._angles[key] = self.launcher.run(
                ROPE_ANGLES, self.positions, table.inverse_frequencies, table.attention_scale
            )
        return self._angles[key]

    def last_rows(self) -> torch.Tensor:
        """Return the row of every segment's last token, [number of segments]."""
        lengths = torch.tensor([s.length for s in self.segments], device=self.positions.device)
        return lengths.cumsum(0) - 1
