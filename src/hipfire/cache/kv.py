"""Key and value caches: contiguous, one K and one V buffer per attention layer, position-major.

Every layer holds `slots` sequences of up to `max_seq` positions. This file knows nothing about models or
attention; it stores what it is given after RoPE, in the mode chosen at load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.types import CacheSpec
from hipfire.cache.states import StateStore
from hipfire.kernels.attention import ATTENTION, ATTENTION_Q8
from hipfire.kernels.attention_input import ATTENTION_INPUT, ATTENTION_INPUT_Q8
from hipfire.kernels.kv_cache import Q8_BYTES, Q8_ELEMENTS
from hipfire.kernels.launch import Launcher, Op


class Step(Protocol):
    """The part of a step that a cache uses.

    `rows` int64 [T, 2] holds the slot and position of every token; `tiles` int32 [n, 2] is what the cache
    made of the step's segments.
    """

    @property
    def launcher(self) -> Launcher:
        """What runs operations."""

    @property
    def rows(self) -> torch.Tensor:
        """Where the step's tokens are."""

    @property
    def tiles(self) -> torch.Tensor | None:
        """Which tokens are attended to together."""


@dataclass(frozen=True, slots=True)
class KvMode:
    """How a cache stores its elements, and the operations that write it and attend over it."""

    name: str
    dtype: torch.dtype
    enter: Op
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
        KvMode("f32", torch.float32, ATTENTION_INPUT, ATTENTION),
        KvMode("bf16", torch.bfloat16, ATTENTION_INPUT, ATTENTION),
        KvMode("q8", torch.uint8, ATTENTION_INPUT_Q8, ATTENTION_Q8, Q8_ELEMENTS, Q8_BYTES),
    )
}


def kv_mode(name: str, modes: Mapping[str, KvMode] = KV_MODES) -> KvMode:
    """Return the mode called `name`; `auto` is bf16 in this version."""
    mode = modes.get("bf16" if name == "auto" else name)
    if mode is None:
        raise ValidationError(f"unknown kv cache mode {name!r}", hint=f"use auto, {', '.join(modes)}")
    return mode


def kv_nbytes(specs: Sequence[CacheSpec], mode: KvMode, slots: int, max_seq: int) -> int:
    """Return the bytes that a cache of these layers takes, keys and values together."""
    items = sum(spec.kv_heads * mode.row_items(spec.head_dim) for spec in specs)
    return 2 * slots * max_seq * items * mode.dtype.itemsize


class LayerCaches:
    """The caches of all layers of one model, wherever their memory is: one of keys and one of values each.

    `states` are what its recurrent layers keep, None where there are no such layers.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        mode: KvMode,
        slots: int,
        max_seq: int,
        caches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        states: StateStore | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.mode = mode
        self.slots = slots
        self.max_seq = max_seq
        self.states = states
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        for keys, values in caches:
            self._keys.append(keys)
            self._values.append(values)

    def enter(
        self,
        step: Step,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """Store k and v [T, KV, D] where the step's rows say, and return the queries for `attend`.

        Queries [T, H, D] and keys are normalized per head where there are weights [D] for it, then rotated
        by cos and sin [T, R/2]. The caller has seen to it that the rows lie within the cache.
        """
        caches, norms = (self._keys[layer], self._values[layer]), (q_weight, k_weight, eps, offset)
        queries = step.launcher.run(self.mode.enter, q, k, v, step.rows, cos, sin, *caches, *norms)
        return cast(torch.Tensor, queries)

    def _check_copy(self, source: int, target: int, count: int) -> None:
        if not (0 <= source < self.slots and 0 <= target < self.slots and 0 <= count <= self.max_seq):
            raise ValidationError(
                f"{count} rows of slot {source} cannot be copied to slot {target}: "
                f"the cache has {self.slots} slots of {self.max_seq} rows"
            )


class KvCache(LayerCaches):
    """Contiguous caches.

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
        states: StateStore | None = None,
    ) -> None:
        def buffer(spec: CacheSpec) -> torch.Tensor:
            shape = (slots, max_seq, spec.kv_heads, mode.row_items(spec.head_dim))
            return torch.empty(shape, dtype=mode.dtype, device=device)

        keys = [buffer(spec) for spec in specs]
        values = [buffer(spec) for spec in specs]
        super().__init__(specs, mode, slots, max_seq, zip(keys, values, strict=True), states)

    def ensure(self, slot: int, rows: int) -> None:
        """Do nothing: all rows of all slots are there from the start."""

    def tiles(self, lengths: Sequence[int]) -> None:
        """Return None: attention finds by itself which tokens belong together."""

    def attend(
        self, step: Step, layer: int, q: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return what the queries q [T, H, D] see, float32 [T, H, D]."""
        caches = self._keys[layer], self._values[layer]
        seen = step.launcher.run(self.mode.attend, q, *caches, step.rows, scale, window)
        return cast(torch.Tensor, seen)

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of slot `source` to slot `target`, in every layer.

        Raises ValidationError for slots or positions that do not exist.
        """
        self._check_copy(source, target, count)
        for buffer in (*self._keys, *self._values):
            buffer[target, :count] = buffer[source, :count]

    def views(self, slot: int, start: int, stop: int) -> list[tuple[str, torch.Tensor]]:
        """Return, by name, the memory of a slot's rows from `start` to before `stop`, in every layer."""
        planes = zip(self._keys, self._values, strict=True)
        return [
            (f"{kind} of layer {layer}", plane[slot, start:stop])
            for layer, pair in enumerate(planes)
            for kind, plane in zip(("keys", "values"), pair, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Return the bytes reserved."""
        return kv_nbytes(self.specs, self.mode, self.slots, self.max_seq)
