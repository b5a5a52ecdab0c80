"""The memory driver of AMD's GPUs, on the calls of HIP's runtime library.

The structures and numbers are those of hip_runtime_api.h. This file knows nothing of arenas.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from pathlib import Path
from typing import Any

import torch

from hipfire.base.errors import HipfireError, InternalError, MemoryLimitError, UnsupportedError
from hipfire.device.vmm_cuda import device_tensor

_PINNED = 1
_DEVICE = 1
_READ_AND_WRITE = 3
_RECOMMENDED = 1
_OUT_OF_MEMORY = 2
_LIBRARY = "libamdhip64.so"


class Location(ctypes.Structure):
    """A device: hipMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """What memory is taken: hipMemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_type", ctypes.c_int),
        ("location", Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
    )


class Access(ctypes.Structure):
    """Who may do what: hipMemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class HipMemory:
    """Implements `MemoryDriver` on the GPU of number `index`, usable from any thread.

    `library` holds HIP's functions; by default it is the copy that torch brings, whose state is the one that
    torch's memory is in. UnsupportedError where there is none.
    """

    def __init__(self, index: int, library: Any = None) -> None:
        self._library: Any = library or _runtime()
        self._index = index
        self._properties = Properties(type=_PINNED, location=Location(_DEVICE, index))
        self._access = Access(Location(_DEVICE, index), _READ_AND_WRITE)
        size = ctypes.c_size_t()
        self._call("hipMemGetAllocationGranularity", byref(size), byref(self._properties), _RECOMMENDED)
        self._granularity = size.value

    @property
    def granularity(self) -> int:
        """The unit that the runtime recommends."""
        return self._granularity

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of the device's addresses."""
        place = ctypes.c_void_p()
        alignment = ctypes.c_size_t(self._granularity)
        flags = ctypes.c_ulonglong(0)
        self._call("hipMemAddressReserve", byref(place), ctypes.c_size_t(nbytes), alignment, None, flags)
        if place.value is None:
            raise InternalError(f"hipMemAddressReserve gave no address on GPU {self._index}")
        return place.value

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back."""
        self._call("hipMemAddressFree", ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

    def create(self, nbytes: int) -> int:
        """Take memory of the device."""
        handle = ctypes.c_void_p()
        size, flags = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
        self._call("hipMemCreate", byref(handle), size, byref(self._properties), flags)
        if handle.value is None:
            raise InternalError(f"hipMemCreate gave no handle on GPU {self._index}")
        return handle.value

    def release(self, handle: int) -> None:
        """Give memory back."""
        self._call("hipMemRelease", ctypes.c_void_p(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Place memory at an address."""
        size, offset = ctypes.c_size_t(nbytes), ctypes.c_size_t(0)
        flags = ctypes.c_ulonglong(0)
        self._call("hipMemMap", ctypes.c_void_p(address), size, offset, ctypes.c_void_p(handle), flags)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a `map`."""
        self._call("hipMemUnmap", ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write a range."""
        size, count = ctypes.c_size_t(nbytes), ctypes.c_size_t(1)
        self._call("hipMemSetAccess", ctypes.c_void_p(address), size, byref(self._access), count)

    def synchronize(self) -> None:
        """Wait for everything that the device does."""
        self._call("hipDeviceSynchronize")

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a range as uint8 [nbytes]."""
        return device_tensor(address, nbytes, self._index)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function with this GPU as the thread's current one."""
        before = ctypes.c_int(0)
        self._check("hipGetDevice", self._library.hipGetDevice(byref(before)))
        self._check("hipSetDevice", self._library.hipSetDevice(self._index))
        try:
            status = int(getattr(self._library, name)(*arguments))
        finally:
            self._check("hipSetDevice", self._library.hipSetDevice(before.value))
        if name == "hipMemCreate" and status == _OUT_OF_MEMORY:
            raise self._out_of_memory(arguments[1].value)
        self._check(name, status)

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise InternalError(f"{name} failed on GPU {self._index} with HIP error {status}")

    def _out_of_memory(self, nbytes: int) -> HipfireError:
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        # best effort: a second failure must not hide the first one
        self._library.hipMemGetInfo(byref(free), byref(total))
        return MemoryLimitError(nbytes, free.value, what=f"growing memory on GPU {self._index}")


def _runtime() -> Any:
    own = Path(torch.__file__).parent / "lib" / _LIBRARY
    for name in (str(own), _LIBRARY, f"{_LIBRARY}.7", f"{_LIBRARY}.6"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedError(
        f"memory that grows in place needs HIP's library {_LIBRARY}",
        hint="install ROCm, or choose the legacy backend for the cache",
    )
