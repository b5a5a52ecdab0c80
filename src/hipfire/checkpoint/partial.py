"""A file that is not complete yet: its bytes so far, what it must become, and the hash on the way.

The bytes lie in `<name>.part`, beside them `<name>.part.json` with the identity of the target, so that a
partial of another revision is never continued. This file does not know networks (fetch.py).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hipfire.base.errors import HipfireError, TransportError

CHUNK = 1 << 20
SPARE_BYTES = 16 << 20
# hashing more than this takes long enough that a user would wonder
LONG_CHECK = 64 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """What a transfer must produce; None where it is not known beforehand. `sha256` is lower-case hex."""

    size: int | None = None
    sha256: str | None = None


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, needed: int) -> None:
    """Raise if the disk of `folder` has fewer than `needed` bytes left, before anything is written."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise TransportError(
            f"not enough disk space in {folder}: {needed >> 20} MiB needed, {free >> 20} MiB free",
            hint="free some space or set HIPFIRE_MODELS_DIR; what was fetched so far is kept",
        )


def write_error(error: OSError, folder: Path) -> HipfireError:
    """Return the typed error for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TransportError(
            f"the disk of {folder} is full",
            hint="free some space and run it again; it continues where it was",
        )
    return TransportError(f"cannot write in {folder}: {error.strerror or error}")


def identity_path(path: Path) -> Path:
    """Return the path of the note that says what a partial file must become."""
    return path.with_name(path.name + ".json")


def remove_partial(path: Path) -> None:
    """Remove a partial or used-up file and its note."""
    path.unlink(missing_ok=True)
    identity_path(path).unlink(missing_ok=True)


class Partial:
    """The growing file. Use as a context manager; bytes written so far survive an error or an interrupt.

    `note` gets a line before the bytes of an earlier call are hashed, if that takes long.
    """

    def __init__(self, path: Path, target: Target, url: str, *, note: Callable[[str], None]) -> None:
        self.path, self.target = path, target
        self._note = note
        self._url = url
        self._side = identity_path(path)
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self.size = 0
        self.etag: str | None = None

    def __enter__(self) -> Partial:
        if not self._reusable():
            self.discard()
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the bytes so far."""
        return self._hash.hexdigest()

    @property
    def complete(self) -> bool:
        """Return whether the bytes are the whole target, as far as its size or its digest is known."""
        if self.target.size is not None:
            return self.size == self.target.size
        return self.size > 0 and self.digest == self.target.sha256

    def identify(self, etag: str | None) -> None:
        """Record which revision of the target the bytes belong to."""
        self.etag = etag
        record = {"url": self._url, "etag": etag, "size": self.target.size, "sha256": self.target.sha256}
        self._side.write_text(json.dumps(record), encoding="utf-8")

    def write(self, chunk: bytes) -> None:
        """Append bytes."""
        if self._file is None:
            raise ValueError("the partial file is not open")
        self._file.write(chunk)
        # what arrived before a kill is on disk and counts at the next start
        self._file.flush()
        self._hash.update(chunk)
        self.size += len(chunk)

    def discard(self) -> None:
        """Throw away the bytes so far and begin again at zero."""
        opened = self._file is not None
        self.__exit__()
        remove_partial(self.path)
        self._hash, self.size, self.etag = hashlib.sha256(), 0, None
        if opened:
            self._open()

    def seal(self) -> None:
        """Flush the complete file to disk. Its identity stays noted, until the file is used or removed."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.__exit__()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        have = self.path.stat().st_size
        if have >= LONG_CHECK:
            self._note(f"checking {have >> 20} MiB already fetched")
        with self.path.open("rb") as existing:
            self._hash = hashlib.sha256()
            while chunk := existing.read(CHUNK):
                self._hash.update(chunk)
            self.size = existing.tell()

    def _reusable(self) -> bool:
        """Return whether the bytes on disk belong to the target and can grow into it."""
        try:
            have = self.path.stat().st_size
            record: Any = json.loads(self._side.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if not isinstance(record, Mapping) or have == 0:
            return False
        if self.target.size is not None and have > self.target.size:
            return False
        if self.target.sha256 is not None:
            return record.get("sha256") == self.target.sha256
        etag = record.get("etag")
        self.etag = etag if isinstance(etag, str) else None
        return self.etag is not None and record.get("url") == self._url
