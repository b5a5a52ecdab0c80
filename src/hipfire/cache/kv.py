"""Key and value caches: contiguous, one K and one V buffer per attention layer, position-major.

Every layer holds `slots` sequences of up to `max_seq` positions. This file knows nothing about models or
attention; it stores what it is given after RoPE, in the mode chosen at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.types import CacheSpec
from hipfire.kernels.attention import ATTENTION, ATTENTION_Q8
from hipfire.kernels.kv_cache import KV_WRITE, KV_WRITE_Q8, Q8_BYTES, Q8_ELEMENTS
from hipfire.kernels.launch import Launcher, Op


@dataclass(frozen=True, slots=True)
class KvMode:
    """How a cache stores its elements, and the operations that write it and attend over it."""

    name: str
    dtype: torch.dtype
    write: Op
    attend: Op
    block: int = 1
    block_items: int = 1

    def row_items(self, head_dim: int) -> int:
        """Return the stored items of one head at one position; UnsupportedError if head_dim does not fit."""
        if head_dim % self.block:
            raise UnsupportedError(
                f"kv cache mode {self.name} needs a head size divisible by {self.block}, not {head_dim}",
                hint="use memory.kv_cache=bf16",
            )
        return head_dim // self.block * self.block_items


KV_MODES: Mapping[str, KvMode] = {
    mode.name: mode
    for mode in (
        KvMode("f32", torch.float32, KV_WRITE, ATTENTION),
        KvMode("bf16", torch.bfloat16, KV_WRITE, ATTENTION),
        KvMode("q8", torch.uint8, KV_WRITE_Q8, ATTENTION_Q8, Q8_ELEMENTS, Q8_BYTES),
    )
}


def kv_mode(name: str) -> KvMode:
    """Return the mode called `name`; `auto` is bf16 in this version."""
    mode = KV_MODES.get("bf16" if name == "auto" else name)
    if mode is None:
        raise ValidationError(f"unknown kv cache mode {name!r}", hint=f"use auto, {', '.join(KV_MODES)}")
    return mode


def kv_nbytes(specs: Sequence[CacheSpec], mode: KvMode, slots: int, max_seq: int) -> int:
    """Return the bytes that a cache of these layers takes, keys and values together."""
    items = sum(spec.kv_heads * mode.row_items(spec.head_dim) for spec in specs)
    return 2 * slots * max_seq * items * mode.dtype.itemsize


class KvCache:
    """The caches of all layers of one model.

    Buffers are [slots, max_seq, KV, D] in the mode's type (q8: [.., D / 32 * 34] bytes). Memory is reserved
    at once; the operating system provides pages as rows are first written.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        mode: KvMode,
        slots: int,
        max_seq: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs = tuple(specs)
        self.mode = mode
        self.slots = slots
        self.max_seq = max_seq

        def buffer(spec: CacheSpec) -> torch.Tensor:
            shape = (slots, max_seq, spec.kv_heads, mode.row_items(spec.head_dim))
            return torch.empty(shape, dtype=mode.dtype, device=device)

        self._keys = [buffer(spec) for spec in self.specs]
        self._values = [buffer(spec) for spec in self.specs]

    def append(
        self, launcher: Launcher, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store k and v [T, KV, D] at the slots and positions in `rows` int64 [T, 2].

        The caller has seen to it that they lie within the cache.
        """
        launcher.run(self.mode.write, self._keys[layer], rows, k)
        launcher.run(self.mode.write, self._values[layer], rows, v)

    def attend(
        self,
        launcher: Launcher,
        layer: int,
        rows: torch.Tensor,
        q: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return what the queries q [T, H, D] at `rows` see, float32 [T, H, D]."""
        keys, values = self._keys[layer], self._values[layer]
        return cast(torch.Tensor, launcher.run(self.mode.attend, q, keys, values, rows, scale, window))

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of slot `source` to slot `target`, in every layer.

        Raises ValidationError for slots or positions that do not exist.
        """
        if not (0 <= source < self.slots and 0 <= target < self.slots and 0 <= count <= self.max_seq):
            raise ValidationError(
                f"{count} rows of slot {source} cannot be copied to slot {target}: "
                f"the cache has {self.slots} slots of {self.max_seq} rows"
            )
        for buffer in (*self._keys, *self._values):
            buffer[target, :count] = buffer[source, :count]

    @property
    def nbytes(self) -> int:
        """Return the bytes reserved."""
        return kv_nbytes(self.specs, self.mode, self.slots, self.max_seq)
