"""The primitive values of a GGUF header: numbers, strings, arrays, all thirteen value types.

Reads from a byte view with a moving position and never believes a count that the remaining bytes cannot back.
Does not know which keys there are or what they mean.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

from hipfire.base.errors import ArtifactError

MAX_KEY = 0xFFFF  # bytes of a key or a tensor name
MAX_NESTING = 8
MAX_ENTRIES = 2**26  # entries of one array; the largest vocabularies have less than 2^20
MAX_TOTAL_ENTRIES = 2**27  # entries of all arrays of a file, each of which becomes an object in memory


class ValueType(IntEnum):
    """The type ids of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_STRUCTS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_SMALLEST = {ValueType.STRING: 8, ValueType.ARRAY: 12, **{kind: s.size for kind, s in _STRUCTS.items()}}


class ValueReader:
    """Reads values one after the other from `data`, the whole mapped file; `pos` is a byte offset in it."""

    def __init__(self, data: memoryview, path: Path, pos: int = 0) -> None:
        self.data = data
        self.path = path
        self.pos = pos
        self._entries = 0

    def fail(self, reason: str, field: str, offset: int | None = None, hint: str = "") -> ArtifactError:
        """Return the error for `field`, at `offset` or at the present position."""
        at = self.pos if offset is None else offset
        return ArtifactError(reason, path=self.path, field=field[:200], offset=at, hint=hint)

    def number(self, kind: ValueType, field: str) -> Any:
        """Return one number (or bool) of a fixed-size type."""
        return self._numbers(kind, 1, field)[0]

    def string(self, field: str, *, limit: int | None = None) -> str:
        """Return a string with a u64 length; `limit` bounds its bytes."""
        start = self.pos
        length = self.number(ValueType.UINT64, field)
        if limit is not None and length > limit:
            raise self.fail(f"is {length} bytes long, allowed are {limit}", field, start)
        self.require(length, 1, field)
        try:
            text = str(self.data[self.pos : self.pos + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("is not UTF-8", field, self.pos + error.start) from error
        self.pos += length
        return text

    def value_type(self, field: str) -> ValueType:
        """Return a type id. An unknown one is refused, because nothing after it could be read."""
        start = self.pos
        number = self.number(ValueType.UINT32, field)
        try:
            return ValueType(number)
        except ValueError as error:
            raise self.fail(f"has the unknown value type {number}", field, start) from error

    def value(self, field: str) -> tuple[ValueType, Any]:
        """Return the type and the value at the present position; arrays are lists."""
        kind = self.value_type(field)
        if kind is ValueType.ARRAY:
            return kind, self._array(field, 1)
        if kind is ValueType.STRING:
            return kind, self.string(field)
        return kind, self.number(kind, field)

    def require(self, count: int, size: int, field: str) -> None:
        """Refuse `count` items of at least `size` bytes each that cannot be in the rest of the file."""
        left = len(self.data) - self.pos
        if count * size > left:
            hint = "the file is damaged or cut off"
            raise self.fail(f"claims {count} x {size} bytes but {left} are left", field, hint=hint)

    def _array(self, field: str, depth: int) -> list[Any]:
        if depth > MAX_NESTING:
            raise self.fail(f"nests arrays deeper than {MAX_NESTING}", field)
        kind = self.value_type(f"{field}[]")
        count = self.number(ValueType.UINT64, field)
        if count > MAX_ENTRIES:
            raise self.fail(f"claims {count} entries, allowed are {MAX_ENTRIES}", field)
        self.require(count, _SMALLEST[kind], field)
        self._entries += count
        if self._entries > MAX_TOTAL_ENTRIES:
            raise self.fail(f"the file's arrays claim more than {MAX_TOTAL_ENTRIES} entries together", field)
        if kind is ValueType.STRING:
            return self._strings(count, field)
        if kind is ValueType.ARRAY:
            return [self._array(f"{field}[{index}]", depth + 1) for index in range(count)]
        return self._numbers(kind, count, field)

    def _numbers(self, kind: ValueType, count: int, field: str) -> list[Any]:
        self.require(count, _STRUCTS[kind].size, field)
        layout = _STRUCTS[kind] if count == 1 else struct.Struct(f"<{count}{_CODES[kind]}")
        values = list(layout.unpack_from(self.data, self.pos))
        if kind is ValueType.BOOL:
            if values and max(values) > 1:
                raise self.fail("holds a bool that is neither 0 nor 1", field)
            values = list(map(bool, values))
        self.pos += layout.size
        return values

    def _strings(self, count: int, field: str) -> list[str]:
        """Return `count` strings. Vocabularies pass here, hence the flat loop."""
        data, pos, end_of_data = self.data, self.pos, len(self.data)
        unpack = _STRUCTS[ValueType.UINT64].unpack_from
        values: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(data, pos)
                start = pos + 8
                end = start + length
                if end > end_of_data:
                    raise self.fail(f"string {len(values)} is longer than the file", field, pos)
                values.append(str(data[start:end], "utf-8"))
                pos = end
        except struct.error as error:
            raise self.fail(f"the file ends at string {len(values)} of {count}", field, pos) from error
        except UnicodeDecodeError as error:
            raise self.fail(f"string {len(values)} is not UTF-8", field, pos) from error
        self.pos = pos
        return values
