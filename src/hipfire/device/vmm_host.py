"""The memory driver of the CPU: anonymous pages that nobody may touch until they are mapped.

It behaves as those of GPUs do, down to their order of calls, so everything that is built on arenas works and
can be tested without a GPU. Physical memory comes from the system page by page when it is first written.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cached_property
from typing import Any

import torch

from hipfire.base.errors import HipfireError, InternalError, MemoryLimitError, UnsupportedError
from hipfire.device.pool import free_host_memory

_NONE = 0
# the same on Linux and macOS; the module mmap does not have it
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class HostMemory:
    """Implements `MemoryDriver` on the process's own address space.

    `granularity` is in bytes and a multiple of the system's page. UnsupportedError on systems without POSIX
    memory calls.
    """

    def __init__(self, granularity: int = 2 << 20) -> None:
        if os.name != "posix":
            raise UnsupportedError("memory that grows in place needs the memory calls of POSIX")
        if granularity <= 0 or granularity % mmap.PAGESIZE:
            raise InternalError(f"a granularity of {granularity} bytes is no multiple of a page")
        self.granularity = granularity
        self._next = 1
        self._handles: dict[int, int] = {}
        self._mapped: dict[int, int] = {}

    @property
    def live(self) -> tuple[int, int]:
        """How many handles have not been released, and how many are mapped."""
        return len(self._handles), len(self._mapped)

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses."""
        return self._pages(None, nbytes, 0)

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back."""
        if any(address <= place < address + nbytes for place in self._mapped):
            raise InternalError("a range was freed in which memory is mapped")
        self._check(self._libc.munmap(address, nbytes), "munmap", nbytes)

    def create(self, nbytes: int) -> int:
        """Return a new handle; the system gives the memory when it is written."""
        handle, self._next = self._next, self._next + 1
        self._handles[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        """Forget a handle."""
        if self._handles.pop(handle, None) is None:
            raise InternalError(f"memory {handle} was released twice")

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Note where memory goes."""
        if self._handles.get(handle) != nbytes or address in self._mapped:
            raise InternalError(f"memory {handle} cannot be mapped as {nbytes} bytes at {address:#x}")
        self._mapped[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        """Replace pages by ones that nobody may touch; what was in them is gone."""
        if self._mapped.get(address) != nbytes:
            raise InternalError(f"no {nbytes} bytes are mapped at {address:#x}")
        self._pages(address, nbytes, _MAP_FIXED)
        del self._mapped[address]

    def allow(self, address: int, nbytes: int) -> None:
        """Let a range be read and written."""
        end = address
        while end in self._mapped and end < address + nbytes:
            end += self._mapped[end]
        if end != address + nbytes:
            raise InternalError(f"{nbytes} bytes at {address:#x} are not all mapped")
        self._check(
            self._libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE), "mprotect", nbytes
        )

    def synchronize(self) -> None:
        """Nothing runs behind the process's back."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a range as uint8 [nbytes]."""
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    @cached_property
    def _libc(self) -> Any:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
        )
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return libc

    def _pages(self, address: int | None, nbytes: int, flags: int) -> int:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        place: int | None = self._libc.mmap(address, nbytes, _NONE, flags, -1, 0)
        if place is None or place == _FAILED:
            raise _error("mmap", nbytes)
        return place

    @staticmethod
    def _check(result: int, call: str, nbytes: int) -> None:
        if result != 0:
            raise _error(call, nbytes)


def _error(call: str, nbytes: int) -> HipfireError:
    number = ctypes.get_errno()
    # what a limit of the process and missing memory both give
    if number == errno.ENOMEM:
        return MemoryLimitError(nbytes, free_host_memory(), what="a range of host memory")
    return InternalError(f"{call} of {nbytes} bytes failed: {os.strerror(number)}")
