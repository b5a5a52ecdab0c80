"""The header of one GGUF file: key-value entries and the tensor table, checked against the file.

Does not know split models, tokenizers or model families.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import GGUF_BASE
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.ggml_types import GGML_BLOCKS, RETIRED
from hipfire.checkpoint.gguf_values import MAX_KEY, ValueReader, ValueType
from hipfire.checkpoint.mapped import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
_START = struct.Struct("<4sI")
_SMALLEST_ENTRY = 8 + 1 + 4 + 1  # key length, key, type, value
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8  # name length, name, n_dims, type, offset
_ORDER = "weights of little-endian files only are read"


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file says about itself.

    `keys` are the metadata entries in file order. `tensors` have row-major shapes (the file's dims reversed);
    `offsets` are their first bytes from the start of the file. `end` is the end of the last tensor without
    its padding.
    """

    version: int
    alignment: int
    keys: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]
    end: int


def read_header(file: MappedFile) -> GgufHeader:
    """Return the header of a mapped GGUF file.

    Raises:
        ArtifactError: the file is damaged, cut off or hostile; names entry, field and byte offset.
        UnsupportedError: a big-endian file, another version, or a tensor type without a known block size.
    """
    version = _version(file)
    reader = ValueReader(file.view(0, file.size), file.path, _START.size)
    n_tensors = reader.number(ValueType.UINT64, "tensor_count")
    n_entries = reader.number(ValueType.UINT64, "metadata_kv_count")
    reader.require(n_entries, _SMALLEST_ENTRY, "metadata_kv_count")
    reader.require(n_tensors, _SMALLEST_TENSOR, "tensor_count")
    keys, alignment = _entries(reader, n_entries)
    tensors, offsets, end = _tensors(reader, n_tensors, alignment)
    return GgufHeader(version, alignment, keys, tensors, offsets, end)


def _version(file: MappedFile) -> int:
    if file.size < _START.size:
        raise ArtifactError(f"the file has {file.size} bytes, too few for GGUF", path=file.path, offset=0)
    magic, version = _START.unpack(file.view(0, _START.size))
    if magic == MAGIC[::-1]:
        raise UnsupportedError(f"{file.path} is a big-endian GGUF file (magic reversed)", hint=_ORDER)
    if magic != MAGIC:
        raise ArtifactError(f"magic is {magic!r}, not {MAGIC!r}", path=file.path, field="magic", offset=0)
    if version in VERSIONS:
        return int(version)
    swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        raise UnsupportedError(f"{file.path} is a big-endian file (GGUF version {swapped})", hint=_ORDER)
    raise UnsupportedError(
        f"{file.path} has GGUF version {version}; versions 2 and 3 are read", hint="convert the model again"
    )


def _entries(reader: ValueReader, count: int) -> tuple[dict[str, Any], int]:
    keys: dict[str, Any] = {}
    alignment = DEFAULT_ALIGNMENT
    for index in range(count):
        start = reader.pos
        key = reader.string(f"key of entry {index}", limit=MAX_KEY)
        if not key:
            raise reader.fail("is empty", f"key of entry {index}", start)
        if key in keys:
            raise reader.fail(f"repeats {key[:80]!r}", f"key of entry {index}", start)
        at = reader.pos
        kind, keys[key] = reader.value(f"entry {index} ({key[:80]})")
        if key == ALIGNMENT_KEY:
            if kind is not ValueType.UINT32:
                raise reader.fail(f"has type {kind.name}, not UINT32", ALIGNMENT_KEY, at)
            alignment = keys[key]
            if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
                reason = f"{alignment} is not a power of two from 8 to {MAX_ALIGNMENT}"
                raise reader.fail(reason, ALIGNMENT_KEY, at)
    return keys, alignment


def _tensors(
    reader: ValueReader, count: int, alignment: int
) -> tuple[dict[str, TensorInfo], dict[str, int], int]:
    tensors: dict[str, TensorInfo] = {}
    relative: dict[str, int] = {}
    previous_end = 0
    for index in range(count):
        start = reader.pos
        info, offset = _tensor(reader, index)
        if info.name in tensors:
            raise reader.fail(f"name {info.name[:80]!r} occurs twice", f"tensor {index}", start)
        if offset % alignment:
            reason = f"offset {offset} is not a multiple of the alignment {alignment}"
            raise reader.fail(reason, f"tensor {index} ({info.name[:80]})", start)
        if offset < previous_end:
            reason = f"offset {offset} overlaps the tensor before, which ends at {previous_end}"
            raise reader.fail(reason, f"tensor {index} ({info.name[:80]})", start)
        previous_end = offset + info.nbytes
        tensors[info.name] = info
        relative[info.name] = offset
    data = -(-reader.pos // alignment) * alignment
    size = len(reader.data)
    for name, offset in relative.items():
        if data + offset + tensors[name].nbytes > size:
            hint = "download it again, or join its parts if the file came in raw pieces"
            reason = f"needs bytes up to {data + offset + tensors[name].nbytes} but the file ends at {size}"
            raise reader.fail(reason, f"tensor {name}", data + offset, hint)
    end = data + previous_end if tensors else reader.pos
    return tensors, {name: data + offset for name, offset in relative.items()}, end


def _tensor(reader: ValueReader, index: int) -> tuple[TensorInfo, int]:
    start = reader.pos
    name = reader.string(f"name of tensor {index}", limit=MAX_KEY)
    field = f"tensor {index} ({name[:80]})"
    if not name:
        raise reader.fail("is empty", f"name of tensor {index}", start)
    n_dims = reader.number(ValueType.UINT32, field)
    if n_dims > MAX_DIMS:
        raise reader.fail(f"has {n_dims} dimensions, allowed are {MAX_DIMS}", field, start)
    dims = [reader.number(ValueType.UINT64, field) for _ in range(n_dims)]
    kind = reader.number(ValueType.UINT32, field)
    offset = reader.number(ValueType.UINT64, field)
    if math.prod(dims) >= 2**63:
        raise reader.fail(f"shape {dims} has more than 2^63 elements", field, start)
    block = GGML_BLOCKS.get(kind)
    if block is None:
        known = f"{RETIRED[kind]}, retired" if kind in RETIRED else "unknown"
        raise UnsupportedError(
            f"{reader.path}: {field} has ggml type {kind} ({known})",
            hint="convert the model with a usual type",
        )
    if (dims[0] if dims else 1) % block.elements:
        raise reader.fail(f"rows of {dims[0] if dims else 1} are no whole {block.name} blocks", field, start)
    nbytes = math.prod(dims) // block.elements * block.nbytes
    info = TensorInfo(
        name, GGUF_BASE + kind, tuple(reversed(dims)), nbytes, block.elements if block.elements > 1 else 0
    )
    return info, offset
