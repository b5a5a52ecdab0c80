"""Reads Triton's intermediate text (TTIR) into a graph of values: who is computed from whom, and where.

It reads what kernels are made of: loops, branches, reductions and operations with one line each. It knows
types as far as integers have widths, and judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from hipfire.base.errors import InternalError

_NAME = r"%[\w.$-]+"
_NAMES = re.compile(rf"{_NAME}(?:#\d+)?")
_RESULTS = re.compile(rf"({_NAME}(?::\d+)?(?:, {_NAME}(?::\d+)?)*) = (.*)")
_FOR = re.compile(rf"scf\.for (?:unsigned )?({_NAME}) = (\S+) to (\S+) step (\S+)(?: iter_args\(([^)]*)\))?")
_PAIR = re.compile(rf"({_NAME}) = (%[\w.$#-]+)")
_ARGUMENT = re.compile(rf"({_NAME}): (!tt\.ptr<[^>]*>|[^ ,)]+)")
_LOCATION = re.compile(r"^#(loc\d*) = loc\((.*)\)$", re.MULTILINE)
_PLACE = re.compile(r'"([^"]+)":(\d+)')
_LIBRARY = "/triton/language/"
_INTEGER = re.compile(r"(?:^|x)i(\d+)>?$")
_POINTEE = re.compile(r"!tt\.ptr<(\w+)")


@dataclass(eq=False, slots=True)
class Value:
    """A value: the operation that makes it, from what, and as how wide an integer (0 if it is none).

    The operation `loop` counts from operand 0 to 1 by 2. `carried` is what a loop hands from turn to turn:
    how it begins and how it goes on, then the loop's three bounds if it counts. `merge` is any of its
    operands.
    """

    op: str
    operands: list[Value] = field(default_factory=list)
    bits: int = 0
    text: str = ""
    place: str = ""


@dataclass(slots=True)
class _Region:
    """A block that is open: what its yields go to, and what its arguments are."""

    kind: str
    results: list[Value] = field(default_factory=list)
    carried: list[Value] = field(default_factory=list)
    sums: bool = False


class Graph:
    """The values of one kernel: `additions` are the operations that add an offset to a pointer."""

    def __init__(self, text: str) -> None:
        self.additions: list[Value] = []
        self._known: dict[str, Value] = {}
        self._regions: list[_Region] = []
        self._places = _places(text)
        for line in text.splitlines():
            body, _, location = line.strip().rpartition(" loc(")
            if not body or line.rstrip().endswith(("{", ":")):
                body, location = line.strip(), ""
            if body and not body.startswith(("#loc", "module")):
                self._read(body, self._places.get(location.rstrip(")").lstrip("#"), ""))

    def _read(self, line: str, place: str) -> None:
        if line.startswith("tt.func"):
            for name, kind in _ARGUMENT.findall(line):
                self._known[name] = Value("argument", bits=integer_bits(kind), text=name[1:])
            self._regions.append(_Region("func"))
        elif line.startswith("^"):
            self._block(line)
        elif line.startswith("}"):
            self._close(line, place)
        else:
            found = _RESULTS.match(line)
            names = [name for part in found[1].split(", ") for name in _numbered(part)] if found else []
            self._operation(names, found[2] if found else line, place)

    def _operation(self, names: Sequence[str], text: str, place: str) -> None:
        if text.endswith("{"):
            self._open(names, text, place)
            return
        op = re.split(r"[ (]", text, maxsplit=1)[0].strip('"')
        operands = self._operands(text)
        if op in ("scf.yield", "scf.condition"):
            self._yield(op, operands)
        elif names:
            bits = 1 if op == "arith.cmpi" else integer_bits(_result_type(op, text))
            for name in names:
                self._known[name] = Value(op, operands, bits, text, place)
            if op == "tt.addptr":
                self.additions.append(self._known[names[0]])
        if op in ("arith.addi", "arith.muli", "arith.subi", "arith.shli") and self._regions:
            self._regions[-1].sums = True

    def _open(self, names: Sequence[str], text: str, place: str) -> None:
        results = [Value("merge", place=place) for _ in names]
        region = _Region(text.split(" ", 1)[0].split("(", 1)[0].strip('"'), results)
        if loop := _FOR.match(text):
            bounds = [self._known[name] for name in loop.group(2, 3, 4)]
            self._known[loop[1]] = Value("loop", bounds, bounds[1].bits, place=place)
            self._carry(region, loop[5] or "", bounds)
        elif region.kind == "scf.while":
            self._carry(region, text, [])
        elif region.kind in ("tt.reduce", "tt.scan"):
            for result in results:
                result.op, result.operands = region.kind, self._operands(text)
        elif region.kind != "scf.if":
            raise InternalError(f"{region.kind} has a body that nothing here can read")
        self._regions.append(region)
        self._known.update(zip(names, results, strict=True))

    def _carry(self, region: _Region, text: str, bounds: list[Value]) -> None:
        for name, begin in _PAIR.findall(text):
            first = self._known[begin]
            # the second operand, how it goes on, is known at the end of the body
            carried = Value("carried", [first, first, *bounds], first.bits)
            self._known[name] = carried
            region.carried.append(carried)
        if bounds:
            for result, carried in zip(region.results, region.carried, strict=True):
                result.operands.append(carried)
                result.bits = carried.bits

    def _yield(self, op: str, operands: Sequence[Value]) -> None:
        region = self._regions[-1]
        if op == "scf.condition":
            operands = operands[1:]
            for result, value in zip(region.results, operands, strict=True):
                result.operands.append(value)
                result.bits = value.bits
        elif region.carried:
            for carried, value in zip(region.carried, operands, strict=True):
                carried.operands[1], carried.place = value, value.place
        else:
            for result, value in zip(region.results, operands, strict=True):
                result.operands.append(value)
                result.bits = value.bits

    def _block(self, line: str) -> None:
        """Name the arguments of a block: what a loop's condition let through, or two values to reduce."""
        region = self._regions[-1]
        for index, (name, kind) in enumerate(_ARGUMENT.findall(line)):
            passed = region.kind == "scf.while" and index < len(region.results)
            self._known[name] = region.results[index] if passed else Value("any", bits=integer_bits(kind))

    def _close(self, line: str, place: str) -> None:
        if line.endswith("{"):  # another part of the same: else, or do
            return
        if not self._regions:  # the module's end
            return
        region = self._regions.pop()
        if region.kind in ("tt.reduce", "tt.scan"):
            kinds = line.rpartition("->")[2].strip(" ()").split(", ")
            for result, kind in zip(region.results, kinds, strict=True):
                result.bits, result.place = integer_bits(kind), place
                result.text = f"{'sum' if region.sums else 'pick'} {line}"

    def _operands(self, text: str) -> list[Value]:
        names = _NAMES.findall(re.sub(r'"[^"]*"', "", text))
        for name in names:
            if name not in self._known:
                raise InternalError(f"nothing here has read where {name} comes from")
        return [self._known[name] for name in names]


