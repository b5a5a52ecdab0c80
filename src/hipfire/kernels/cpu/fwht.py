"""The 256-point rotation of the MQ formats, with the reference's order of operations and hence its bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from hipfire.kernels.cpu.jit import argument, kernel, share
from hipfire.kernels.cpu.simd import ADDRESS, FLOATS, LANES, LONG, WORD, WORDS, load, operation, store

SEGMENT = 256
VECTORS = SEGMENT // LANES
VECTOR_BYTES = 4 * LANES
SEGMENT_BYTES = 4 * SEGMENT


def _within(builder: ir.IRBuilder, value: Any, stride: int) -> Any:
    """Turn lanes a and b, `stride` apart in one vector, into a + b and a - b."""
    order = ir.Constant(ir.VectorType(WORD, LANES), [lane ^ stride for lane in range(LANES)])
    other = builder.shuffle_vector(value, value, order)
    signs = ir.Constant(WORDS, [-(2**31) if lane & stride else 0 for lane in range(LANES)])
    own = builder.bitcast(builder.xor(builder.bitcast(value, WORDS), signs), FLOATS)
    return builder.fadd(other, own)


def _emit_rotate(builder: ir.IRBuilder, x: Any, before: Any, after: Any, out: Any) -> None:
    values = [
        builder.fmul(
            load(builder, x, FLOATS, VECTOR_BYTES * i), load(builder, before, FLOATS, VECTOR_BYTES * i)
        )
        for i in range(VECTORS)
    ]
    for stride in (1, 2, 4, 8):
        values = [_within(builder, value, stride) for value in values]
    for stride in (1, 2, 4, 8):
        for i in range(VECTORS):
            if not i & stride:
                first, second = values[i], values[i + stride]
                values[i] = builder.fadd(first, second)
                values[i + stride] = builder.fsub(first, second)
    for i, value in enumerate(values):
        scaled = builder.fmul(value, load(builder, after, FLOATS, VECTOR_BYTES * i))
        store(builder, builder.add(out, ir.Constant(LONG, VECTOR_BYTES * i)), scaled)


rotate = operation(types.void, (ADDRESS, ADDRESS, ADDRESS, ADDRESS), _emit_rotate)


@kernel("fwht")
def fwht(arguments: int, thread: int, threads: int) -> None:
    """Rotate rows. Arguments: x, rows, columns, bytes of a row of x, 256 factors before, 256 after, out."""
    x, columns, stride = argument(arguments, 0), argument(arguments, 2), argument(arguments, 3)
    before, after, out = argument(arguments, 4), argument(arguments, 5), argument(arguments, 6)
    segments = columns // SEGMENT
    first, last = share(argument(arguments, 1) * segments, thread, threads)
    for unit in range(first, last):
        place = x + unit // segments * stride + unit % segments * SEGMENT_BYTES
        rotate(place, before, after, out + unit * SEGMENT_BYTES)
