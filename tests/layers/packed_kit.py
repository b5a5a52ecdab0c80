"""Tiny models whose matrices are packed as for a GPU, beside the same matrices decoded."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from helpers import MemoryCheckpoint
from hipfire.base.qtypes import QType
from hipfire.cache.block import BLOCK_MODES, BlockCache, block_count, block_nbytes
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.cache.states import StateStore, new_states
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.experts import FloatExperts, PackedExperts
from hipfire.kernels.launch import Launcher
from hipfire.kernels.packed import PACKED_LAYOUTS, PackedMatrix, unit_count
from hipfire.layers.weights import ExpertStack, ExpertTensors, Joined, Weight, split_matrix
from hipfire.models.family import ModelFamily, families
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of
from hipfire.runtime.runner import Runner
from hipfire.runtime.weights import CheckpointWeights
from tiny_models import KINDS, tiny_model, weights_of

# a layout for weights of a rotated format, and one for weights of another
LAYOUT_OF = {QType.MQ4G256: "u4g256", QType.HFQ4G256: "u4g256", QType.GGUF_Q8_0: "i8g32"}
SLOTS, MAX_SEQ = 3, 600


def packed_matrix(rows: int, cols: int, layout_name: str = "u4g256", seed: int = 0) -> PackedMatrix:
    """A matrix of random codes, whose values are about 0.05 in size and 0 in the mean."""
    layout = PACKED_LAYOUTS[layout_name]
    generator = torch.Generator().manual_seed(seed)
    planes = (2,) if layout.bits == 8 else ()
    units, groups = unit_count(cols), -(-cols // layout.group)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    step = 0.1 / 2**layout.bits
    scales = (step * (1.0 + torch.rand(rows, groups, generator=generator))).to(layout.scale_type)
    middle = 2 ** (layout.bits - 1) - 0.5
    return PackedMatrix(
        layout,
        rows,
        cols,
        some(rows, *planes, 4, 4 * units),
        scales,
        (scales.float() * -middle).to(layout.scale_type) if layout.minimum else None,
        some(rows, 4, 2 * units) if layout.bits == 6 else None,
    )


def stacked(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """One matrix of all rows."""

    def whole(name: str) -> torch.Tensor | None:
        parts = [getattr(matrix, name) for matrix in matrices]
        return None if parts[0] is None else torch.cat(parts)

    first, rows = matrices[0], sum(matrix.rows for matrix in matrices)
    codes, scales = whole("codes"), whole("scales")
    assert codes is not None
    assert scales is not None
    return PackedMatrix(first.layout, rows, first.cols, codes, scales, whole("minima"), whole("high"))


class RandomWeights:
    """A source of random matrices that depend on their names only: packed and joined, or decoded."""

    def __init__(self, vectors: CheckpointWeights, qtype: QType, *, packed: bool) -> None:
        self._vectors = vectors
        self._packed = packed
        self._layout = LAYOUT_OF[qtype]
        self.format: WeightFormat = format_of(qtype)
        self.device = torch.device("cpu")

    def _matrix(self, name: str, rows: int, cols: int) -> PackedMatrix:
        return packed_matrix(rows, cols, self._layout, zlib.crc32(name.encode()))

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        matrix = self._matrix(name, rows, cols)
        if self._packed:
            return Weight(self.format, rows, cols, packed=matrix)
        return Weight(self.format, rows, cols, resident=matrix.dense())

    def joined(self, parts: Sequence[tuple[str, int]], cols: int) -> Joined:
        if not self._packed:
            return Joined(tuple(self.matrix(name, rows, cols) for name, rows in parts))
        whole = stacked([self._matrix(name, rows, cols) for name, rows in parts])
        return split_matrix(whole, self.format, [rows for _, rows in parts])

    def experts(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        return tuple(self._experts(tensors) for tensors in projections)

    def _experts(self, tensors: ExpertTensors) -> ExpertStack:
        experts, rows, cols = tensors.experts + bool(tensors.shared), tensors.rows, tensors.cols
        whole = PackedExperts(self._matrix(tensors.name, experts * rows, cols), experts)
        if self._packed:
            return ExpertStack(self.format, whole, bool(tensors.shared))
        floats = FloatExperts(whole.matrix.dense().view(experts, rows, cols))
        return ExpertStack(self.format, floats, bool(tensors.shared))

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        return self._vectors.vector(name, *shape)

    def has(self, name: str) -> bool:
        return self._vectors.has(name)


class Memory:
    """Memory for blocks, all bytes 0xFF; `asked` are the blocks of each slot that may be touched."""

    def __init__(self, slots: int, blocks: int, nbytes: int) -> None:
        self._buffer = torch.full((slots, blocks, nbytes), 255, dtype=torch.uint8)
        self.asked = [0] * slots

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def ensure(self, slot: int, blocks: int) -> None:
        self.asked[slot] = max(self.asked[slot], blocks)

    def check(self) -> None:
        """Fail where something was written that nobody asked for."""
        for slot, blocks in enumerate(self.asked):
            assert (self._buffer[slot, blocks:] == 255).all(), f"slot {slot} behind block {blocks}"


def block_cache(
    specs: Sequence[Any],
    mode: str,
    slots: int = SLOTS,
    max_seq: int = MAX_SEQ,
    states: StateStore | None = None,
) -> tuple[BlockCache, Memory]:
    chosen = BLOCK_MODES[mode]
    memory = Memory(slots, block_count(max_seq), block_nbytes(specs, chosen))
    return BlockCache(specs, mode=chosen, max_seq=max_seq, memory=memory, states=states), memory


def random_runner(
    kind: str, qtype: QType, *, packed: bool, mode: str = "f32", launcher: Launcher | None = None
) -> Runner:
    """A runner over blocks if packed, else with decoded weights over contiguous caches."""
    oracle = tiny_model(kind, intermediate_size=512)
    fields = oracle.config.to_dict()
    checkpoint = MemoryCheckpoint("safetensors", fields)
    for name, values in weights_of(oracle).items():
        if values.ndim != 2:
            checkpoint.add(name, values)
    by_oracle: dict[str, ModelFamily] = {family.oracle: family for family in families().values()}
    family = by_oracle[KINDS[kind][0]]
    config = family.from_hf(fields)
    vectors = CheckpointWeights(
        NamedCheckpoint(checkpoint, family.names, config.sizes.layers),
        heads=config.sizes.heads,
        kv_heads=config.sizes.kv_heads,
        residency="decoded",
    )
    specs, states = config.cache_specs(), new_states(config.state_specs(), SLOTS)
    with torch.inference_mode():
        model = family.build(config, RandomWeights(vectors, qtype, packed=packed))
        if packed:
            return Runner(model, block_cache(specs, mode, states=states)[0], launcher, chunk=256)
        cache = KvCache(specs, mode=kv_mode(mode), slots=SLOTS, max_seq=MAX_SEQ, states=states)
        return Runner(model, cache, launcher, chunk=256)
