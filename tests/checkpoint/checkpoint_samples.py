"""Hand-assembled model files for the checkpoint tests, and the measures that every reader must keep.

The bytes come from struct.pack alone, so that a fault of a writer cannot hide a fault of a reader.
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from hipfire.base.errors import ArtifactError, HipfireError
from hipfire.checkpoint.source import Checkpoint


class Stored(NamedTuple):
    """A tensor as an HFQM index entry and its payload."""

    name: bytes
    qtype: int
    shape: tuple[int, ...]
    data: bytes
    group: int = 0


def hfq_bytes(metadata: bytes, tensors: Sequence[Stored], *, arch_id: int = 0, version: int = 1) -> bytes:
    """Return a whole HFQM container."""
    index = struct.pack("<I", len(tensors))
    for item in tensors:
        index += struct.pack("<H", len(item.name)) + item.name
        index += struct.pack("<BB", item.qtype, len(item.shape)) + struct.pack(
            f"<{len(item.shape)}I", *item.shape
        )
        index += struct.pack("<IQ", item.group, len(item.data))
    data_offset = (32 + len(metadata) + len(index) + 4095) // 4096 * 4096
    header = b"HFQM" + struct.pack("<IIIQQ", version, arch_id, len(tensors), 32, data_offset)
    head = header + metadata + index
    return head.ljust(data_offset, b"\0") + b"".join(item.data for item in tensors)


def text(value: str | bytes) -> bytes:
    """Return a GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(kind: int, code: str, value: object) -> bytes:
    """Return a GGUF scalar value with its type id."""
    return struct.pack("<I", kind) + struct.pack(f"<{code}", value)


def u32(value: int) -> bytes:
    return typed(4, "I", value)


def u16(value: int) -> bytes:
    return typed(2, "H", value)


def string(value: str) -> bytes:
    return struct.pack("<I", 8) + text(value)


def array(kind: int, items: Sequence[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)


class Ggml(NamedTuple):
    """A tensor of a GGUF file; `dims` as in the file."""

    name: str
    dims: tuple[int, ...]
    kind: int
    data: bytes


def gguf_bytes(
    entries: Sequence[tuple[str | bytes, bytes]],
    tensors: Sequence[Ggml] = (),
    *,
    alignment: int = 32,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """Return a whole GGUF file; `counts` and `offsets` let the header lie."""
    n_tensors, n_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries)
    head += b"".join(text(key) + value for key, value in entries)
    body = b""
    for number, item in enumerate(tensors):
        body += bytes(-len(body) % alignment)
        offset = len(body) if offsets is None else offsets[number]
        head += text(item.name) + struct.pack(f"<I{len(item.dims)}Q", len(item.dims), *item.dims)
        head += struct.pack("<IQ", item.kind, offset)
        body += item.data
    return head + bytes(-len(head) % alignment) + body + bytes(-len(body) % alignment)


def safetensors_bytes(header: dict[str, object] | bytes, data: bytes = b"") -> bytes:
    """Return a whole safetensors file."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """Return a tensor's value in a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@contextmanager
def bounded(*, seconds: float, nbytes: int) -> Iterator[None]:
    """Fail if the block takes more processor time, or allocates more at its peak."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
    finally:
        spent = time.process_time() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert spent < seconds
    assert peak < nbytes


def refusal(read: Callable[[], None]) -> HipfireError | None:
    """Return the typed error that `read` ends with, or None. Any other exception passes through."""
    try:
        read()
    except HipfireError as error:
        return error
    return None


def require_consistent(checkpoint: Checkpoint, size: int) -> None:
    """Check that every tensor of an opened file of `size` bytes has its bytes inside the file."""
    total = 0
    for name, info in checkpoint.tensors.items():
        view = checkpoint.raw(name)
        assert view.readonly
        assert view.nbytes == info.nbytes <= size
        total += sum(view[:1]) + sum(view[-1:])
        checkpoint.release(name)
    assert total >= 0


def require_fuzz(
    path: Path,
    cases: Sequence[bytes],
    read: Callable[[], None],
    *,
    kinds: type[HipfireError] | UnionType = ArtifactError,
    seconds: float = 120,
) -> None:
    """Write each case to `path` and `read` it: it opens, or is refused by an error that names the file.

    Flips inside names or unknown fields stay readable, most damage does not.
    """
    refused = 0
    with bounded(seconds=seconds, nbytes=3 * 2**20):
        for raw in cases:
            path.unlink(missing_ok=True)
            path.write_bytes(raw)
            error = refusal(read)
            if error is not None:
                refused += 1
                assert isinstance(error, kinds)
                assert str(path) in error.line()
    assert len(cases) // 2 < refused < len(cases)
