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

from hipfire.kernels.fwht import FWHT
from hipfire.kernels.launch import Launcher
from hipfire.kernels.rope import ROPE_ANGLES


class CacheStore(Protocol):
    """The part of a key/value cache that attention uses."""

    def append(
        self, launcher: Launcher, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store k and v [T, KV, D] at the slots and positions in `rows` [T, 2]."""

    def attend(
        self,
        launcher: Launcher,
        layer: int,
        rows: torch.Tensor,
        q: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return what the queries q [T, H, D] at `rows` see of their slots, float32 [T, H, D]."""


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
    """One step over a ragged batch, passed to every layer.

    `rows` int64 [T, 2] holds the slot and the position of every token. Whatever differs between steps of
    one shape stands in tensors, so that a recorded step can be run again with other contents.
    """

    def __init__(
        self, launcher: Launcher, cache: CacheStore, segments: Sequence[Segment], device: torch.device
    ) -> None:
        self.launcher = launcher
        self.cache = cache
        self.segments = tuple(segments)
        self.rows = torch.tensor(
            [(s.slot, s.start + i) for s in self.segments for i in range(s.length)], device=device
        )
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rotated: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def positions(self) -> torch.Tensor:
        """The position of every token in its sequence, [T]."""
        return self.rows[:, 1]

    def angles(self, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) [T, R/2] of this step's positions, computed once per table and step."""
        key = id(table)
        if key not in self._angles:
            self._angles[key] = self.launcher.run(
                ROPE_ANGLES, self.rows, table.inverse_frequencies, table.attention_scale
            )
        return self._angles[key]

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] in the basis of rotated weights; several weights in a row share one rotation."""
        if self._rotated is None or self._rotated[0] is not x:
            self._rotated = (x, self.launcher.run(FWHT, x))
        return self._rotated[1]

    def last_rows(self) -> torch.Tensor:
        """Return the row of every segment's last token, [number of segments]."""
        lengths = torch.tensor([s.length for s in self.segments], device=self.rows.device)
        return lengths.cumsum(0) - 1
