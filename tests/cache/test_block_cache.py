"""Caches in blocks: where positions lie in memory, and that attention sees what contiguous ones hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from hipfire.base.errors import InternalError, UnsupportedError, ValidationError
from hipfire.base.types import CacheSpec
from hipfire.cache.block import BLOCK_MODES, BlockCache, block_count, block_nbytes
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.kernels.kv_cache import Q8_BYTES, q8_encode
from hipfire.kernels.launch import Launcher

SPECS = (CacheSpec(2, 32), CacheSpec(1, 64, 5), CacheSpec(3, 32))
SLOTS, MAX_SEQ, BLOCKS = 3, 700, 3
# (slot, first position, length): over the end of a block, single tokens, a start
SEGMENTS = ((2, 250, 9), (0, 511, 1), (1, 0, 3), (2, 600, 1))
ITEM = {"f32": 4.0, "bf16": 2.0, "q8": 34 / 32}


class Memory:
    """Memory whose bytes are all 0xFF."""

    def __init__(self, slots: int, blocks: int, nbytes: int) -> None:
        self._buffer = torch.full((slots, blocks, nbytes), 255, dtype=torch.uint8)
        self.asked: list[tuple[int, int]] = []

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def ensure(self, slot: int, blocks: int) -> None:
        self.asked.append((slot, blocks))


@dataclass
class Step:
    rows: torch.Tensor
    tiles: torch.Tensor | None = None
    launcher: Launcher = field(default_factory=Launcher)


def make(mode: str) -> tuple[BlockCache, Memory]:
    memory = Memory(SLOTS, BLOCKS, block_nbytes(SPECS, BLOCK_MODES[mode]))
    return BlockCache(SPECS, mode=BLOCK_MODES[mode], max_seq=MAX_SEQ, memory=memory), memory


def rows_of(segments: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return torch.tensor([(slot, start + i) for slot, start, length in segments for i in range(length)])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def enter(cache: BlockCache | KvCache, layer: int, rows: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Store random keys and values as they are: position 0 turns nothing; returns queries, keys, values."""
    heads, size = SPECS[layer].kv_heads, SPECS[layer].head_dim
    q, k, v = (random(len(rows), n, size, seed=seed + i) for i, n in enumerate((2 * heads, heads, heads)))
    still = torch.zeros(len(rows), size // 2)
    return [cache.enter(Step(rows), layer, q, k, v, still.cos(), still.sin()), k, v]


def stored(mode: str, x: torch.Tensor) -> bytes:
    """The bytes of one position [KV, D]; in q8 all codes come before all scales."""
    if mode == "f32":
        return x.numpy().tobytes()
    if mode == "bf16":
        return x.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    groups = q8_encode(x).view(-1, Q8_BYTES)
    return groups[:, 2:].numpy().tobytes() + groups[:, :2].numpy().tobytes()


@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_positions_lie_where_their_block_says(mode: str) -> None:
    cache, memory = make(mode)
    rows = rows_of(SEGMENTS)
    want = torch.full_like(memory.buffer(), 255)
    for layer in (2, 0, 1):
        _, k, v = enter(cache, layer, rows, seed=10 * layer)
        sizes = [round(spec.kv_heads * spec.head_dim * ITEM[mode]) for spec in SPECS]
        for token, (slot, position) in enumerate(rows.tolist()):
            block, inner = divmod(position, 256)
            for place, x in enumerate((k, v)):
                first = 256 * (2 * sum(sizes[:layer]) + place * sizes[layer]) + inner * sizes[layer]
                data = torch.frombuffer(bytearray(stored(mode, x[token])), dtype=torch.uint8)
                assert len(data) == sizes[layer]
                want[slot, block, first : first + sizes[layer]] = data
    assert torch.equal(memory.buffer(), want)


@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_attention_sees_what_contiguous_caches_hold(mode: str) -> None:
    blocks, _ = make(mode)
    whole = KvCache(SPECS, mode=kv_mode(mode), slots=SLOTS, max_seq=MAX_SEQ)
    for layer, spec in enumerate(SPECS):
        queries = []
        for cache in (blocks, whole):
            # what came before, then the segments
            enter(cache, layer, rows_of([(2, 0, 601), (0, 0, 511)]), seed=7)
            queries.append(enter(cache, layer, rows_of(SEGMENTS), seed=20)[0])
        assert torch.equal(*queries)
        step = Step(rows_of(SEGMENTS), torch.tensor([[0, 9], [9, 1], [10, 3], [13, 1]], dtype=torch.int32))
        seen = [cache.attend(step, layer, queries[0], 0.2, spec.window) for cache in (blocks, whole)]
        assert torch.equal(*seen)
        assert float(seen[0].std()) > 0.01


@pytest.mark.parametrize("mode", BLOCK_MODES)
@pytest.mark.parametrize("count", [1, 256, 257])
def test_copied_positions_are_those_of_the_source_in_every_layer(mode: str, count: int) -> None:
    cache, memory = make(mode)
    for layer in range(len(SPECS)):
        enter(cache, layer, rows_of([(2, 0, 300), (0, 0, 700), (1, 0, 700)]), seed=layer)
    before = memory.buffer().clone()
    planes = [plane.clone() for plane in (*cache._keys, *cache._values)]
    cache.copy_rows(2, 0, count)
    assert memory.asked == [(0, -(-count // 256))]
    for plane, old in zip((*cache._keys, *cache._values), planes, strict=True):
        got, source = (view.flatten(1, 2)[slot, :count] for view, slot in ((plane, 0), (old, 2)))
        assert torch.equal(got, source)
    assert torch.equal(memory.buffer()[1:], before[1:])
    assert torch.equal(memory.buffer()[0, block_count(count) :], before[0, block_count(count) :])


def test_memory_is_asked_for_in_whole_blocks() -> None:
    cache, memory = make("bf16")
    for rows in (1, 256, 257, 700):
        cache.ensure(1, rows)
    assert memory.asked == [(1, 1), (1, 1), (1, 2), (1, 3)]
    assert cache.nbytes == SLOTS * BLOCKS * 256 * 2 * 2 * (64 + 64 + 96)
    cache.copy_rows(1, 1, 5)
    assert len(memory.asked) == 4


def test_tokens_are_cut_up_unless_all_sequences_have_a_single_one() -> None:
    cache, _ = make("f32")
    assert cache.tiles([1, 1, 1]) is None
    assert cache.tiles([1, 65, 3]) == [(0, 1), (1, 64), (65, 1), (66, 3)]


@pytest.mark.parametrize(("source", "target", "count"), [(3, 0, 1), (0, -1, 1), (0, 1, 701), (0, 1, -1)])
def test_blocks_of_slots_that_do_not_exist_are_refused(source: int, target: int, count: int) -> None:
    cache, memory = make("f32")
    with pytest.raises(ValidationError, match="cannot be copied"):
        cache.copy_rows(source, target, count)
    assert memory.asked == []


def test_what_does_not_fit_is_refused() -> None:
    mode = BLOCK_MODES["f32"]
    for blocks, nbytes in ((2, block_nbytes(SPECS, mode)), (3, block_nbytes(SPECS[:2], mode))):
        with pytest.raises(InternalError, match="does not fit"):
            BlockCache(SPECS, mode=mode, max_seq=MAX_SEQ, memory=Memory(SLOTS, blocks, nbytes))
    with pytest.raises(UnsupportedError, match="head size divisible by 32"):
        block_nbytes((CacheSpec(1, 48),), BLOCK_MODES["q8"])
    assert kv_mode("auto", BLOCK_MODES) is BLOCK_MODES["bf16"]
    with pytest.raises(ValidationError, match="unknown kv cache mode"):
        kv_mode("q9", BLOCK_MODES)
