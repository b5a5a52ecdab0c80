"""Kernels that pack matrices from file formats into the panels of `layouts`: one for each kind of block.

Sixteen rows lie interleaved in a panel, so each row is written 4 bytes (or one number) at a time. Every byte
of a panel is written: what lies past the last row or column is zero.

Arguments of a kernel: source, bytes of a source row, rows, columns, order (0, or the address of an int64 for
each row that is made: which row of the source it takes), target, faults. Faults are an int64 for each thread:
SOUND, or the number of the first block whose numbers are not finite, counted through the rows of the source,
or MISFIT where a product of finite numbers is too large for a half. Nothing is checked.
This file does not know the names of formats.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu import pack_blocks as blocks
from hipfire.kernels.cpu.jit import Kernel, argument, helper, kernel, share
from hipfire.kernels.cpu.layouts import LAYOUTS, PANEL_ROWS, SUB_COLUMNS, Layout
from hipfire.kernels.cpu.pack_blocks import DamagedIn, EmitCodes, NumbersOf, load_16, load_32
from hipfire.kernels.cpu.simd import (
    ADDRESS,
    BYTE,
    LONG,
    SHORT,
    WORD,
    call,
    constant,
    load_long,
    operation,
    pointer,
    splat,
    store,
    store_long,
)

# what a kernel reports where no block is damaged
SOUND, MISFIT = -1, -2
HALF_EXPONENT, BFLOAT_EXPONENT, FLOAT_EXPONENT = blocks.HALF_EXPONENT, 0x7F80, 0x7F800000
# columns of a row that are packed before those of the next row: sixteen rows of them stay in the L1 cache
CHUNK_COLUMNS = 256
DENSE_CHUNK = 32
WORD_BYTES = 4 * PANEL_ROWS

store_16 = operation(types.void, (ADDRESS, types.int64), lambda b, a, v: store(b, a, b.trunc(v, SHORT)))
store_32 = operation(types.void, (ADDRESS, types.int64), lambda b, a, v: store(b, a, b.trunc(v, WORD)))


def _emit_clear(builder: ir.IRBuilder, address: Any, nbytes: Any) -> None:
    place, no = pointer(builder, address, BYTE), ir.Constant(ir.IntType(1), 0)
    call(builder, "llvm.memset.p0.i64", ir.VoidType(), place, ir.Constant(BYTE, 0), nbytes, no)


clear = operation(types.void, (ADDRESS, types.int64), _emit_clear)


def _first(builder: ir.IRBuilder, codes: Any, count: Any) -> Any:
    """Return the first `count` of 32 codes, zeros after them; `count` is positive."""
    lanes = ir.VectorType(BYTE, blocks.RUN)
    many = builder.icmp_signed(">", count, ir.Constant(LONG, blocks.RUN))
    limit = builder.trunc(builder.select(many, ir.Constant(LONG, blocks.RUN), count), BYTE)
    kept = builder.icmp_unsigned(
        "<", ir.Constant(lanes, list(range(blocks.RUN))), splat(builder, limit, lanes)
    )
    return builder.select(kept, codes, constant(lanes, 0))


def _emit_put(builder: ir.IRBuilder, place: Any, codes: Any, bits: int) -> None:
    """Store 32 codes of one row: its 4 bytes in each word of a run, in the order that `dots` describes."""
    kind = blocks.CODE_WORDS
    words = builder.bitcast(codes, kind)
    if bits == 8:
        stored = [builder.extract_element(words, ir.Constant(WORD, t)) for t in range(kind.count)]
    else:
        nibbles = builder.and_(words, constant(kind, 0x0F0F0F0F))
        stored = [
            builder.or_(
                builder.extract_element(nibbles, ir.Constant(WORD, t)),
                builder.shl(builder.extract_element(nibbles, ir.Constant(WORD, t + 1)), ir.Constant(WORD, 4)),
            )
            for t in range(0, kind.count, 2)
        ]
        stored += _planes(builder, words, bits - 4)
    for index, word in enumerate(stored):
        store(builder, builder.add(place, ir.Constant(LONG, WORD_BYTES * index)), word)


def _planes(builder: ir.IRBuilder, words: Any, extra: int) -> list[Any]:
    """Return the words that hold the `extra` upper bits of eight words of codes; without such bits none."""
    if not extra:
        return []
    kind, count = words.type, 8 // extra
    upper = builder.and_(
        builder.lshr(words, constant(kind, 4)), constant(kind, 0x01010101 * ((1 << extra) - 1))
    )
    upper = builder.shl(upper, ir.Constant(kind, [extra * (t % count) for t in range(kind.count)]))
    planes = []
    for first in range(0, kind.count, count):
        lanes = [builder.extract_element(upper, ir.Constant(WORD, first + t)) for t in range(count)]
        planes.append(reduce(builder.or_, lanes))
    return planes


def _put_codes(codes: EmitCodes, bits: int) -> Any:
    """Make `put(place, block, run, count)`: pack `count` columns of a block's run of 32, and zeros after."""

    def emit(builder: ir.IRBuilder, place: Any, block: Any, run: Any, count: Any) -> None:
        _emit_put(builder, place, _first(builder, codes(builder, block, run), count), bits)

    return operation(types.void, (ADDRESS, ADDRESS, types.int64, types.int64), emit)


