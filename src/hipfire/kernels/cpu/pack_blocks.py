"""What the blocks of each file format hold: the codes of 32 columns, and the numbers that scale them.

Codes are read as one vector of 32 bytes, in the order of the columns. Numbers are bit patterns, two for every
group of columns: scale and minimum, or the scales of both halves of 32 columns; the second is 0 where there
is none. Blocks start at any byte. Nothing here is checked.
This file does not know panels, rows, or the names of formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from hipfire.kernels.cpu.jit import helper
from hipfire.kernels.cpu.simd import (
    ADDRESS,
    BYTE,
    FLOAT,
    LONG,
    SHORT,
    WORD,
    call,
    constant,
    load,
    operation,
    splat,
)
from hipfire.kernels.cpu.target import host_features

Numbers = tuple[int, int]
# (address of a block, which of its groups) -> numbers
NumbersOf = Callable[[int, int], Numbers]
# (builder, address of a block, which run of 32 columns of it) -> codes
EmitCodes = Callable[[ir.IRBuilder, Any, Any], Any]
# address of a block with a number that is not finite -> whether it comes from the file, not from a product
DamagedIn = Callable[[int], bool]

RUN = 32
CODES = ir.VectorType(BYTE, RUN)
HALF_CODES = ir.VectorType(BYTE, RUN // 2)
# the same 32 bytes in wider lanes
CODE_PAIRS = ir.VectorType(SHORT, RUN // 2)
CODE_WORDS = ir.VectorType(WORD, RUN // 4)
QUADS = ir.VectorType(LONG, RUN // 8)
HALF_EXPONENT = 0x7C00
HEADER_BYTES = 8


def _emit_bit_length(builder: ir.IRBuilder, value: Any) -> Any:
    zeros = call(builder, "llvm.ctlz.i64", LONG, value, ir.Constant(ir.IntType(1), 0))
    return builder.sub(ir.Constant(LONG, 64), zeros)


# unlike the loads of `simd` these take any address and give int64, whose upper bits are zeros unless signed
load_8 = operation(types.int64, (ADDRESS,), lambda b, a: b.zext(load(b, a, BYTE), LONG))
load_signed_8 = operation(types.int64, (ADDRESS,), lambda b, a: b.sext(load(b, a, BYTE), LONG))
load_16 = operation(types.int64, (ADDRESS,), lambda b, a: b.zext(load(b, a, SHORT), LONG))
load_32 = operation(types.int64, (ADDRESS,), lambda b, a: b.zext(load(b, a, WORD), LONG))
bit_length = operation(types.int64, (types.int64,), _emit_bit_length)


def _emit_times_half(builder: ir.IRBuilder, half: Any, factor: Any) -> Any:
    value = builder.fpext(builder.bitcast(builder.trunc(half, SHORT), ir.HalfType()), FLOAT)
    product = builder.fmul(value, builder.sitofp(factor, FLOAT))
    return builder.zext(builder.bitcast(builder.fptrunc(product, ir.HalfType()), SHORT), LONG)


@helper
def times_half_by_integers(half: int, factor: int) -> int:
    """Do the same as `times_half` where the processor has no conversion of halves."""
    sign, exponent, fraction = half & 0x8000, (half >> 10) & 31, half & 0x3FF
    if exponent == 31:
        return half
    place = max(exponent, 1)
    product = (fraction | (1024 if exponent > 0 else 0)) * factor
    if product == 0:
        return sign
    shift: int = max(bit_length(product) - 11, 0)
    # half of what is cut off, less one where the last bit kept is even
    carry = (((1 << shift) - 1) >> 1) + ((product >> shift) & (1 if shift > 0 else 0))
    # a carry out of the fraction raises the exponent by itself; so does the leading 1 of a normal number
    return sign | min(((place + shift - 1) << 10) + ((product + carry) >> shift), HALF_EXPONENT)


# `times_half(half, factor)`: the half of bits `half` times `factor` in 0..128, as bits of the nearest half.
# Ties go to even; products that are too large are infinities; infinities and NaN never become finite. Small
# products are exact: they are multiples of the smallest half, as every half is.
times_half = (
    operation(types.int64, (types.int64, types.int64), _emit_times_half)
    if "f16c" in host_features()
    else times_half_by_integers
)


@helper
def float_pair(block: int, group: int) -> Numbers:
    """Return float32 scale and minimum at the head of a block; they hold for all of it."""
    return load_32(block), load_32(block + 4)


@helper
def half_pair(block: int, group: int) -> Numbers:
    """Return the group's half scale and minimum from the pairs at the head of a block."""
    return load_16(block + 4 * group), load_16(block + 4 * group + 2)


