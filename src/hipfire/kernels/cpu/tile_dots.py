"""Integer dot products of several rows of activations with codes that were unpacked for them.

Unpacking a group once and multiplying it with many rows is what makes a prompt cheap. This file decides how
codes lie unpacked, and on AVX2, which has 16 registers, in which order products are formed so that all sums
stay in them. It does not know scales or layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from hipfire.kernels.cpu import dots
from hipfire.kernels.cpu.dots import (
    HALF_WORDS,
    QUADS,
    SHORT_RUN,
    WORD_BYTES,
    emit_activations,
    emit_dots,
    emit_words,
    halves,
    join,
    pairs_avx2,
    tuple_of,
    widen_avx2,
)
from hipfire.kernels.cpu.simd import (
    ADDRESS,
    I16,
    LONG,
    SHORTS,
    WORD,
    WORDS,
    constant,
    load,
    operation,
    splat,
    store,
)
from hipfire.kernels.cpu.target import cpu_path

_AVX2 = cpu_path() == "avx2"


def signed_bias() -> int:
    """Return what signed codes are moved by in a tile on the path in use."""
    return 128 if _AVX2 else dots.signed_bias()


def unpacked_bytes(bits: int) -> int:
    """Return the bytes of a group's codes as a tile wants them.

    On AVX2, 8-bit codes become two words of 4-bit halves: a 16-bit sum holds eight products of a half, but
    only one of a byte.
    """
    return (2 if bits == 8 and _AVX2 else 1) * QUADS * WORD_BYTES


def unpack_for_tile(bits: int) -> Any:
    """Make `unpack(codes, target)`: write a group's codes as words, where halved the low halves first."""

    def emit(builder: ir.IRBuilder, codes: Any, target: Any) -> None:
        words = emit_words(builder, codes, bits)
        if unpacked_bytes(bits) > QUADS * WORD_BYTES:
            mask = constant(WORDS, 0x0F0F0F0F)
            words = [builder.xor(word, constant(WORDS, 0x80808080)) for word in words]
            high = [builder.and_(builder.lshr(word, constant(WORDS, 4)), mask) for word in words]
            words = [builder.and_(word, mask) for word in words] + high
        for t, word in enumerate(words):
            store(builder, builder.add(target, ir.Constant(LONG, WORD_BYTES * t)), word)

    return operation(types.void, (ADDRESS, ADDRESS), emit)


def dots_of_words(rows: int, bits: int, parts: int, *, signed: bool) -> Any:
    """Make `dots(words, x, stride)`: the sums of `rows` rows of activations with a group's unpacked words.

    `stride` is the distance of the rows in bytes. The result is a tuple of rows * parts I16, part by part of
    each row. Sums of signed codes are `signed_bias()` times the sum of activations too large.
    """
    run = QUADS // parts

    def emit(builder: ir.IRBuilder, address: Any, x: Any, stride: Any) -> Any:
        if _AVX2:
            by_part = _emit_in_registers(builder, address, x, stride, rows, bits, parts)
        else:
            words = [load(builder, address, WORDS, WORD_BYTES * t) for t in range(QUADS)]
            activations = [emit_activations(builder, start) for start in _starts(builder, x, stride, rows)]
            by_part = [
                emit_dots(
                    builder,
                    words[i : i + run],
                    [row[i : i + run] for row in activations],
                    bits,
                    signed=signed,
                )
                for i in range(0, QUADS, run)
            ]
        return tuple_of(builder, [by_part[part][m] for m in range(rows) for part in range(parts)])

    return operation(types.UniTuple(I16, rows * parts), (ADDRESS, ADDRESS, ADDRESS), emit)


def _starts(builder: ir.IRBuilder, x: Any, stride: Any, rows: int) -> list[Any]:
    starts = [x]
    for _ in range(rows - 1):
        starts.append(builder.add(starts[-1], stride))
    return starts


def _emit_in_registers(
    builder: ir.IRBuilder, address: Any, x: Any, stride: Any, rows: int, bits: int, parts: int
) -> list[list[Any]]:
    """Return the sums of each part, for each row, of unsigned codes.

    Runs that 16 bits can hold come one after another. LLVM would rather load everything first, mix the runs,
    and add in trees, and then needs more registers than there are.
    """
    halved = unpacked_bytes(bits) > QUADS * WORD_BYTES
    run = SHORT_RUN[4 if halved else bits]
    sums: list[list[Any]] = [[None] * rows for _ in range(parts)]
    for place in range(0, (2 if halved else 1) * QUADS, min(run, QUADS // parts)):
        shorts = _emit_run(builder, address, x, stride, rows, place, min(run, QUADS // parts))
        totals = sums[place % QUADS * parts // QUADS]
        for m, short in enumerate(shorts):
            wide = widen_avx2(builder, short, 16 if place >= QUADS else 1)
            totals[m] = wide if totals[m] is None else builder.add(totals[m], wide)
        address, x = (_after(builder, pointer, totals) for pointer in (address, x))
    return sums


def _emit_run(
    builder: ir.IRBuilder, address: Any, x: Any, stride: Any, rows: int, place: int, count: int
) -> list[Any]:
    """Return for each row the 16-bit sums over `count` words from number `place` on."""
    sums: list[Any] = [None] * rows
    starts = _starts(builder, x, stride, rows)
    for t in range(place, place + count):
        word = load(builder, address, WORDS, WORD_BYTES * t)
        for m, start in enumerate(starts):
            activations = splat(builder, load(builder, start, WORD, 4 * (t % QUADS)), WORDS)
            products = pairs_avx2(builder, word, activations, signed=False)
            sums[m] = products if t == place else builder.add(sums[m], products)
        sums = _pinned(builder, sums)
    return sums


def _pinned(builder: ir.IRBuilder, shorts: Sequence[Any]) -> list[Any]:
    """Pass values through an empty instruction sequence, in registers: a fence for LLVM's scheduling."""
    parts = [part for value in shorts for part in halves(builder, builder.bitcast(value, WORDS))]
    count = len(parts)
    kind = ir.FunctionType(ir.LiteralStructType([HALF_WORDS] * count), (HALF_WORDS,) * count)
    places = ",".join(["=x"] * count + [str(i) for i in range(count)])
    result = builder.asm(kind, "", places, parts, False)
    parts = [builder.extract_value(result, i) for i in range(count)]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [builder.bitcast(join(builder, low, high), SHORTS) for low, high in pairs]


def _after(builder: ir.IRBuilder, pointer: Any, values: Sequence[Any]) -> Any:
    """Return `pointer`, which LLVM knows only when it has `values`: loads through it cannot come before."""
    parts = [part for value in values for part in halves(builder, value)]
    kind = ir.FunctionType(LONG, (LONG, *(HALF_WORDS,) * len(parts)))
    return builder.asm(kind, "", "=r,0" + ",x" * len(parts), [pointer, *parts], False)
