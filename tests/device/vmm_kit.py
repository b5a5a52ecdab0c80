"""Stand-ins for the two GPU runtimes, for tests of growing memory.

Both work on real memory of the process, through the driver of the CPU.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hipfire.device.vmm_hip import Access, Properties
from hipfire.device.vmm_host import HostMemory

UNIT = mmap.PAGESIZE


def outcome(action: Callable[[], object]) -> Exception | None:
    """Return the error that an action ends with."""
    try:
        action()
    except Exception as error:
        return error
    return None


class Result(enum.IntEnum):
    """Some results of CUDA's driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_UNKNOWN = 999


class FakeCuda:
    """The part of `cuda.bindings.driver` that hipfire uses, for a machine with four GPUs."""

    CUresult = Result
    CUmemAllocationProp = CUmemAccessDesc = CUmemLocation = SimpleNamespace
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="mapping")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")

    def __init__(self, able: int = 1) -> None:
        self.host = HostMemory(UNIT)
        self.able = able
        self.contexts: list[str] = []
        self.fail: dict[str, Result] = {}
        self.seen: list[str] = []

    def done(self, name: str, action: Callable[[], object], needs_context: bool = True) -> tuple[Any, ...]:
        """Do one call: its result, then what it returns."""
        self.seen.append(name)
        if needs_context and self.contexts != ["context of 3"]:
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        if name in self.fail:
            return (self.fail[name],)
        value = action()
        return (Result.CUDA_SUCCESS,) if value is None else (Result.CUDA_SUCCESS, value)

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuInit", lambda: None, needs_context=False)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuDeviceGet", lambda: f"device {index}", needs_context=False)

    def cuDeviceGetAttribute(self, attribute: str, device: str) -> tuple[Any, ...]:  # noqa: N802
        assert (attribute, device) == ("mapping", "device 3")
        return self.done("cuDeviceGetAttribute", lambda: self.able, needs_context=False)

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuDevicePrimaryCtxRetain", lambda: "context of 3", needs_context=False)

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:  # noqa: N802
        self.contexts.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return (Result.CUDA_SUCCESS, self.contexts.pop())

    def cuCtxSynchronize(self) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuCtxSynchronize", self.host.synchronize)

    def cuMemGetInfo(self) -> tuple[Any, ...]:  # noqa: N802
        return (*self.done("cuMemGetInfo", lambda: None), 4000, 9000)

    def cuMemGetAllocationGranularity(self, properties: Any, kind: str) -> tuple[Any, ...]:  # noqa: N802
        assert (properties.location.id, kind) == (3, "recommended")
        return self.done("cuMemGetAllocationGranularity", lambda: UNIT)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, at: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert (alignment, at, flags) == (UNIT, 0, 0)
        return self.done("cuMemAddressReserve", lambda: self.host.reserve(nbytes))

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuMemAddressFree", lambda: self.host.free(address, nbytes))

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        where = properties.location
        assert (properties.type, where.type, where.id, flags) == ("pinned", "device", 3, 0)
        return self.done("cuMemCreate", lambda: self.host.create(nbytes))

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuMemRelease", lambda: self.host.release(handle))

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert (offset, flags) == (0, 0)
        return self.done("cuMemMap", lambda: self.host.map(address, nbytes, handle))

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        return self.done("cuMemUnmap", lambda: self.host.unmap(address, nbytes))

    def cuMemSetAccess(self, address: int, nbytes: int, who: list[Any], count: int) -> tuple[Any, ...]:  # noqa: N802
        (access,) = who
        location = access.location
        assert (location.type, location.id, access.flags, count) == ("device", 3, "read and write", 1)
        return self.done("cuMemSetAccess", lambda: self.host.allow(address, nbytes))


class FakeHip:
    """The functions of HIP's library that hipfire uses, as ctypes calls them; the current GPU is number 1."""

    def __init__(self) -> None:
        self.host = HostMemory(UNIT)
        self.current = 1
        self.fail: dict[str, int] = {}
        self.seen: list[str] = []

    def done(self, name: str, action: Callable[[], object]) -> int:
        self.seen.append(name)
        if self.current != 3:
            return 101
        if name in self.fail:
            return self.fail[name]
        action()
        return 0

    def hipGetDevice(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self.current
        return 0

    def hipSetDevice(self, index: int) -> int:  # noqa: N802
        self.current = index
        return 0

    def hipDeviceSynchronize(self) -> int:  # noqa: N802
        return self.done("hipDeviceSynchronize", self.host.synchronize)

    def hipMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = 4000, 9000
        return 0

    def hipMemGetAllocationGranularity(self, out: Any, properties: Any, kind: int) -> int:  # noqa: N802
        assert kind == 1
        return self.done("granularity", lambda: setattr(out._obj, "value", UNIT))

    def hipMemAddressReserve(self, out: Any, nbytes: Any, alignment: Any, at: None, flags: Any) -> int:  # noqa: N802
        assert (alignment.value, at, flags.value) == (UNIT, None, 0)
        return self.done("reserve", lambda: setattr(out._obj, "value", self.host.reserve(nbytes.value)))

    def hipMemAddressFree(self, address: Any, nbytes: Any) -> int:  # noqa: N802
        return self.done("free", lambda: self.host.free(address.value, nbytes.value))

    def hipMemCreate(self, out: Any, nbytes: Any, properties: Any, flags: Any) -> int:  # noqa: N802
        given: Properties = properties._obj
        assert (given.type, given.requested_handle_type, flags.value) == (1, 0, 0)
        assert (given.location.type, given.location.id, ctypes.sizeof(given)) == (1, 3, 32)
        return self.done("create", lambda: setattr(out._obj, "value", self.host.create(nbytes.value)))

    def hipMemRelease(self, handle: Any) -> int:  # noqa: N802
        return self.done("release", lambda: self.host.release(handle.value))

    def hipMemMap(self, address: Any, nbytes: Any, offset: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        assert (offset.value, flags.value) == (0, 0)
        return self.done("map", lambda: self.host.map(address.value, nbytes.value, handle.value))

    def hipMemUnmap(self, address: Any, nbytes: Any) -> int:  # noqa: N802
        return self.done("unmap", lambda: self.host.unmap(address.value, nbytes.value))

    def hipMemSetAccess(self, address: Any, nbytes: Any, access: Any, count: Any) -> int:  # noqa: N802
        given: Access = access._obj
        assert (given.location.type, given.location.id, given.flags, count.value) == (1, 3, 3, 1)
        return self.done("allow", lambda: self.host.allow(address.value, nbytes.value))


def host_tensor(address: int, nbytes: int, index: int) -> torch.Tensor:
    """Stand for a tensor on the GPU of number 3."""
    assert index == 3
    return HostMemory(UNIT).tensor(address, nbytes)
