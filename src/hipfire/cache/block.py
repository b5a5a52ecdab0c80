"""Key and value caches in blocks: one block holds 256 positions of one sequence in all layers.

Memory comes from outside, a block at a time as sequences grow, and its addresses do not change. Within a
block lie the keys of a layer, then its values, then the next layer. This file knows nothing about models or
attention, nor what kind of memory it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch

from hipfire.base.errors import InternalError
from hipfire.base.types import CacheSpec
from hipfire.cache.kv import KvMode, LayerCaches, Step
from hipfire.cache.states import StateStore
from hipfire.kernels.block_cache import (
    BLOCK,
    BLOCK_ATTENTION,
    BLOCK_ATTENTION_Q8,
    BLOCK_INPUT,
    BLOCK_INPUT_Q8,
    attention_tiles,
)
from hipfire.kernels.kv_cache import Q8_BYTES, Q8_ELEMENTS

BLOCK_MODES: Mapping[str, KvMode] = {
    mode.name: mode
    for mode in (
        KvMode("f32", torch.float32, BLOCK_INPUT, BLOCK_ATTENTION),
        KvMode("bf16", torch.bfloat16, BLOCK_INPUT, BLOCK_ATTENTION),
        KvMode("q8", torch.uint8, BLOCK_INPUT_Q8, BLOCK_ATTENTION_Q8, Q8_ELEMENTS, Q8_BYTES),
    )
}


class CacheMemory(Protocol):
    """Memory for the blocks of all slots, reserved at once and there as far as it was asked for."""

    def buffer(self) -> torch.Tensor:
        """Return uint8 [slots, blocks of a slot, bytes of a block], always at the same address.

        A block's bytes are contiguous; only those that `ensure` asked for may be touched.
        """

    def ensure(self, slot: int, blocks: int) -> None:
        """See to it that the first `blocks` blocks of a slot are there; MemoryLimitError if they cannot."""


def block_count(rows: int) -> int:
    """Return the number of blocks that hold so many positions."""
    return -(-rows // BLOCK)


def block_nbytes(specs: Sequence[CacheSpec], mode: KvMode) -> int:
    """Return the bytes of one block: 256 positions of keys and values of all layers.

    Raises UnsupportedError for a head size that the mode cannot hold.
    """
    return sum(2 * _plane_nbytes(spec, mode) for spec in specs)


def _plane_nbytes(spec: CacheSpec, mode: KvMode) -> int:
    return BLOCK * spec.kv_heads * mode.row_items(spec.head_dim) * mode.dtype.itemsize


def _views(
    buffer: torch.Tensor, specs: Sequence[CacheSpec], mode: KvMode
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (keys, values) [slots, blocks, 256, R] of every layer, in their order within a block."""
    first = 0
    for spec in specs:
        size = _plane_nbytes(spec, mode)
        planes = (buffer[:, :, start : start + size].view(mode.dtype) for start in (first, first + size))
        keys, values = (plane.view(*plane.shape[:2], BLOCK, -1) for plane in planes)
        yield keys, values
        first += 2 * size


class BlockCache(LayerCaches):
    """Caches over memory that grows with the sequences in them.

    Every layer's keys and values are views [slots, blocks, 256, R] of the memory in the mode's type, R items
    for one position of all heads. `slots` are those of the memory. Raises InternalError for memory of another
    size.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        mode: KvMode,
        max_seq: int,
        memory: CacheMemory,
        states: StateStore | None = None,
    ) -> None:
        self._memory = memory
        buffer = memory.buffer()
        if tuple(buffer.shape[1:]) != (block_count(max_seq), block_nbytes(specs, mode)):
            raise InternalError(f"memory {tuple(buffer.shape)} does not fit a cache of {max_seq} positions")
        super().__init__(specs, mode, buffer.shape[0], max_seq, _views(buffer, specs, mode), states)

    def ensure(self, slot: int, rows: int) -> None:
        """See to it that the first `rows` positions of a slot have memory.

        Raises MemoryLimitError if they cannot have it; what the slot holds is as before then.
        """
        self._memory.ensure(slot, block_count(rows))

    def tiles(self, lengths: Sequence[int]) -> Sequence[tuple[int, int]] | None:
        """Return how attention cuts segments of these lengths up; None if all have a single token."""
        return None if max(lengths) == 1 else attention_tiles(lengths)

    def attend(
        self, step: Step, layer: int, q: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return what the queries q [T, H, D] see, [T, H, D]."""
        caches = self._keys[layer], self._values[layer]
        places = step.rows, scale, window, step.tiles
        return cast(torch.Tensor, step.launcher.run(self.mode.attend, q, *caches, *places))

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of slot `source` to slot `target`, in every layer.

        Whole blocks are copied: what `target` held in the last one behind its `count` positions is lost.
        Raises ValidationError for slots or positions that do not exist, MemoryLimitError as `ensure`.
        """
        self._check_copy(source, target, count)
        if source == target or count == 0:
            return
        self.ensure(target, count)
        buffer, blocks = self._memory.buffer(), block_count(count)
        buffer[target, :blocks] = buffer[source, :blocks]

    def views(self, slot: int, start: int, stop: int) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, the memory of a slot's rows from `start` to before `stop`, in every layer.

        A view lies within one block. The caller has seen to it that the rows have memory.
        """
        return [
            (f"{kind} of layer {layer}", plane[slot, block, max(start - first, 0) : stop - first])
            for layer, pair in enumerate(zip(self._keys, self._values, strict=True))
            for kind, plane in zip(("keys", "values"), pair, strict=True)
            for block in range(start // BLOCK, block_count(stop))
            for first in (block * BLOCK,)
        ]

    @property
    def nbytes(self) -> int:
        """Return the bytes reserved."""
        return self._memory.buffer().numel()
