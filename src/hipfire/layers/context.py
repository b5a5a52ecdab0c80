"""What a forward step carries with it: the launcher, the sequences in the batch, their caches.

A batch is ragged: the tokens of all sequences lie one after the other in one [T] tensor, and a `Segment` says
which rows belong to which cache slot and at which position they start. Prefill chunks and single decode steps
mix freely.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hipfire.kernels.fwht import FWHT
from hipfire.kernels.launch import Launcher
from hipfire.kernels.rope import ROPE_ANGLES


class StateViews(Protocol):
    """What recurrent layers keep of the sequences in all slots."""

    def tail(self, layer: int) -> torch.Tensor:
        """Return the convolution tails of a recurrent layer, float32 [slots, C, W - 1]."""

    def matrix(self, layer: int) -> torch.Tensor:
        """Return the matrices of a recurrent layer, float32 [slots, Hv, Dk, Dv]."""


class CacheStore(Protocol):
    """The part of a model's caches that its layers use."""

    @property
    def states(self) -> StateViews | None:
        """What recurrent layers keep; None where there are none."""

    def tiles(self, lengths: Sequence[int]) -> Sequence[tuple[int, int]] | None:
        """Return how attention cuts segments of these lengths up: (first token, tokens) of every tile.

        None where it takes tokens one by one, or cuts them up by itself.
        """

    def enter(
        self,
        step: StepContext,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> torch.Tensor:
        """Store k and v [T, KV, D] where the step's rows say, and return the queries [T, H, D] for `attend`.

        Queries and keys are first normalized where there are weights for it, then rotated.
        """

    def attend(
        self, step: StepContext, layer: int, q: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return what the queries q [T, H, D] see of their slots, [T, H, D]."""


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

    `rows` int64 [T, 2] holds the slot and the position of every token; the given ones if there are any,
    else those of the segments. `tiles` int32 [n, 2] is how a cache that asks for it wants tokens put
    together, and `pieces` int32 [S, 2] what recurrent layers take together: first token and tokens of every
    segment, segments of one sequence that follow one another as one; None where all have a single token.
    Whatever differs between steps of one shape stands in tensors, so that a recorded step can be run again
    with other contents.
    """

    def __init__(
        self,
        launcher: Launcher,
        cache: CacheStore,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        rows: torch.Tensor | None = None,
    ) -> None:
        self.launcher = launcher
        self.cache = cache
        self.segments = tuple(segments)
        self.device = device
        if rows is None:
            places = [(s.slot, s.start + i) for s in self.segments for i in range(s.length)]
            rows = torch.tensor(places, device=device)
        self.rows = rows
        tiles = cache.tiles([s.length for s in self.segments])
        self.tiles = None if tiles is None else torch.tensor(tiles, dtype=torch.int32, device=device)
        pieces = _pieces(self.segments) if cache.states is not None else None
        self.pieces = None if pieces is None else torch.tensor(pieces, dtype=torch.int32, device=device)
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
        ends = itertools.accumulate(segment.length for segment in self.segments)
        return torch.tensor([end - 1 for end in ends], device=self.device)

    def settle(self, *kept: torch.Tensor) -> None:
        """Say that of all results of this step only those in `kept` will be read again, and the angles."""
        self._rotated = None
        angles = (tensor for pair in self._angles.values() for tensor in pair)
        self.launcher.settle(*kept, *angles)


def _pieces(segments: Sequence[Segment]) -> list[tuple[int, int]] | None:
    """Return first token and tokens of every sequence's part of a step; None if each is a single token."""
    pieces: list[tuple[int, int]] = []
    first, last = 0, None
    for segment in segments:
        if last is not None and (segment.slot, segment.start) == (last.slot, last.start + last.length):
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + segment.length)
        else:
            pieces.append((first, segment.length))
        first, last = first + segment.length, segment
    return pieces if any(count > 1 for _, count in pieces) else None