@helper
def half_scale(block: int, group: int) -> Numbers:
    """Return the half scale at the head of a block."""
    return load_16(block), 0


@helper
def k_pair(block: int, group: int) -> Numbers:
    """Return scale d * s and minimum -dmin * m of sub-block `group` of Q4_K and Q5_K, rounded to halves."""
    scales = block + 4
    place = group & 3
    if group < 4:
        scale, minimum = load_8(scales + place) & 63, load_8(scales + 4 + place) & 63
    else:
        low = load_8(scales + 8 + place)
        scale = (low & 15) | ((load_8(scales + place) >> 6) << 4)
        minimum = (low >> 4) | ((load_8(scales + 4 + place) >> 6) << 4)
    return times_half(load_16(block), scale), times_half(load_16(block + 2) ^ 0x8000, minimum)


@helper
def _times_signed(half: int, factor: int) -> int:
    return times_half(half ^ (0x8000 if factor < 0 else 0), abs(factor))


@helper
def q6_k_scales(block: int, group: int) -> Numbers:
    """Return the scales d * s of the two sub-blocks of 16 columns that make up run `group` of Q6_K."""
    d, scales = load_16(block + 208), block + 192 + 2 * group
    return _times_signed(d, load_signed_8(scales)), _times_signed(d, load_signed_8(scales + 1))


@helper
def _not_finite(half: int) -> bool:
    return (half & HALF_EXPONENT) == HALF_EXPONENT


@helper
def k_pair_damaged(block: int) -> bool:
    """Tell whether d or dmin of a Q4_K or Q5_K block is not finite."""
    return _not_finite(load_16(block)) or _not_finite(load_16(block + 2))


@helper
def q6_k_damaged(block: int) -> bool:
    """Tell whether d of a Q6_K block is not finite."""
    return _not_finite(load_16(block + 208))


@helper
def always_damaged(block: int) -> bool:
    """Say of blocks whose numbers are handed on unchanged that infinities come from the file."""
    return True


def _from_ggml_nibbles(builder: ir.IRBuilder, block: Any, offset: int) -> Any:
    """Return 32 codes from 16 bytes: the first half in the low nibbles, the second in the high ones."""
    packed = load(builder, block, HALF_CODES, offset)
    low = builder.and_(packed, constant(HALF_CODES, 15))
    high = builder.lshr(packed, constant(HALF_CODES, 4))
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(WORD, RUN), list(range(RUN))))


def _field(builder: ir.IRBuilder, place: Any, shift: Any, mask: int) -> Any:
    """Return the bits `mask` of each of 32 bytes once they are shifted down by `shift`."""
    quads = builder.bitcast(load(builder, place, CODES), QUADS)
    fields = builder.bitcast(builder.lshr(quads, splat(builder, shift, QUADS)), CODES)
    return builder.and_(fields, constant(CODES, mask))


def _with_upper(builder: ir.IRBuilder, low: Any, upper: Any) -> Any:
    return builder.or_(low, builder.shl(upper, constant(CODES, 4)))


def _scaled(builder: ir.IRBuilder, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(LONG, factor))


def _low_bit(builder: ir.IRBuilder, value: Any) -> Any:
    return builder.and_(value, ir.Constant(LONG, 1))


