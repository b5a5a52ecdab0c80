"""Float arithmetic on several rows at once, for the tile of a matrix product: tuples of sixteen-lane vectors.

This file does not know layouts or how the integer sums come about.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from hipfire.kernels.cpu.simd import (
    ADDRESS,
    F16,
    FLOAT,
    FLOATS,
    I16,
    LONG,
    WORD,
    WORDS,
    constant,
    emit_fma,
    load,
    operation,
    splat,
)


def _build(builder: ir.IRBuilder, values: list[Any]) -> Any:
    result = ir.Constant(ir.ArrayType(FLOATS, len(values)), ir.Undefined)
    for index, value in enumerate(values):
        result = builder.insert_value(result, value, index)
    return result


def _rows(builder: ir.IRBuilder, start: Any, stride: Any, rows: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(LONG, row))) for row in range(rows)]


def zeros(rows: int) -> Any:
    """Make `zeros()`: a tuple of `rows` vectors of zeros."""
    return operation(types.UniTuple(F16, rows), (), lambda b: _build(b, [constant(FLOATS, 0.0)] * rows))


def add_scaled_sums(rows: int, parts: int, part: int, bias: int) -> Any:
    """Make `add(totals, sums, meta, stride)`: totals + scale * (sums - bias * sum of codes), row by row.

    `sums` holds `parts` I16 for each row, of which number `part` is meant; `meta` is the address of the first
    row's numbers of the activation group, `stride` their distance in bytes.
    """

    def emit(builder: ir.IRBuilder, totals: Any, sums: Any, meta: Any, stride: Any) -> Any:
        results = []
        for row, place in enumerate(_rows(builder, meta, stride, rows)):
            value = builder.extract_value(sums, row * parts + part)
            if bias:
                codes = load(builder, place, WORD, 8 + 4 * part, 4)
                if parts == 1:
                    codes = builder.add(codes, load(builder, place, WORD, 12, 4))
                moved = builder.mul(codes, ir.Constant(WORD, bias))
                value = builder.sub(value, splat(builder, moved, WORDS))
            scale = splat(builder, load(builder, place, FLOAT, align=4), FLOATS)
            total = builder.extract_value(totals, row)
            results.append(emit_fma(builder, scale, builder.sitofp(value, FLOATS), total))
        return _build(builder, results)

    several = types.UniTuple(F16, rows)
    return operation(several, (several, types.UniTuple(I16, rows * parts), ADDRESS, ADDRESS), emit)


def sums_along(rows: int, step: int, offset: int) -> Any:
    """Make `sums(start, stride, count)`: per row the sum of `count` float32, `step` bytes apart, in order.

    The first one lies `offset` bytes behind the row's address.
    """

    def emit(builder: ir.IRBuilder, start: Any, stride: Any, count: Any) -> Any:
        places = _rows(builder, start, stride, rows)
        zero = ir.Constant(FLOAT, 0.0)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in places]
        for total in totals:
            builder.store(zero, total)
        with cgutils.for_range(builder, count) as loop:
            moved = builder.mul(loop.index, ir.Constant(LONG, step))
            for place, total in zip(places, totals, strict=True):
                value = load(builder, builder.add(place, moved), FLOAT, offset, 4)
                builder.store(builder.fadd(builder.load(total), value), total)
        result = ir.Constant(ir.ArrayType(FLOAT, rows), ir.Undefined)
        for index, total in enumerate(totals):
            result = builder.insert_value(result, builder.load(total), index)
        return result

    return operation(types.UniTuple(types.float32, rows), (ADDRESS, ADDRESS, ADDRESS), emit)


def add_products(rows: int) -> Any:
    """Make `add(results, factor, totals)`: results + factor * totals, with one factor for all rows."""

    def emit(builder: ir.IRBuilder, results: Any, factor: Any, totals: Any) -> Any:
        values = [
            emit_fma(builder, factor, builder.extract_value(totals, row), builder.extract_value(results, row))
            for row in range(rows)
        ]
        return _build(builder, values)

    several = types.UniTuple(F16, rows)
    return operation(several, (several, F16, several), emit)


def add_multiples(rows: int) -> Any:
    """Make `add(results, vector, factors)`: results + vector * factor, with one number for each row."""

    def emit(builder: ir.IRBuilder, results: Any, vector: Any, factors: Any) -> Any:
        values = []
        for row in range(rows):
            factor = splat(builder, builder.extract_value(factors, row), FLOATS)
            values.append(emit_fma(builder, vector, factor, builder.extract_value(results, row)))
        return _build(builder, values)

    several = types.UniTuple(F16, rows)
    return operation(several, (several, F16, types.UniTuple(types.float32, rows)), emit)