def _put_numbers(layout: Layout) -> Any:
    """Make `put(place, first, second)`: store a row's numbers of a group; returns 1 if they are finite, or 0.

    The second is a minimum, or a second scale, or does not exist.
    """
    kind, size, mask = (SHORT, 2, HALF_EXPONENT) if layout.half else (WORD, 4, FLOAT_EXPONENT)
    two = layout.minimum or layout.parts == 2

    def emit(builder: ir.IRBuilder, place: Any, first: Any, second: Any) -> Any:
        exponent = ir.Constant(LONG, mask)
        finite = builder.icmp_unsigned("<", builder.and_(first, exponent), exponent)
        store(builder, place, builder.trunc(first, kind))
        if two:
            both = builder.icmp_unsigned("<", builder.and_(second, exponent), exponent)
            finite = builder.and_(finite, both)
            place = builder.add(place, ir.Constant(LONG, size * PANEL_ROWS))
            store(builder, place, builder.trunc(second, kind))
        return builder.zext(finite, LONG)

    return operation(types.int64, (ADDRESS, types.int64, types.int64), emit)


@helper
def _source_row(order: int, row: int) -> int:
    """Return which row of the source an output row takes; `order` is the address of a list, or 0."""
    return load_long(order + 8 * row) if order != 0 else row


@helper
def _worse(a: int, b: int) -> int:
    """Return what two faults come to: the first of damaged blocks before MISFIT before SOUND."""
    if a >= 0 and b >= 0:
        return min(a, b)
    return max(a, b) if a >= 0 or b >= 0 else min(a, b)


def _panel_packer(
    name: str, fill: Any, sizes: tuple[int, int, int, int], elements: int, chunk: int
) -> Kernel:
    """Make the kernel that packs rows with `fill`, `chunk` runs of columns at a time.

    `sizes` are the columns of a run, the runs of a group, and the bytes of a group's header and of a run.
    """
    run_columns, group_runs, header, run_bytes = sizes

    @kernel(f"pack-{name}")
    def pack(arguments: int, thread: int, threads: int) -> None:
        source, row_bytes = argument(arguments, 0), argument(arguments, 1)
        rows, cols, order = argument(arguments, 2), argument(arguments, 3), argument(arguments, 4)
        row_blocks, runs = (cols + elements - 1) // elements, (cols + run_columns - 1) // run_columns
        panel_bytes = (runs + group_runs - 1) // group_runs * header + runs * run_bytes
        first, last = share((rows + PANEL_ROWS - 1) // PANEL_ROWS, thread, threads)
        worst = SOUND
        for p in range(first, last):
            panel = argument(arguments, 5) + p * panel_bytes
            lanes = min(PANEL_ROWS, rows - p * PANEL_ROWS)
            if lanes < PANEL_ROWS:
                clear(panel, panel_bytes)
            for begin in range(0, runs, chunk):
                end = min(begin + chunk, runs)
                for lane in range(lanes):
                    row = _source_row(order, p * PANEL_ROWS + lane)
                    fault = fill(panel, lane, source + row * row_bytes, begin, end, cols)
                    if fault != SOUND:
                        worst = _worse(worst, fault if fault < 0 else row * row_blocks + fault)
        store_long(argument(arguments, 6) + 8 * thread, worst)

    return pack


def code_packer(
    name: str,
    layout_name: str,
    elements: int,
    nbytes: int,
    numbers: NumbersOf,
    codes: EmitCodes,
    damaged_in: DamagedIn = blocks.always_damaged,
) -> Kernel:
    """Make the kernel that packs blocks of `elements` columns in `nbytes` bytes into a layout of codes."""
    layout = LAYOUTS[layout_name]
    if not isinstance(layout, Layout):
        raise InternalError(f"layout {layout_name} holds no codes")
    put, put_numbers = _put_codes(codes, layout.bits), _put_numbers(layout)
    header, run_bytes, group_runs = layout.header_bytes, layout.sub_bytes, layout.subs
    number_bytes, block_runs = 2 if layout.half else 4, elements // SUB_COLUMNS

    @helper
    def fill(panel: int, lane: int, row: int, begin: int, end: int, cols: int) -> int:
        """Pack runs [begin, end) of a row, which start with a group; returns the worst fault in them."""
        fault = SOUND
        for run in range(begin, end):
            index, part = run // block_runs, run % block_runs
            block = row + index * nbytes
            head = panel + run // group_runs * header + run * run_bytes
            if run % group_runs == 0:
                one, other = numbers(block, part // group_runs)
                if put_numbers(head + number_bytes * lane, one, other) == 0:
                    fault = _worse(fault, index if damaged_in(block) else MISFIT)
            put(head + header + 4 * lane, block, part, cols - run * SUB_COLUMNS)
        return fault

    sizes = (SUB_COLUMNS, group_runs, header, run_bytes)
    return _panel_packer(name, fill, sizes, elements, CHUNK_COLUMNS // SUB_COLUMNS)


def dense_packer(name: str, size: int, exponent: int) -> Kernel:
    """Make the kernel for values of `size` bytes, which are not finite where all `exponent` bits are set."""
    load_value, store_value = (load_16, store_16) if size == 2 else (load_32, store_32)
    column_bytes = size * PANEL_ROWS

    @helper
    def fill(panel: int, lane: int, row: int, begin: int, end: int, cols: int) -> int:
        """Pack columns [begin, end) of a row; returns the first that is not finite."""
        fault = SOUND
        for column in range(begin, end):
            value = load_value(row + size * column)
            store_value(panel + column_bytes * column + size * lane, value)
            if (value & exponent) == exponent:
                fault = _worse(fault, column)
        return fault

    return _panel_packer(name, fill, (1, 1, 0, column_bytes), 1, DENSE_CHUNK)
