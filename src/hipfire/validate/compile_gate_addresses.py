"""Checks that offsets into memory are computed in 64 bits wherever 32 could wrap around.

Ranges of all integers that reach an address are worked out from what kernels are started with; an operation
in 32 bits whose result could lie outside of 32 bits is a fault. It knows kernels only as graphs of values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Final

from hipfire.validate.compile_gate_ttir import Graph, Value

Range = tuple[int, int]

# What a kernel may be started with: the programs in each dimension of a grid, which counts tokens or tiles of
# rows in the first, heads or tiles of columns in the second, and parts of a sum in the third.
PROGRAMS: Final[Mapping[str, int]] = {"x": 2**22, "y": 2**14, "z": 2**10}
# sizes and counts, such as rows, columns and positions: in arguments and in memory
COUNTS: Final = 2**24
# distances between rows, in arguments with this ending: by their width
STRIDE: Final = "stride"
STRIDES: Final[Mapping[int, int]] = {32: 2**31 - 1, 64: 2**38}

_SAME: Final = frozenset(
    {
        "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.join",
        "tt.split", "tt.cat", "merge", "arith.extsi",
    }
)  # fmt: skip


def wide_faults(ttir: str) -> list[str]:
    """Return a line for every operation on the way to an address that may wrap around, in order of place."""
    graph = Graph(ttir)
    ranges = _Ranges()
    for addition in graph.additions:
        ranges.of(addition.operands[1])
    return sorted(ranges.faults)


class _Ranges:
    """The ranges of values, worked out from their operands once for each; `faults` are found on the way."""

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self._known: dict[Value, Range] = {}

    def of(self, value: Value) -> Range:
        """Return the least and greatest number that a value may be."""
        if value not in self._known:
            found = self._work_out(value)
            self._known[value] = self._fitting(value, found)
        return self._known[value]

    def _fitting(self, value: Value, found: Range) -> Range:
        limits = _limits(value.bits)
        if limits[0] <= found[0] and found[1] <= limits[1]:
            return found
        reach = math.log2(max(abs(found[0]), abs(found[1])))
        place = f"{value.place}: " if value.place else ""
        self.faults.add(
            f"{place}{value.op} with {value.bits} bits on the way to an address may reach 2^{reach:.0f}"
        )
        # what follows from a fault is none of its own
        return max(-COUNTS, limits[0]), min(COUNTS, limits[1])

    def _work_out(self, value: Value) -> Range:
        op = value.op
        if op in _STARTS:
            return _STARTS[op](value)
        if op == "carried":
            return self._carried(value)
        if op == "loop":
            begin, end, _ = map(self.of, value.operands)
            return begin[0], max(begin[0], end[1] - 1)
        if op == "arith.select":
            return _joined([self.of(operand) for operand in value.operands[1:]])
        operands = [self.of(operand) for operand in value.operands if operand.bits]
        if op == "tt.gather":
            return operands[0]
        if op in _SAME:
            return _joined(operands)
        if op in ("tt.reduce", "tt.scan"):
            return _reduced(value, operands)
        if op == "arith.subi" and (rest := _as_rest(value)):
            return _rests(self.of(rest[0]), self.of(rest[1]))
        if op == "arith.muli" and (bound := _as_share(value)):
            return _shares(operands, self.of(bound))
        if op in _PAIRS:
            return _PAIRS[op](operands[0], operands[1])
        if op in ("arith.trunci", "arith.bitcast", "tt.bitcast"):
            return operands[0] if operands else _limits(value.bits)
        if op == "arith.extui":
            source = value.operands[0]
            return operands[0] if operands[0][0] >= 0 else (0, 2**source.bits - 1)
        self.faults.add(f"{value.place}: nothing is known of the range of {op} on the way to an address")
        return _limits(value.bits)

    def _carried(self, value: Value) -> Range:
        first, then, *bounds = value.operands
        begin = self.of(first)
        if then in (value, first):
            return begin
        # anything, for what goes on from it while its own range is being worked out
        self._known[value] = _limits(value.bits)
        if bounds and then.op in ("arith.addi", "arith.subi") and then.operands[0] is value:
            start, end, step = map(self.of, bounds)
            turns = max(0, -(-(end[1] - start[0]) // max(1, step[0])))
            change = self.of(then.operands[1])
            if then.op == "arith.subi":
                change = -change[1], -change[0]
            return begin[0] + min(0, turns * change[0]), begin[1] + max(0, turns * change[1])
        return _joined([begin, self.of(then)])


def _as_rest(value: Value) -> tuple[Value, Value] | None:
    """Return x and y where a value is x - x // y * y: as ranges alone, the terms seem to have no relation."""
    whole, product = value.operands
    if product.op != "arith.muli":
        return None
    for quotient, factor in (product.operands, product.operands[::-1]):
        if quotient.op == "arith.divsi" and quotient.operands[0] is whole and quotient.operands[1] is factor:
            return whole, factor
    return None


