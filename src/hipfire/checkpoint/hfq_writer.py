"""Writing HFQM containers: checked first, streamed, and the target appears whole or not at all.

Does not know how weights are encoded. Equal arguments give equal bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint import jsontext
from hipfire.checkpoint.hfq_layout import (
    COUNT,
    ENTRY_KIND,
    ENTRY_TAIL,
    HEADER,
    MAGIC,
    NAME_LENGTH,
    VERSION,
    align,
    size_fault,
)

Buffer = bytes | bytearray | memoryview
U32_MAX = 2**32 - 1
_TEMPORARY = re.compile(r"\.hipfire-(\d{1,10})-[0-9a-f]{16}\.tmp")
# a writer in another container or on another machine has a pid that means nothing here, but it keeps writing
STALE_SECONDS = 600.0


def write_hfq(
    path: Path | str,
    arch_id: int,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorInfo],
    payloads: Iterable[Iterable[Buffer]],
) -> None:
    """Write a container of `tensors`, in that order.

    `payloads` yields one iterable of byte chunks per tensor, in the same order; it is advanced only as the
    file grows, so no more than one chunk is held here. The file is written under a temporary name in the
    target's folder, synced and renamed. Such files of processes that were killed are removed first. On any
    exception the temporary file is removed and an older target is untouched.

    Raises:
        ValidationError: the header, index or metadata cannot be stored (nothing is written then), or a
            payload has another size than its `TensorInfo.nbytes`, or there are too few or too many payloads.
        ArtifactError: the folder or the disk refuses the file.
    """
    target = Path(path)
    head = _head(arch_id, metadata, tensors)
    if target.is_dir():
        raise ArtifactError("is a folder", path=target, hint="give the name of a file to write")
    if target.exists() and not target.is_file():
        # the rename at the end would take the place of a device such as /dev/null
        raise ArtifactError("is not a regular file", path=target, hint="give the name of a file to write")
    _remove_stale(target.parent)
    # a short name of its own: the target's name may already have the greatest length that the system allows
    temporary = target.parent / f".hipfire-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        stream = temporary.open("xb")
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from error
    try:
        _put(stream, head, target)
        _put_payloads(stream, tensors, payloads, target)
        _publish(stream, temporary, target)
    except BaseException:
        # on a full disk the flush inside close fails as the write before it did
        with contextlib.suppress(OSError):
            stream.close()
        temporary.unlink(missing_ok=True)
        raise


def _remove_stale(folder: Path) -> None:
    """Remove the temporary files of writers that ended without cleaning up; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            named = _TEMPORARY.fullmatch(path.name)
            if named is not None and not _is_running(int(named[1])):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime >= STALE_SECONDS:
                        path.unlink()


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        # signal 0 is a question on POSIX systems only
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def container_nbytes(arch_id: int, metadata: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> int:
    """Return the exact size in bytes of the file that `write_hfq` would make.

    Raises:
        ValidationError: as `write_hfq`.
    """
    return len(_head(arch_id, metadata, tensors)) + sum(info.nbytes for info in tensors)


def _head(arch_id: int, metadata: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> bytes:
    """Return everything before the first payload, padding included."""
    if not 0 <= arch_id <= U32_MAX:
        raise ValidationError(f"arch_id {arch_id} does not fit in 32 bits")
    if len(tensors) > U32_MAX:
        raise ValidationError(f"{len(tensors)} tensors are more than an index can hold")
    text = jsontext.canonical(metadata, what="metadata")
    from_gguf = metadata.get("source") == "gguf"
    names: set[str] = set()
    parts = [text, COUNT.pack(len(tensors))]
    for info in tensors:
        if info.name in names:
            raise ValidationError(f"two tensors are named {info.name!r}")
        names.add(info.name)
        parts.append(_entry(info, from_gguf=from_gguf))
    body = b"".join(parts)
    end = HEADER.size + len(body)
    header = HEADER.pack(MAGIC, VERSION, arch_id, len(tensors), HEADER.size, align(end))
    return b"".join([header, body, bytes(align(end) - end)])


def _entry(info: TensorInfo, *, from_gguf: bool) -> bytes:
    def refuse(reason: str) -> ValidationError:
        return ValidationError(f"tensor {info.name[:200]!r} cannot be stored: {reason}")

    try:
        name = info.name.encode()
    except UnicodeEncodeError as error:
        raise refuse("its name is not Unicode") from error
    if not 1 <= len(name) <= 0xFFFF:
        raise refuse(f"its name takes {len(name)} bytes, allowed are 1 to 65535")
    if not 0 <= info.qtype <= 0xFF:
        raise refuse(f"qtype {info.qtype} is not one of the container's (0 to 255)")
    if len(info.shape) > 0xFF:
        raise refuse(f"{len(info.shape)} dimensions, allowed are 255")
    if not all(0 <= dim <= U32_MAX for dim in info.shape):
        raise refuse("a dimension does not fit in 32 bits")
    if not 0 <= info.group_size <= U32_MAX:
        raise refuse(f"group size {info.group_size} does not fit in 32 bits")
    if not 0 <= info.nbytes < 2**63:
        raise refuse(f"{info.nbytes} bytes are no possible size")
    fault = size_fault(info, from_gguf=from_gguf)
    if fault:
        raise refuse(fault)
    kind = ENTRY_KIND.pack(info.qtype, len(info.shape))
    dims = b"".join(map(COUNT.pack, info.shape))
    return b"".join(
        [NAME_LENGTH.pack(len(name)), name, kind, dims, ENTRY_TAIL.pack(info.group_size, info.nbytes)]
    )


def _put_payloads(
    stream: BinaryIO, tensors: Sequence[TensorInfo], payloads: Iterable[Iterable[Buffer]], target: Path
) -> None:
    sources = iter(payloads)
    for info in tensors:
        chunks = next(sources, None)
        if chunks is None:
            raise ValidationError(f"no payload for tensor {info.name}")
        written = 0
        for chunk in chunks:
            written += memoryview(chunk).nbytes
            if written > info.nbytes:
                raise ValidationError(f"the payload of {info.name} is longer than its {info.nbytes} bytes")
            _put(stream, chunk, target)
        if written != info.nbytes:
            raise ValidationError(f"the payload of {info.name} has {written} bytes, not {info.nbytes}")
    if next(sources, None) is not None:
        raise ValidationError(f"more payloads than the {len(tensors)} tensors")


def _publish(stream: BinaryIO, temporary: Path, target: Path) -> None:
    """Make the finished file durable, then let it take the target's name."""
    try:
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()
        temporary.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    # the rename is done; a file system that cannot sync a folder does not undo it
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _put(stream: BinaryIO, data: Buffer, target: Path) -> None:
    try:
        stream.write(data)
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: OSError | ValueError) -> ArtifactError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ArtifactError(
        f"cannot be written ({reason})", path=target, hint="check the folder and the free space"
    )
