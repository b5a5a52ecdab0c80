"""Attention over blocked caches: the kernels against the references, in every type of cache.

Behind each sequence's end, and in all other rows, slots and layers, caches are NaN. Long sequences only where
a GPU is.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms

from hipfire.kernels.attention import attend_q8_ref, attend_ref, attention_ref
from hipfire.kernels.block_cache import (
    BLOCK,
    TILE,
    attention_tiles,
    block_attention_q8_ref,
    block_attention_ref,
    q8_row_encode,
    q8_row_nbytes,
)
from hipfire.kernels.gpu.attention import block_attention, block_attention_q8
from hipfire.kernels.gpu.decode_attention import combine_splits_kernel, decode_attention_kernel
from hipfire.kernels.gpu.prefill_attention import prefill_attention_kernel
from hipfire.kernels.gpu.target import INTERPRETED
from hipfire.kernels.kv_cache import q8_encode

# float32 results of products of float32, bfloat16 or scaled halves
ACCURACY = {"f32": 5e-6, "bf16": 1e-2, "q8": 1.5e-3}
LENGTHS = [1, 2, 63, 64, 65, 255, 256, 257]
KERNELS = (decode_attention_kernel, combine_splits_kernel, prefill_attention_kernel)
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="takes too long without a GPU")


@dataclass
class Case:
    """Caches of sequences of some lengths, each in a slot of its own and in the second of three layers."""

    mode: str
    lengths: list[int]
    kv: int
    d: int

    def __post_init__(self) -> None:
        torch.manual_seed(sum(self.lengths) + self.d)
        self.slots = [index + 1 for index in reversed(range(len(self.lengths)))]
        self.keys, self.values = self._cache(), self._cache()
        for slot, length in zip(self.slots, self.lengths, strict=True):
            for cache in (self.keys, self.values):
                x = torch.randn(length, self.kv, self.d, device=DEVICE)
                rows = q8_row_encode(x) if self.mode == "q8" else x.flatten(1).to(cache.dtype)
                positions = torch.arange(length, device=DEVICE)
                cache[slot, positions // BLOCK, positions % BLOCK] = rows

    def _cache(self) -> torch.Tensor:
        blocks = -(-max(self.lengths) // BLOCK) + 1
        width = q8_row_nbytes(self.kv * self.d) if self.mode == "q8" else self.kv * self.d
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "q8": torch.uint8}[self.mode]
        shape = (len(self.lengths) + 2, blocks, 3, BLOCK, width)
        memory = torch.full(shape, 255 if dtype == torch.uint8 else float("nan"), dtype=dtype, device=DEVICE)
        return memory[:, :, 1]

    def last_rows(self, counts: list[int]) -> torch.Tensor:
        """Return slot and position of the last tokens of every sequence."""
        rows = [
            (slot, length - count + index)
            for slot, length, count in zip(self.slots, self.lengths, counts, strict=True)
            for index in range(count)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=DEVICE)

    def check(
        self,
        heads: int,
        counts: list[int] | None = None,
        *,
        window: int | None = None,
        exact: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Compare what the last tokens see: one of each sequence, decoded, or `counts` of them, in tiles."""
        rows = self.last_rows(counts or [1] * len(self.lengths))
        tiles = None
        if counts is not None:
            tiles = torch.tensor(attention_tiles(counts), dtype=torch.int32, device=DEVICE)
        q = (2 * torch.randn(len(rows), heads, self.d, device=DEVICE)).to(dtype)
        scratch = Poisoned()
        run, reference = block_attention, block_attention_ref
        if self.mode == "q8":
            run, reference = block_attention_q8, block_attention_q8_ref
        before = (self.keys.clone(), self.values.clone())
        scale = self.d**-0.5
        backend = engine("float" if exact else "int8", scratch)
        result = run(backend, q, self.keys, self.values, rows, scale, window, tiles)
        scratch.check_guards()
        wanted = reference(q, self.keys, self.values, rows, scale, window)
        assert result.dtype == torch.float32
        assert relative_rms(result, wanted) < (5e-6 if exact else ACCURACY[self.mode])
        for cache, old in zip((self.keys, self.values), before, strict=True):
            assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("mode", ["f32", "bf16", "q8"])
def test_tokens_of_ragged_sequences(mode: str) -> None:
    Case(mode, LENGTHS if mode != "f32" else LENGTHS[2:5], 1, 64).check(4)


@pytest.mark.parametrize(
    ("mode", "d"),
    [
        ("bf16", 80),
        ("q8", 96),
        ("bf16", 128),
        ("q8", 128),
        ("q8", 256),
        ("f32", 256),
        ("q8", 512),
        ("bf16", 512),
    ],
)
def test_head_dimensions(mode: str, d: int) -> None:
    case = Case(mode, [65], 2, d)
    case.check(2)
    case.check(2, [5])


@pytest.mark.parametrize(("kv", "heads"), [(1, 1), (1, 16), (1, 24), (3, 9), (8, 8)])
def test_groups_of_heads(kv: int, heads: int) -> None:
    case = Case("q8", [70], kv, 64)
    case.check(heads)
    case.check(heads, [3])


def test_rows_that_are_not_whole_words() -> None:
    assert q8_row_nbytes(3 * 96) % 4 == 2
    case = Case("q8", [70], 3, 96)
    case.check(3)
    case.check(3, [4])


@pytest.mark.parametrize(
    ("mode", "window"), [("q8", 1), ("bf16", 63), ("q8", 64), ("f32", 100), ("bf16", 100), ("q8", 100)]
)
def test_tokens_see_their_window(mode: str, window: int) -> None:
    case = Case(mode, [64, 257], 1, 64)
    case.check(2, window=window)
    case.check(2, [2, 67], window=window)


