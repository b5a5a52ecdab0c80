"""What recurrent layers keep of sequences: one piece of memory for each slot, all layers side by side.

A snapshot of a slot is one copy, and so is bringing it back. This file knows no model and no operation, nor
what kind of memory it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hipfire.base.errors import InternalError
from hipfire.base.types import StateSpec

# layers begin at multiples of this, so that kernels may load whole vectors
ALIGNMENT = 256


def state_nbytes(specs: Sequence[StateSpec]) -> int:
    """Return the bytes of one slot: the states of all layers."""
    return sum(_aligned(spec.tail_nbytes) + _aligned(spec.matrix_nbytes) for spec in specs)


class StateStore:
    """The states of `slots` sequences in `memory`, uint8 [slots, bytes of a slot] with contiguous rows.

    Every layer has a tail float32 [slots, C, W - 1] and a matrix float32 [slots, Hv, Dk, Dv], both views of
    the memory. Their contents are whatever the memory holds: a sequence that begins at position 0 starts from
    zeros of its own. Raises InternalError for memory of another size.
    """

    def __init__(self, specs: Sequence[StateSpec], slots: int, memory: torch.Tensor) -> None:
        self.specs = tuple(specs)
        if tuple(memory.shape) != (slots, state_nbytes(specs)) or memory.dtype != torch.uint8:
            raise InternalError(f"memory {tuple(memory.shape)} does not fit the states of {slots} slots")
        self._memory = memory
        self._tails: list[torch.Tensor] = []
        self._matrices: list[torch.Tensor] = []
        first = 0
        for spec in self.specs:
            tail = memory[:, first : first + spec.tail_nbytes].view(torch.float32)
            self._tails.append(tail.view(slots, *spec.tail_shape))
            first += _aligned(spec.tail_nbytes)
            matrix = memory[:, first : first + spec.matrix_nbytes].view(torch.float32)
            self._matrices.append(matrix.view(slots, *spec.matrix_shape))
            first += _aligned(spec.matrix_nbytes)

    @property
    def slots(self) -> int:
        """Return the number of sequences."""
        return self._memory.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots."""
        return self._memory.numel()

    def tail(self, layer: int) -> torch.Tensor:
        """Return the convolution tails of a recurrent layer, float32 [slots, C, W - 1]."""
        return self._tails[layer]

    def matrix(self, layer: int) -> torch.Tensor:
        """Return the matrices of a recurrent layer, float32 [slots, Hv, Dk, Dv]."""
        return self._matrices[layer]

    def snapshot(self, slot: int) -> torch.Tensor:
        """Return a copy of a slot's states, uint8 [bytes of a slot], on the same device."""
        return self._memory[slot].clone()

    def restore(self, slot: int, snapshot: torch.Tensor) -> None:
        """Bring a slot back to what it was when `snapshot` was taken of it or of another slot."""
        self._memory[slot].copy_(snapshot)

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` hold what slot `source` holds."""
        if source != target:
            self._memory[target].copy_(self._memory[source])

    def views(self, slot: int) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, the memory of a slot's states."""
        return [
            (f"{kind} of recurrent layer {layer}", states[slot])
            for layer, pair in enumerate(zip(self._tails, self._matrices, strict=True))
            for kind, states in zip(("tail", "matrix"), pair, strict=True)
        ]


def new_states(
    specs: Sequence[StateSpec],
    slots: int,
    take: Callable[[str, int], torch.Tensor] = lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8),
) -> StateStore | None:
    """Return zeroed memory of `take` for what recurrent layers keep; None where there are none.

    `take` gives uint8 memory of at least so many bytes, by a name for messages; by default on the CPU.
    """
    if not specs:
        return None
    nbytes = slots * state_nbytes(specs)
    memory = take("states", nbytes)[:nbytes].zero_()
    return StateStore(specs, slots, memory.view(slots, -1))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
