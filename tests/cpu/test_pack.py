"""Packing of every format into panels, read back by a plain reading of the layouts and by the products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from pack_reference import (
    HALVES,
    PRODUCTS,
    Bytes,
    decoded,
    make_source,
    number_places,
    quantized,
    read_panels,
    relative_rms,
)

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.kernels.cpu import dense, linear
from hipfire.kernels.cpu.layouts import DenseLayout
from hipfire.kernels.cpu.pack import PACKERS, Packer, pack_into, packed_nbytes, worst_fault
from hipfire.kernels.cpu.pack_blocks import times_half, times_half_by_integers
from hipfire.kernels.cpu.pack_kernels import MISFIT, SOUND
from hipfire.quant.registry import all_formats

SHAPES = [(rows, cols) for cols in (32, 256, 288, 576, 1280, 40, 7) for rows in (1, 15, 16, 17, 40)]


def shapes_of(packer: Packer) -> list[tuple[int, int]]:
    return [(rows, cols) for rows, cols in SHAPES if not packer.whole or cols % packer.block_elements == 0]


def pack(packer: Packer, source: Bytes, rows: int, cols: int, order: Any = None, poison: int = 0xA5) -> Bytes:
    target = np.full(packed_nbytes(packer.name, rows, cols), poison, np.uint8)
    assert pack_into(packer, source, rows, cols, target, order) == SOUND
    return target


def test_every_format_has_a_packer_of_its_geometry() -> None:
    assert set(PACKERS) == {found.name for found in all_formats()}
    for found in all_formats():
        packer = PACKERS[found.name]
        assert (packer.name, packer.block_elements) == (found.name, found.group)
        assert packer.row_nbytes(5 * found.group) == found.row_nbytes(5 * found.group)


@pytest.mark.parametrize("name", PACKERS)
def test_panels_hold_the_weights(name: str) -> None:
    packer = PACKERS[name]
    for rows, cols in shapes_of(packer):
        source = make_source(name, rows, cols)
        panels = pack(packer, source, rows, cols)
        assert np.array_equal(panels, pack(packer, source, rows, cols, poison=0x5A)), "a byte is not written"
        got, raw = read_panels(packer.layout, panels, rows, cols)
        error = relative_rms(got[:rows, :cols], decoded(name, source, rows, cols))
        assert error <= (3e-4 if name in PRODUCTS else 1e-6), (rows, cols)
        assert not got[rows:].any()
        assert not raw[rows:].any()
        assert not raw[:, cols:].any()


@pytest.mark.parametrize("name", ["Q8F16", "HFQ4G128", "HFQ4G256", "HFQ6G256"])
def test_what_a_short_block_holds_beyond_its_row_is_dropped(name: str) -> None:
    packer, rows, cols = PACKERS[name], 3, 40
    source = make_source(name, rows, cols)
    clean = pack(packer, source, rows, cols)
    header, bits = packer.block_bytes - packer.block_elements * packer.layout.bits // 8, packer.layout.bits
    used = header + (cols % packer.block_elements) * bits // 8
    dirty = source.copy().reshape(rows, -1, packer.block_bytes)
    dirty[:, -1, used:] ^= 0xFF
    assert not np.array_equal(dirty.reshape(-1), source)
    assert np.array_equal(pack(packer, dirty.reshape(-1), rows, cols), clean)


@pytest.mark.parametrize("name", PACKERS)
def test_rows_are_taken_in_the_order_asked_for(name: str) -> None:
    packer, cols = PACKERS[name], 256
    source = make_source(name, 40, cols)
    order = np.random.default_rng(3).integers(0, 40, 21)
    chosen = source.reshape(40, -1)[order].reshape(-1)
    # tensors start at any byte of a file
    odd = np.concatenate((np.zeros(1, np.uint8), source))[1:]
    assert np.array_equal(pack(packer, odd, 21, cols, order), pack(packer, chosen, 21, cols))
    assert not np.array_equal(
        pack(packer, source, 21, cols, order), pack(packer, source, 21, cols, order[::-1].copy())
    )


def run_threads(packer: Packer, source: Bytes, rows: int, cols: int, threads: int) -> tuple[Bytes, list[int]]:
    target = np.full(packed_nbytes(packer.name, rows, cols), 0xA5, np.uint8)
    faults = np.full(threads, 77, np.int64)
    addresses = (0, target.ctypes.data, faults.ctypes.data)
    arguments = np.array([source.ctypes.data, packer.row_nbytes(cols), rows, cols, *addresses], np.int64)
    for thread in reversed(range(threads)):
        packer.kernel(arguments.ctypes.data, thread, threads)
    return target, faults.tolist()


@pytest.mark.parametrize("name", PACKERS)
def test_threads_share_the_panels(name: str) -> None:
    packer, rows, cols = PACKERS[name], 40, 512
    source = make_source(name, rows, cols)
    whole = pack(packer, source, rows, cols)
    for threads in (1, 2, 3, 5):
        target, faults = run_threads(packer, source, rows, cols, threads)
        assert np.array_equal(target, whole)
        assert faults == [SOUND] * threads


@pytest.mark.parametrize("name", PACKERS)
def test_the_first_block_that_is_not_finite_is_named(name: str) -> None:
    packer, rows, cols = PACKERS[name], 40, 1280
    per_row = cols // packer.block_elements
    clean = make_source(name, rows, cols)
    order = np.arange(rows - 1, -1, -1)
    for offset, infinity in number_places(name):
        for payload in (0, 1):
            source = clean.copy()
            wrong = infinity.copy()
            wrong[0] |= payload
            blocks = source.reshape(rows, per_row, packer.block_bytes)
            for row, block in ((35, 0), (18, per_row - 1), (18, 1), (20, 0)):
                blocks[row, block, offset : offset + wrong.size] = wrong
            want = 18 * per_row + 1
            target = np.empty(packed_nbytes(name, rows, cols), np.uint8)
            assert pack_into(packer, source, rows, cols, target) == want
            assert pack_into(packer, source, rows, cols, target, order) == want
            faults = run_threads(packer, source, rows, cols, 3)[1]
            assert faults == [SOUND, want, 35 * per_row]
            assert worst_fault(faults) == want


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_no_half_holds_is_not_a_damaged_block(name: str) -> None:
    packer, rows, cols = PACKERS[name], 17, 512
    target = np.empty(packed_nbytes(name, rows, cols), np.uint8)
    for offset in HALVES[name]:
        source = make_source(name, rows, cols)
        blocks = source.reshape(rows, 2, packer.block_bytes)
        blocks[16, 1, offset : offset + 2] = np.array([65504.0], "<f2").view(np.uint8)
        assert pack_into(packer, source, rows, cols, target) == MISFIT
        blocks[3, 1, offset : offset + 2] = np.array([np.nan], "<f2").view(np.uint8)
        assert pack_into(packer, source, rows, cols, target) == 7
        assert worst_fault(run_threads(packer, source, rows, cols, 2)[1]) == 7
        blocks[3, 1, offset : offset + 2] = 0
        assert worst_fault(run_threads(packer, source, rows, cols, 2)[1]) == MISFIT


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_smallest_scales_lose_nothing(name: str) -> None:
    packer = PACKERS[name]
    source = make_source(name, 4, 256)
    for offset in HALVES[name]:
        source.reshape(4, -1)[:, offset : offset + 2] = np.array([[1], [2], [0x8003], [16]], "<u2").view(
            np.uint8
        )
    got, _ = read_panels(packer.layout, pack(packer, source, 4, 256), 4, 256)
    assert np.array_equal(got[:4], decoded(name, source, 4, 256))


@pytest.mark.parametrize("times", [times_half, times_half_by_integers])
def test_products_with_halves_are_rounded_to_the_nearest(times: Any) -> None:
    @njit
    def fill(out: Any) -> None:
        for half in range(out.shape[0]):
            for factor in range(out.shape[1]):
                out[half, factor] = times(half, factor)

    got = np.empty((1 << 16, 129), np.uint16)
    fill(got)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    sound = np.isfinite(halves)
    assert not np.isfinite(got[~sound].view(np.float16)).any()
    exact = halves[sound, None].astype(np.float32) * np.arange(129, dtype=np.float32)
    with np.errstate(over="ignore"):
        want = exact.astype(np.float16)
    assert np.array_equal(got[sound], want.view(np.uint16))
    # so what a half cannot hold is too large; no scale is lost because it is small
    fits = np.isfinite(want)
    assert (np.abs(want[fits] - exact[fits]) <= np.abs(exact[fits]) * 2.0**-11).all()


@pytest.mark.parametrize("name", PACKERS)
def test_products_read_the_panels(name: str) -> None:
    packer, rows, tokens = PACKERS[name], 40, 5
    layout = packer.layout
    cols = 768 if packer.block_elements == 256 and packer.whole else 40 if not packer.whole else 96
    source = make_source(name, rows, cols)
    panels = pack(packer, source, rows, cols)
    runs = -(-cols // 32)
    x = np.zeros((tokens, 32 * runs), np.float32)
    x[:, :cols] = np.random.default_rng(5).standard_normal((tokens, cols))
    y = np.full((tokens, 48), np.nan, np.float32)
    common = (panels.ctypes.data, tokens, 3, layout.panel_bytes(cols))
    if isinstance(layout, DenseLayout):
        rest = (cols, x.ctypes.data, x.strides[0], y.ctypes.data, y.strides[0])
        arguments, meant = np.array((*common, *rest), np.int64), x.astype(np.float64)
        dense.LINEAR_KERNELS[layout.index - len(linear.LINEAR_KERNELS)](arguments.ctypes.data, 0, 1)
    else:
        codes, numbers, meant = quantized(x)
        scratch = np.empty(linear.scratch_nbytes(32 * runs), np.uint8)
        rest = (runs, codes.ctypes.data, numbers.ctypes.data, y.ctypes.data, y.strides[0])
        arguments = np.array((*common, *rest, scratch.ctypes.data, 0), np.int64)
        linear.LINEAR_KERNELS[layout.index](arguments.ctypes.data, 0, 1)
    want = meant[:, :cols] @ decoded(name, source, rows, cols).T
    assert relative_rms(y[:, :rows], want) <= (1e-3 if name in PRODUCTS else 1e-5)
    assert not y[:, rows:].any()


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"GGUF_Q2_K cannot be packed .*pack it as F32"):
        packed_nbytes("GGUF_Q2_K", 16, 256)
    with pytest.raises(
        UnsupportedError, match="MQ4G256 rows of 576 columns cannot be packed: blocks have 256"
    ):
        packed_nbytes("MQ4G256", 16, 576)
    assert packed_nbytes("HFQ4G256", 17, 576) == 2 * (3 * 128 + 18 * 256)
    assert packed_nbytes("F16", 17, 5) == 2 * 16 * 5 * 2


def test_arrays_that_do_not_fit_are_refused() -> None:
    packer = PACKERS["Q8F16"]
    source, target = np.zeros(34 * 2, np.uint8), np.zeros(packed_nbytes("Q8F16", 2, 32), np.uint8)
    assert pack_into(packer, source, 2, 32, target) == SOUND
    assert pack_into(packer, source[:0], 0, 32, target[:0]) == SOUND
    assert pack_into(packer, source[:0], 0, 32, target[:0], np.empty(0, np.int64)) == SOUND
    for wrong in (
        (source[:-1], target, None),
        (source, target[:-1], None),
        (source.view(np.int8), target, None),
        (source, target[::-1], None),
        (source, target, np.array([0, 2])),
        (source, target, np.array([-1, 0])),
        (source, target, np.array([0])),
        (source, target, np.array([0, 1], np.int32)),
    ):
        with pytest.raises(ValidationError, match="cannot pack weights: "):
            pack_into(packer, wrong[0], 2, 32, wrong[1], wrong[2])