def _as_share(value: Value) -> Value | None:
    """Return x where a value is min(n, x // y) * y: as a range alone, the product seems to be far more."""
    for least, factor in (value.operands, value.operands[::-1]):
        for share in least.operands if least.op == "arith.minsi" else ():
            if share.op == "arith.divsi" and share.operands[1] is factor:
                return share.operands[0]
    return None


def _shares(terms: list[Range], whole: Range) -> Range:
    low, high = _products(*terms)
    return (low, min(high, whole[1])) if min(whole[0], *(term[0] for term in terms)) >= 0 else (low, high)


def _limits(bits: int) -> Range:
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _joined(ranges: list[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _argument(value: Value) -> Range:
    if value.text.endswith(STRIDE) and value.bits in STRIDES:
        return 0, STRIDES[value.bits]
    return 0, min(COUNTS, _limits(value.bits)[1])


def _loaded(value: Value) -> Range:
    low, high = _limits(value.bits)
    return max(-COUNTS, low), min(COUNTS, high)


def _constant(value: Value) -> Range:
    body = value.text.rpartition(" : ")[0]
    if "true" in body or "false" in body:
        return 0, 1
    numbers = [int(number) for number in re.findall(r"(?<![\w.])-?\d+", body)]
    return min(numbers), max(numbers)


def _made(value: Value) -> Range:
    end = re.search(r"end = (\d+)", value.text)
    start = re.search(r"start = (\d+)", value.text)
    return int(start[1]) if start else 0, int(end[1]) - 1 if end else _limits(32)[1]


def _program(value: Value) -> Range:
    return 0, PROGRAMS[value.text.split()[1]] - 1


def _whole(value: Value) -> Range:
    return _limits(value.bits)


_STARTS: Final[Mapping[str, Callable[[Value], Range]]] = {
    "argument": _argument,
    "tt.load": _loaded,
    "arith.constant": _constant,
    "tt.make_range": _made,
    "tt.get_program_id": _program,
    "tt.get_num_programs": lambda value: (1, _program(value)[1] + 1),
    "arith.cmpi": lambda value: (0, 1),
    "arith.cmpf": lambda value: (0, 1),
    "arith.fptosi": _loaded,
    "any": _whole,
    "tt.elementwise_inline_asm": _whole,
}


def _reduced(value: Value, operands: list[Range]) -> Range:
    if value.text.startswith("pick"):
        return _joined(operands)
    # a sum: as many terms as the tensor is long, which its type tells
    shape = re.search(r"tensor<([\dx]+)x", value.text)
    count = math.prod(int(size) for size in shape[1].split("x")) if shape else 2**16
    low, high = _joined(operands)
    return min(0, low * count), max(0, high * count)


def _products(a: Range, b: Range) -> Range:
    found = [x * y for x in a for y in b]
    return min(found), max(found)


def _quotients(a: Range, b: Range) -> Range:
    divisors = [d for d in (*b, 1, -1) if d and b[0] <= d <= b[1]] or [1]
    found = [x // d if x * d >= 0 else -(-x // d) for x in a for d in divisors]
    return min(found), max(found)


def _rests(a: Range, b: Range) -> Range:
    most = max(abs(b[0]), abs(b[1]), 1) - 1
    return max(min(a[0], 0), -most), min(max(a[1], 0), most)


def _masked(a: Range, b: Range) -> Range:
    if a[0] >= 0 or b[0] >= 0:
        return 0, min(r[1] for r in (a, b) if r[0] >= 0)
    return min(a[0], b[0]) * 2, max(a[1], b[1])


def _mixed(a: Range, b: Range) -> Range:
    bits = max(max(abs(low), abs(high)).bit_length() for low, high in (a, b))
    return 0 if min(a[0], b[0]) >= 0 else -(2**bits), 2**bits - 1


def _shifted(a: Range, b: Range) -> Range:
    return _products(a, (2 ** min(64, max(0, b[0])), 2 ** min(64, max(0, b[1]))))


def _lowered(a: Range, b: Range) -> Range:
    found = [x >> min(64, max(0, by)) for x in a for by in b]
    return min(found), max(found)


_PAIRS: Final[Mapping[str, Callable[[Range, Range], Range]]] = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": _products,
    "arith.divsi": _quotients,
    "arith.divui": _quotients,
    "arith.ceildivsi": lambda a, b: (_quotients(a, b)[0], _quotients(a, b)[1] + 1),
    "arith.floordivsi": lambda a, b: (_quotients(a, b)[0] - 1, _quotients(a, b)[1]),
    "arith.remsi": _rests,
    "arith.remui": _rests,
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.minui": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxui": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.andi": _masked,
    "arith.ori": _mixed,
    "arith.xori": _mixed,
    "arith.shli": _shifted,
    "arith.shrsi": _lowered,
    "arith.shrui": _lowered,
}