@pytest.mark.parametrize("mode", ["f32", "bf16", "q8"])
def test_chunks_of_ragged_sequences(mode: str) -> None:
    # whole prompts, chunks that begin inside of blocks and tiles, and single tokens
    Case(mode, [1, 100, 257, 64], 1, 64).check(2, [1, 100, 45, 1])


@pytest.mark.parametrize("mode", ["bf16", "q8"])
def test_exact_engines_round_nothing(mode: str) -> None:
    case = Case(mode, [70], 1, 128)
    case.check(2, exact=True)
    case.check(2, [40], exact=True)


@pytest.mark.parametrize("mode", ["bf16", "q8"])
def test_large_steps_take_and_return_bfloat16(mode: str) -> None:
    case = Case(mode, [40, 240], 1, 64)
    counts = [37, 240]
    rows = case.last_rows(counts)
    tiles = torch.tensor(attention_tiles(counts), dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(rows), 2, case.d, device=DEVICE).bfloat16()
    run, reference = block_attention, block_attention_ref
    if mode == "q8":
        run, reference = block_attention_q8, block_attention_q8_ref
    result = run(engine(), q, case.keys, case.values, rows, 0.125, None, tiles)
    assert result.dtype == torch.bfloat16
    assert relative_rms(result, reference(q, case.keys, case.values, rows, 0.125)) < 8e-3


def test_queries_beyond_the_range_of_halves() -> None:
    case = Case("q8", [40], 1, 64)
    rows = case.last_rows([1])
    q = 1e6 * torch.randn(1, 2, 64, device=DEVICE)
    result = block_attention_q8(engine(), q, case.keys, case.values, rows, 1e-7)
    wanted = block_attention_q8_ref(q, case.keys, case.values, rows, 1e-7)
    assert relative_rms(result, wanted) < 1.5e-3


def test_slots_beyond_32_bits() -> None:
    case = Case("q8", [70], 1, 64)
    slot = case.slots[0]
    stride = 2**31 // slot + 64
    caches = []
    for cache in (case.keys, case.values):
        memory = torch.empty((slot + 1) * stride, dtype=torch.uint8, device=DEVICE)
        far = memory.as_strided((slot + 1, *cache.shape[1:]), (stride, *cache.stride()[1:]))
        far[slot] = cache[slot]
        caches.append(far)
    case.keys, case.values = caches
    rows = case.last_rows([1])
    tiles = torch.tensor(attention_tiles([1]), dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 2, 64, device=DEVICE)
    wanted = block_attention_q8_ref(q, *caches, rows, 0.125)
    for way in (None, tiles):
        assert relative_rms(block_attention_q8(engine(), q, *caches, rows, 0.125, None, way), wanted) < 1.5e-3


def test_equal_tokens_of_a_batch_see_the_same() -> None:
    case = Case("q8", [150], 2, 64)
    rows = case.last_rows([1]).expand(3, 2).contiguous()
    q = torch.randn(1, 2, 64, device=DEVICE).expand(3, 2, 64).contiguous()
    result = block_attention_q8(engine(), q, case.keys, case.values, rows, 0.125)
    assert (result == result[:1]).all()


@pytest.mark.parametrize("window", [None, 70])
def test_references_agree_with_flat_caches(window: int | None) -> None:
    torch.manual_seed(3)
    k, v = torch.randn(2, 300, 2, 64)
    q = torch.randn(3, 4, 64)
    rows = torch.tensor([[1, 297], [1, 298], [1, 299]])
    blocked, flat, packed, q8 = [], [], [], []
    for x in (k, v):
        padded = torch.cat((x, torch.full((212, 2, 64), float("nan"))))
        blocked.append(torch.stack((padded, padded)).view(2, 2, BLOCK, 128))
        flat.append(torch.stack((x, x)))
        packed.append(torch.stack((q8_row_encode(padded),) * 2).view(2, 2, BLOCK, 136))
        q8.append(torch.stack((q8_encode(x),) * 2))
    plain = block_attention_ref(q, *blocked, rows, 0.125, window)
    assert torch.equal(plain, attend_ref(q, *flat, rows, 0.125, window))
    assert relative_rms(plain, attention_ref(q, k, v, 0.125, window)) < 1e-6
    assert torch.equal(
        block_attention_q8_ref(q, *packed, rows, 0.125, window), attend_q8_ref(q, *q8, rows, 0.125, window)
    )


def test_tiles_cover_every_token_once() -> None:
    lengths = [1, TILE, TILE + 1, 3 * TILE, 5]
    tiles = attention_tiles(lengths)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    covered = [first + index for first, count in tiles for index in range(count)]
    assert covered == list(range(sum(lengths)))
    assert all(0 < count <= TILE for _, count in tiles)
    assert set(starts) <= {first for first, _ in tiles}
    assert all(not first < start < first + count for first, count in tiles for start in starts)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "d"),
    # scales of q8 are of 32 elements
    [
        (mode, d)
        for mode in ("f32", "bf16", "q8")
        for d in (64, 80, 96, 128, 256, 512)
        if mode != "q8" or d % 32 == 0
    ],
)
def test_long_sequences(mode: str, d: int) -> None:
    case = Case(mode, [4095, 4096, 4097, 16384], 2, d)
    case.check(8)
    case.check(8, window=1024)
    case.check(8, [1, 64, 100, 90])
    case.check(8, [1, 64, 100, 90], window=1024)
