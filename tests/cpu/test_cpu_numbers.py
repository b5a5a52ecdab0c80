"""The arithmetic of kernels: e^x, tanh, halves and bfloat16 against numpy, over all their range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cpu_kit import launcher_of
from numba import njit

from hipfire.kernels.cpu.kv import half_bits
from hipfire.kernels.cpu.rows import tanh_f
from hipfire.kernels.cpu.simd import (
    EXP_HIGHEST,
    EXP_LOWEST,
    exp_f,
    load_bfloat,
    load_f,
    load_half,
    load_one_bfloat,
    load_one_half,
    store_bfloat,
    store_f,
    store_float,
    sum_f,
    top_f,
)
from hipfire.kernels.kv_cache import KV_WRITE

Array = np.ndarray[Any, Any]


def on_vectors(function: Any, values: Array) -> Array:
    """Apply a function of sixteen lanes to float32 of which sixteen divide the number."""

    @njit
    def run(source: int, target: int, count: int) -> None:
        for i in range(0, 4 * count, 64):
            store_f(target + i, function(load_f(source + i)))

    out = np.full_like(values, np.nan)
    run(values.ctypes.data, out.ctypes.data, len(values))
    return out


def between(low: float, high: float) -> Array:
    return np.linspace(low, high, 1 << 16, dtype=np.float32)


def test_the_exponential_is_good_to_a_unit_in_the_last_place() -> None:
    x = np.concatenate((between(EXP_LOWEST, EXP_HIGHEST), between(-1.0, 1.0), between(-1e-3, 1e-3)))
    want = np.exp(x.astype(np.float64))
    units = np.abs(on_vectors(exp_f, x) - want) / np.spacing(want.astype(np.float32))
    assert units.max() <= 1.0
    assert on_vectors(exp_f, np.zeros(16, np.float32)).tolist() == [1.0] * 16


def test_the_exponential_stays_finite_beyond_its_range() -> None:
    low = on_vectors(exp_f, -np.geomspace(88.0, 3e38, 1024, dtype=np.float32))
    assert (low >= 0.0).all()
    assert low.max() < 1e-37
    high = on_vectors(exp_f, np.geomspace(88.8, 3e38, 1024, dtype=np.float32))
    assert np.isfinite(high).all()
    assert high.min() > 1e38
    assert (np.diff(on_vectors(exp_f, between(-95.0, 95.0))) >= 0.0).all()


def test_tanh_is_good_to_float32_of_its_range() -> None:
    x = np.concatenate((between(-12.0, 12.0), between(-1e-2, 1e-2), between(-3e38, 3e38)))
    got = on_vectors(tanh_f, x)
    assert np.abs(got - np.tanh(x.astype(np.float64))).max() < 2e-7
    assert np.abs(got).max() <= 1.0


def test_reductions_take_all_lanes() -> None:
    @njit
    def run(source: int, target: int) -> None:
        store_float(target, sum_f(load_f(source)))
        store_float(target + 4, top_f(load_f(source)))

    out = np.empty(2, np.float32)
    for lane in range(16):
        values = np.full(16, -3.0, np.float32)
        values[lane] = 1000.0
        run(values.ctypes.data, out.ctypes.data)
        assert out.tolist() == [1000.0 - 45.0, 1000.0]


def halves() -> Array:
    """All bit patterns of halves that are not negative and not infinite."""
    return np.arange(0x7C00, dtype=np.uint16).view(np.float16)


def test_rounding_to_halves_is_that_of_numpy() -> None:
    exact = halves().astype(np.float32)
    ties = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
    around = [np.nextafter(part, np.float32(side)) for part in (exact, ties) for side in (np.inf, 0.0)]
    far = np.geomspace(1e-45, 3e38, 4096, dtype=np.float32)
    edges = np.array([65504.0, 65519.99, 65520.0, 65536.0, 1e38, 2.0**-25, 2.0**-24, 2.0**-14], np.float32)
    values = np.abs(np.concatenate((exact, ties, *around, far, edges)))

    @njit
    def run(source: Any, target: Any) -> None:
        for i in range(source.shape[0]):
            target[i] = half_bits(source[i])

    got = np.empty(len(values), np.int32)
    run(values, got)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).view(np.uint16).astype(np.int32)
    assert np.array_equal(got, want)


def loaded(patterns: Array, load_vector: Any, load_one: Any) -> tuple[Array, Array]:
    @njit
    def run(source: int, together: int, single: int, count: int) -> None:
        for i in range(0, count, 16):
            store_f(together + 4 * i, load_vector(source + 2 * i))
        for i in range(count):
            store_float(single + 4 * i, load_one(source + 2 * i))

    together, single = np.empty((2, len(patterns)), np.float32)
    run(patterns.ctypes.data, together.ctypes.data, single.ctypes.data, len(patterns))
    return together, single


def test_all_finite_halves_are_read_exactly() -> None:
    patterns = np.concatenate((halves(), -halves())).view(np.uint16)
    want = patterns.view(np.float16).astype(np.float32)
    for got in loaded(patterns, load_half, load_one_half):
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_all_bfloats_are_read_and_written_as_torch_does() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns = patterns[(patterns & 0x7F80) != 0x7F80]
    want = (patterns.astype(np.uint32) << 16).view(np.float32)
    for got in loaded(patterns, load_bfloat, load_one_bfloat):
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    # every value, every tie between two of them, and a step to either side of both
    bits = want.view(np.uint32)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = bits.reshape(-1).view(np.float32)
    values = values[np.isfinite(values)]
    values = np.concatenate((values, np.zeros(-len(values) % 16, np.float32)))
    target = np.empty(len(values), np.uint16)

    @njit
    def run(source: int, out: int, count: int) -> None:
        for i in range(0, count, 16):
            store_bfloat(out + 2 * i, load_f(source + 4 * i))

    run(values.ctypes.data, target.ctypes.data, len(values))
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("size", [1, 7, 16, 20])
def test_the_rest_of_a_row_is_rounded_like_its_start(size: int) -> None:
    value = np.array([0x3F808000, 0x3F818000, 0x3F80FFFF, 0xBF808001], np.uint32).view(np.float32)
    x = torch.from_numpy(np.resize(value, (1, 1, size)).copy())
    cache = torch.zeros(1, 1, 1, size, dtype=torch.bfloat16)
    launcher_of(1).run(KV_WRITE, cache, torch.zeros(1, 2, dtype=torch.int64), x)
    assert torch.equal(cache[0, 0], x[0].to(torch.bfloat16))
