"""Integer dot products of packed weight codes with int8 activations, for sixteen rows at a time.

Four neighbouring columns of sixteen rows are 64 bytes, a word: byte 4 r + j holds column 4 t + j of row r.
The four activations of these columns are repeated over the lanes, so that one instruction multiplies 64
pairs. Sums are exact: a run of products is added in 16 bits only as long as it cannot overflow there. This
file does not know scales, formats of files, or how words lie in memory beyond one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from hipfire.kernels.cpu.simd import (
    ADDRESS,
    BYTE,
    I16,
    LANES,
    LONG,
    SHORT,
    SHORTS,
    WORD,
    WORDS,
    call,
    constant,
    load,
    operation,
    splat,
    store,
)
from hipfire.kernels.cpu.target import cpu_path

# columns of one activation group, and words in it
GROUP = 32
WORD_BYTES = 64
QUADS = GROUP // 4
BYTES = ir.VectorType(BYTE, 4 * LANES)
HALF_BYTES = ir.VectorType(BYTE, 2 * LANES)
HALF_SHORTS = ir.VectorType(SHORT, LANES)
HALF_WORDS = ir.VectorType(WORD, LANES // 2)
# LLVM 22 changed the operand types of the 512-bit and 256-bit VNNI intrinsics from words to bytes
_BYTE_OPERANDS = llvm.llvm_version_info[0] >= 22

# how many words of b-bit codes can be multiplied and added in 16 bits: 2 (2^b - 1) 127 n < 2^15
SHORT_RUN = {4: 8, 5: 4, 6: 2, 8: 1}


def halves(builder: ir.IRBuilder, vector: Any) -> tuple[Any, Any]:
    """Split a vector of 32-bit lanes in the middle."""
    count = vector.type.count // 2

    def part(first: int) -> Any:
        order = ir.Constant(ir.VectorType(WORD, count), list(range(first, first + count)))
        return builder.shuffle_vector(vector, vector, order)

    return part(0), part(count)


def join(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    """Undo `halves`."""
    count = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(WORD, count), list(range(count))))


def _vnni(builder: ir.IRBuilder, total: Any, codes: Any, x: Any) -> Any:
    """Add the products of unsigned codes and signed activations, four to a lane, to `total`."""
    if cpu_path() == "vnni512":
        kind = BYTES if _BYTE_OPERANDS else WORDS
        name = "llvm.x86.avx512.vpdpbusd.512"
        return call(builder, name, WORDS, total, builder.bitcast(codes, kind), builder.bitcast(x, kind))
    kind = HALF_BYTES if _BYTE_OPERANDS else HALF_WORDS
    parts = []
    pairs = zip(*(halves(builder, vector) for vector in (total, codes, x)), strict=True)
    for half_total, half_codes, half_x in pairs:
        operands = (builder.bitcast(half_codes, kind), builder.bitcast(half_x, kind))
        parts.append(call(builder, "llvm.x86.avx512.vpdpbusd.256", HALF_WORDS, half_total, *operands))
    return join(builder, *parts)


def pairs_avx2(builder: ir.IRBuilder, codes: Any, x: Any, *, signed: bool) -> Any:
    """Return the 16-bit sums of two neighbouring products."""
    parts = []
    for half_codes, half_x in zip(halves(builder, codes), halves(builder, x), strict=True):
        weights = builder.bitcast(half_codes, HALF_BYTES)
        factors = builder.bitcast(half_x, HALF_BYTES)
        if signed:
            # one operand must be unsigned: move the weight's sign to the activation. |-128| is 128 there
            factors = call(builder, "llvm.x86.avx2.psign.b", HALF_BYTES, factors, weights)
            weights = call(builder, "llvm.abs.v32i8", HALF_BYTES, weights, ir.Constant(ir.IntType(1), 0))
        parts.append(call(builder, "llvm.x86.avx2.pmadd.ub.sw", HALF_SHORTS, weights, factors))
    return join(builder, *parts)


def _pairs_generic(builder: ir.IRBuilder, codes: Any, x: Any, *, signed: bool) -> Any:
    weights, factors = builder.bitcast(codes, SHORTS), builder.bitcast(x, SHORTS)
    eight = constant(SHORTS, 8)

    def even(value: Any) -> Any:
        return builder.ashr(builder.shl(value, eight), eight)

    if signed:
        low, high = even(weights), builder.ashr(weights, eight)
    else:
        low, high = builder.and_(weights, constant(SHORTS, 0xFF)), builder.lshr(weights, eight)
    first = builder.mul(low, even(factors))
    return builder.add(first, builder.mul(high, builder.ashr(factors, eight)))


def widen_avx2(builder: ir.IRBuilder, shorts: Any, factor: int = 1) -> Any:
    """Add neighbouring 16-bit sums into 32-bit lanes, times `factor`."""
    parts = [
        call(builder, "llvm.x86.avx2.pmadd.wd", HALF_WORDS, half, constant(HALF_SHORTS, factor))
        for half in halves(builder, shorts)
    ]
    return join(builder, *parts)


def _widen(builder: ir.IRBuilder, shorts: Any) -> Any:
    if cpu_path() == "avx2":
        return widen_avx2(builder, shorts)
    words = builder.bitcast(shorts, WORDS)
    sixteen = constant(WORDS, 16)
    low = builder.ashr(builder.shl(words, sixteen), sixteen)
    return builder.add(low, builder.ashr(words, sixteen))


def emit_dots(
    builder: ir.IRBuilder, words: Sequence[Any], rows: Sequence[Sequence[Any]], bits: int, *, signed: bool
) -> list[Any]:
    """Return, for each of `rows` (its activations per word, repeated over the lanes), the sums over `words`.

    Signed codes give sums that are 128 times the sum of activations too large on the VNNI paths, whose codes
    are unsigned: see `signed_bias`.
    """
    if cpu_path().startswith("vnni"):
        flip = constant(WORDS, 0x80808080)
        codes = [builder.xor(word, flip) if signed else word for word in words]
        totals = [constant(WORDS, 0)] * len(rows)
        for t, code in enumerate(codes):
            totals = [_vnni(builder, total, code, row[t]) for total, row in zip(totals, rows, strict=True)]
        return totals
    multiply = pairs_avx2 if cpu_path() == "avx2" else _pairs_generic
    sums: list[Any] = [None] * len(rows)
    for start in range(0, len(words), SHORT_RUN[bits]):
        run: list[Any] = [None] * len(rows)
        for t in range(start, min(start + SHORT_RUN[bits], len(words))):
            for m, row in enumerate(rows):
                product = multiply(builder, words[t], row[t], signed=signed)
                run[m] = product if run[m] is None else builder.add(run[m], product)
        for m, shorts in enumerate(run):
            wide = _widen(builder, shorts)
            sums[m] = wide if sums[m] is None else builder.add(sums[m], wide)
    return sums


def signed_bias() -> int:
    """Return what the codes of signed words are moved by on the path in use."""
    return 128 if cpu_path().startswith("vnni") else 0


def emit_words(builder: ir.IRBuilder, address: Any, bits: int) -> list[Any]:
    """Load the codes of a group of 32 columns as eight words of whole bytes.

    4-bit codes lie two words to 64 bytes, word 2 i in the low and word 2 i + 1 in the high half of each byte.
    What 6- and 5-bit codes have beyond that follows them: two bits (four words to 64 bytes) or one (eight).
    """
    if bits == 8:
        return [load(builder, address, WORDS, WORD_BYTES * t) for t in range(QUADS)]
    mask = constant(WORDS, 0x0F0F0F0F)
    words = []
    for pair in range(QUADS // 2):
        both = load(builder, address, WORDS, WORD_BYTES * pair)
        words.append(builder.and_(both, mask))
        words.append(builder.and_(builder.lshr(both, constant(WORDS, 4)), mask))
    extra = bits - 4
    if extra:
        per_plane = 8 // extra
        high = constant(WORDS, 0x10101010 * ((1 << extra) - 1))
        first = WORD_BYTES * QUADS // 2
        planes = [load(builder, address, WORDS, first + WORD_BYTES * i) for i in range(QUADS // per_plane)]
        for t in range(QUADS):
            shift = extra * (t % per_plane) - 4
            plane = planes[t // per_plane]
            if shift > 0:
                plane = builder.lshr(plane, constant(WORDS, shift))
            elif shift < 0:
                plane = builder.shl(plane, constant(WORDS, -shift))
            words[t] = builder.or_(words[t], builder.and_(plane, high))
    return words


def emit_activations(builder: ir.IRBuilder, address: Any) -> list[Any]:
    """Load 32 activations, four per word, each four repeated over the lanes."""
    return [splat(builder, load(builder, address, WORD, 4 * t), WORDS) for t in range(QUADS)]


def tuple_of(builder: ir.IRBuilder, values: Sequence[Any]) -> Any:
    """Return vectors of words as what Numba sees as a tuple of I16."""
    result = ir.Constant(ir.ArrayType(WORDS, len(values)), ir.Undefined)
    for index, value in enumerate(values):
        result = builder.insert_value(result, value, index)
    return result


def dot_of_codes(bits: int, parts: int, *, signed: bool) -> Any:
    """Make `dot(codes, x)`: addresses of one group's codes and activations in, a tuple of `parts` I16 out.

    With one part it holds the sums over all 32 columns, with two those of each half.
    """
    run = QUADS // parts

    def emit(builder: ir.IRBuilder, codes: Any, x: Any) -> Any:
        words, activations = emit_words(builder, codes, bits), emit_activations(builder, x)
        return tuple_of(
            builder,
            [
                emit_dots(builder, words[i : i + run], [activations[i : i + run]], bits, signed=signed)[0]
                for i in range(0, QUADS, run)
            ],
        )

    return operation(types.UniTuple(I16, parts), (ADDRESS, ADDRESS), emit)


def _emit_unpack(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, codes: Any, target: Any) -> None:
        for t, word in enumerate(emit_words(builder, codes, bits)):
            store(builder, builder.add(target, ir.Constant(LONG, WORD_BYTES * t)), word)

    return emit


def unpack_codes(bits: int) -> Any:
    """Make `unpack(codes, target)`: write a group's codes as eight words, 512 bytes."""
    return operation(types.void, (ADDRESS, ADDRESS), _emit_unpack(bits))
