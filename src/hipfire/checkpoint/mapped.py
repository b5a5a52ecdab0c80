"""A file mapped read-only into memory, and views of it that are checked before they are handed out.

Knows files and byte ranges. Does not know tensors, containers or what the bytes mean.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from hipfire.base.errors import ArtifactError, InternalError


def unreadable(path: Path, error: OSError | ValueError) -> ArtifactError:
    """Return the typed error for a path that the system refused to open or look at."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ArtifactError(
            "no such file or folder", path=path, hint="check the path, or pull the model first"
        )
    if isinstance(error, PermissionError):
        return ArtifactError("permission denied", path=path, hint="make the file readable for this user")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ArtifactError(f"cannot be read ({reason})", path=path, hint="check the path and the disk")


def is_folder(path: Path) -> bool:
    """Tell whether `path` is a folder.

    Raises:
        ArtifactError: there is nothing at `path`, or it cannot be looked at.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


class MappedFile:
    """A regular file, mapped read-only; `size` (bytes) and `mtime_ns` are those at the time of opening.

    Reading touches only the pages that are used. A file that changes afterwards is refused at the next
    `view`, because the mapping would then show bytes that no longer belong together.

    Raises:
        ArtifactError: the path is absent, unreadable or not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # a fifo or a device would block or never end, so the kind is known before anything is opened
            if not stat.S_ISREG(path.stat().st_mode):
                raise ArtifactError("not a regular file", path=path, hint="give the model file itself")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        try:
            status = os.fstat(self._fd)
            self.size = status.st_size
            self.mtime_ns = status.st_mtime_ns
            # an empty file cannot be mapped; it is an empty view all the same
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) if self.size else None
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise unreadable(path, error) from error
        self._data: memoryview | None = memoryview(self._map if self._map is not None else b"")

    def view(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset` as a read-only view of the mapping, without a copy.

        Raises:
            ArtifactError: the range leaves the file, or the file changed since it was opened.
        """
        if self._data is None:
            raise InternalError(f"{self.path} was closed before its bytes were used")
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ArtifactError(
                f"{length} bytes wanted but the file ends at byte {self.size}", path=self.path, offset=offset
            )
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ArtifactError(
                f"changed while in use ({self.size} bytes when opened, {status.st_size} now)",
                path=self.path,
                hint="load the model again",
            )
        return self._data[offset : offset + length]

    def release(self, offset: int, length: int) -> None:
        """Let the system drop the whole pages inside the range from memory; they can be read again."""
        if sys.platform == "win32" or self._map is None or self._data is None:
            return
        start = -(-max(offset, 0) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = min(offset + length, self.size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Give the file back. Views handed out before stay valid; their pages go with the last of them."""
        if self._data is None:
            return
        self._data = None
        self._map = None
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