def _halved(builder: ir.IRBuilder, value: Any, times: int) -> Any:
    return builder.lshr(value, ir.Constant(LONG, times))


def stream_4(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read a stream of 4-bit codes, the first in the low nibble, after an 8-byte header."""
    place = builder.add(block, _scaled(builder, run, RUN // 2))
    pairs = builder.zext(load(builder, place, HALF_CODES, HEADER_BYTES), CODE_PAIRS)
    spread = builder.or_(pairs, builder.shl(pairs, constant(CODE_PAIRS, 4)))
    return builder.bitcast(builder.and_(spread, constant(CODE_PAIRS, 0x0F0F)), CODES)


def stream_6(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read a stream of 6-bit codes, the first lowest, after an 8-byte header: three bytes hold four."""
    place = builder.add(block, _scaled(builder, run, RUN * 6 // 8))
    packed = load(builder, place, ir.VectorType(BYTE, 24), HEADER_BYTES)
    # three bytes and a zero to each word
    order = [3 * (i // 4) + i % 4 if i % 4 < 3 else 24 for i in range(RUN)]
    triples = builder.shuffle_vector(
        packed, constant(packed.type, 0), ir.Constant(ir.VectorType(WORD, RUN), order)
    )
    words = builder.bitcast(triples, CODE_WORDS)
    codes = builder.and_(words, constant(CODE_WORDS, 0x3F))
    for place_in_word in (1, 2, 3):
        field = builder.and_(words, constant(CODE_WORDS, 0x3F << (6 * place_in_word)))
        codes = builder.or_(codes, builder.shl(field, constant(CODE_WORDS, 2 * place_in_word)))
    return builder.bitcast(codes, CODES)


def int8_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the int8 codes of Q8F16 and Q8_0."""
    return load(builder, block, CODES, 2)


def q4_0_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the codes of Q4_0."""
    return _from_ggml_nibbles(builder, block, 2)


def q4_1_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the codes of Q4_1."""
    return _from_ggml_nibbles(builder, block, 4)


def q5_0_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the codes of Q5_0: 32 fifth bits, then nibbles."""
    bits = builder.bitcast(load(builder, block, WORD, 2), ir.VectorType(ir.IntType(1), RUN))
    return _with_upper(builder, _from_ggml_nibbles(builder, block, 6), builder.zext(bits, CODES))


def _k_nibbles(builder: ir.IRBuilder, nibbles: Any, run: Any) -> Any:
    """Read 4 bits of a run of Q4_K or Q5_K: two runs share 32 bytes."""
    place = builder.add(nibbles, _scaled(builder, _halved(builder, run, 1), RUN))
    return _field(builder, place, _scaled(builder, _low_bit(builder, run), 4), 15)


def q4_k_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the codes of Q4_K."""
    return _k_nibbles(builder, builder.add(block, ir.Constant(LONG, 16)), run)


def q5_k_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the codes of Q5_K, whose fifth bits are bit `run` of 32 bytes."""
    low = _k_nibbles(builder, builder.add(block, ir.Constant(LONG, 48)), run)
    return _with_upper(builder, low, _field(builder, builder.add(block, ir.Constant(LONG, 16)), run, 1))


def q6_k_codes(builder: ir.IRBuilder, block: Any, run: Any) -> Any:
    """Read the codes of Q6_K: each half of the block has 64 bytes of nibbles and 32 bytes of upper pairs."""
    half, quarter = _halved(builder, run, 2), builder.and_(run, ir.Constant(LONG, 3))
    nibbles = builder.add(block, _scaled(builder, half, 64))
    nibbles = builder.add(nibbles, _scaled(builder, _low_bit(builder, run), RUN))
    low = _field(builder, nibbles, _scaled(builder, _halved(builder, quarter, 1), 4), 15)
    pairs = builder.add(block, builder.add(_scaled(builder, half, RUN), ir.Constant(LONG, 128)))
    return _with_upper(builder, low, _field(builder, pairs, _scaled(builder, quarter, 2), 3))