def integer_bits(kind: str) -> int:
    """Return the width of an integer type, or of a tensor of it; 0 for every other type."""
    found = _INTEGER.search(kind.strip())
    return int(found[1]) if found else 0


def _result_type(op: str, text: str) -> str:
    kinds = text.rpartition(" : ")[2]
    if op == "tt.load":
        pointee = _POINTEE.search(kinds)
        return pointee[1] if pointee else ""
    for arrow in (" -> ", " to "):
        if arrow in kinds:
            return kinds.rpartition(arrow)[2]
    return kinds.rpartition(", ")[2]


def _numbered(result: str) -> list[str]:
    name, _, count = result.partition(":")
    return [f"{name}#{index}" for index in range(int(count))] if count else [name]


def _places(text: str) -> dict[str, str]:
    """Return `file:line` for each location: its own, or that of the location which it wraps."""
    told = dict(_LOCATION.findall(text))

    def place(name: str) -> str:
        body = told.get(name, "")
        if (found := _PLACE.search(body)) and _LIBRARY not in found[1]:
            return f"{PurePath(found[1]).name}:{found[2]}"
        # a call: where the called line lies comes first, then the caller, who is meant if Triton is called
        return next(filter(None, map(place, re.findall(r"#(loc\d*)", body))), "")

    return {name: place(name) for name in told}
