"""Kernels whose offsets wrap around in 32 bits, and twins of each that compute them wide enough."""

import triton
import triton.language as tl

from hipfire.kernels.gpu.offline import Offline


@triton.jit
def row_kernel(x_ptr, out_ptr, row_stride, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + row * row_stride + at))


@triton.jit
def rows_kernel(x_ptr, out_ptr, count, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = row < count
    if WIDE:
        row = row.to(tl.int64)
    tl.store(out_ptr + row, tl.load(x_ptr + row * WIDTH, mask=inside), mask=inside)


@triton.jit
def gathered_kernel(ids_ptr, x_ptr, out_ptr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Ids in memory: the wide one never narrows them."""
    token = tl.load(ids_ptr + tl.program_id(0))
    if not WIDE:
        token = token.to(tl.int32)
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + token * WIDTH + at))


@triton.jit
def carried_kernel(x_ptr, out_ptr, count, row_stride, WIDE: tl.constexpr):
    """An offset that a loop adds to: the wide one has 64 bits for it from the start."""
    at = tl.arange(0, 64)
    place = tl.zeros((64,), tl.int64) + at if WIDE else at
    total = tl.zeros((64,), tl.float32)
    for _ in range(0, count):
        total += tl.load(x_ptr + place)
        place += row_stride
    tl.store(out_ptr + at, total)


@triton.jit
def while_kernel(x_ptr, out_ptr, count, row_stride, WIDE: tl.constexpr):
    at = tl.arange(0, 64)
    total = tl.zeros((64,), tl.float32)
    row = tl.program_id(0)
    begin = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    while row < count:
        if row % 2 == 0:  # noqa: SIM108 - a branch in the kernel too
            place = begin * row_stride
        else:
            place = begin
        total += tl.load(x_ptr + place + at)
        row += tl.num_programs(0)
    tl.store(out_ptr + at, total)


@triton.jit
def narrowed_kernel(x_ptr, out_ptr, row_stride, WIDE: tl.constexpr):
    """Computed in 64 bits, and cut to 32 at the end."""
    place = tl.program_id(0).to(tl.int64) * row_stride
    if not WIDE:
        place = place.to(tl.int32)
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + place + at))


@triton.jit
def summed_kernel(lengths_ptr, x_ptr, out_ptr, WIDE: tl.constexpr):
    """The place of a sequence is the sum of the lengths before it."""
    lengths = tl.load(lengths_ptr + tl.arange(0, 1024))
    if WIDE:
        lengths = lengths.to(tl.int64)
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + tl.sum(lengths, axis=0) + at))


@triton.jit
def picked_kernel(scores_ptr, x_ptr, out_ptr, row_stride, WIDE: tl.constexpr):
    """The place of the greatest of some numbers."""
    best = tl.argmax(tl.load(scores_ptr + tl.arange(0, 128)), axis=0)
    if WIDE:
        best = best.to(tl.int64)
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + best * row_stride + at))


@triton.jit
def blocks_kernel(rows_ptr, x_ptr, out_ptr, block_stride, WIDE: tl.constexpr):
    """A position in blocks of 256: what is left of it in its block is small, whatever it is."""
    position = tl.load(rows_ptr + tl.program_id(0)).to(tl.int32)
    block = position // 256
    rest = position - block * 256
    place = block.to(tl.int64) * block_stride + rest * 8192
    if not WIDE:
        place += (position - block) * 8192
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + place + at))


@triton.jit
def bits_kernel(x_ptr, out_ptr, words, WIDE: tl.constexpr):
    """Bounds that come from masks, shifts, comparisons, choices and halves."""
    row = tl.program_id(0)
    small = (row & 127) | ((row >> 20) ^ 1)
    least = tl.minimum(tl.maximum(row - 5, 0), 1000)
    chosen = tl.where(row < words, small, least) + (row > 3).to(tl.int32)
    even, odd = tl.split(tl.reshape(tl.arange(0, 128), (64, 2)))
    place = chosen * 65536 + (row % 17 << 10) + (odd - even)
    if not WIDE:
        place = place << 10
    tl.store(out_ptr + even, tl.load(x_ptr + place))


@triton.jit
def tiles_kernel(x_ptr, out_ptr, turns, tiles, WIDE: tl.constexpr):
    """Tiles are shared out among programs, and each turn of a loop chooses the one of the next."""
    at = tl.arange(0, 64)
    total = tl.zeros((64,), tl.float32)
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    for turn in range(turns):
        total += tl.load(x_ptr + tile * 64 + at)
        later = tl.minimum(turn + 1, tiles // programs) if WIDE else turn + 1
        tile = tl.program_id(0) + later * programs
    tl.store(out_ptr + at, total)


def _pair(kernel, arguments, **constants):
    arguments = {"x_ptr": "*fp32", "out_ptr": "*fp32", **arguments}
    return [
        Offline(
            kernel,
            arguments,
            {**constants, "WIDE": wide},
            name="wide" if wide else "wraps",
            on=frozenset({"gfx1201"}),
        )
        for wide in (True, False)
    ]


OFFLINE = (
    *_pair(row_kernel, {"row_stride": "i32"}),
    *_pair(rows_kernel, {"count": "i32"}, WIDTH=4096),
    *_pair(gathered_kernel, {"ids_ptr": "*i64"}, WIDTH=5120),
    *_pair(carried_kernel, {"count": "i32", "row_stride": "i32"}),
    *_pair(while_kernel, {"count": "i32", "row_stride": "i32"}),
    *_pair(narrowed_kernel, {"row_stride": "i32"}),
    *_pair(summed_kernel, {"lengths_ptr": "*i32"}),
    *_pair(picked_kernel, {"scores_ptr": "*fp32", "row_stride": "i32"}),
    *_pair(blocks_kernel, {"rows_ptr": "*i64", "block_stride": "i64"}),
    *_pair(bits_kernel, {"words": "i32"}),
    *_pair(tiles_kernel, {"turns": "i32", "tiles": "i32"}),
)
