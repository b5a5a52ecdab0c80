"""The header of one safetensors file, checked completely before anything of it is used.

File: u64 length, that many bytes of JSON, then the tensors with neither gaps nor overlaps. Does not know
folders, indexes or which element types can be weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from hipfire.base.errors import ArtifactError
from hipfire.checkpoint import foreign, jsontext
from hipfire.checkpoint.mapped import MappedFile

MAX_HEADER = 100_000_000  # bytes; the format's own limit
_LENGTH = 8

# bits of one element, for every element type that the format defines
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


class Entry(NamedTuple):
    """One tensor of a file: element type by name, row-major shape, first byte in the file, size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: MappedFile) -> dict[str, Entry]:
    """Return the tensors of a mapped safetensors file in the order of their bytes.

    Raises:
        ArtifactError: the file is something else (it says what) or any claim of its header is wrong.
    """
    length = _header_length(file)
    field = "header"
    header = jsontext.parse_object(
        file.view(_LENGTH, length), path=file.path, field=field, base=_LENGTH, unique=True
    )
    data = _LENGTH + length
    entries = {
        name: _entry(name, value, data, file.path) for name, value in header.items() if name != "__metadata__"
    }
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end, previous = data, "the header"
    for name, entry in ordered.items():
        if entry.offset != end:
            fault = "leaves a gap after" if entry.offset > end else "overlaps"
            raise _fail(
                f"starts at byte {entry.offset} and {fault} {previous}, which ends at {end}", file.path, name
            )
        end, previous = entry.offset + entry.nbytes, name
    if end > file.size:
        hint = "the file is cut off: download it again"
        raise _fail(f"ends at byte {end} but the file ends at {file.size}", file.path, previous, hint)
    if end < file.size:
        raise _fail(
            f"{file.size - end} trailing bytes follow the last tensor, which ends at {end}", file.path, field
        )
    return ordered


def _fail(reason: str, path: Path, name: str, hint: str = "") -> ArtifactError:
    return ArtifactError(reason, path=path, field=name[:200], hint=hint)


def _header_length(file: MappedFile) -> int:
    head = bytes(file.view(0, min(file.size, foreign.SAMPLE)))
    length = int.from_bytes(head[:_LENGTH], "little")
    if (
        file.size > _LENGTH
        and length <= min(file.size - _LENGTH, MAX_HEADER)
        and head[_LENGTH : _LENGTH + 1] == b"{"
    ):
        return length
    what = foreign.describe(head)
    if what:
        raise _fail(f"is no safetensors file but {what}", file.path, "header", foreign.advice(what))
    if file.size <= _LENGTH:
        raise _fail(f"the file has only {file.size} bytes", file.path, "header", "download it again")
    if length > min(file.size - _LENGTH, MAX_HEADER):
        reason = f"claims {length} bytes, possible are {min(file.size - _LENGTH, MAX_HEADER)}"
        raise _fail(reason, file.path, "header length", "this is no safetensors file, or it is cut off")
    raise _fail("is not a JSON object", file.path, "header", "this is no safetensors file")


def _entry(name: str, value: Any, data: int, path: Path) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _fail("must be an object of dtype, shape and data_offsets", path, name)
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _fail(f"dtype {str(dtype)[:40]!r} is unknown", path, name)
    if not _sizes(shape):
        raise _fail("shape must be a list of whole numbers from 0", path, name)
    if not _sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise _fail("data_offsets must be two whole numbers, the second not smaller", path, name)
    bits = DTYPE_BITS[dtype]
    count = math.prod(shape)
    if count >= 2**63:
        raise _fail("shape has more than 2^63 elements", path, name)
    if (shape[-1] if shape else 1) * bits % 8:
        raise _fail(
            f"a row of {shape[-1] if shape else 1} {dtype} elements is no whole number of bytes", path, name
        )
    nbytes = count * bits // 8
    if span[1] - span[0] != nbytes:
        raise _fail(
            f"shape {shape[:8]} as {dtype} takes {nbytes} bytes but spans {span[1] - span[0]}", path, name
        )
    return Entry(dtype, tuple(shape), data + span[0], nbytes)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
