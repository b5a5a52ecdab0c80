"""The memory driver of NVIDIA's GPUs, on the driver's own calls.

They run in the device's primary context, which is also torch's. This file knows nothing of arenas.
"""

from __future__ import annotations

from typing import Any

import torch

from hipfire.base.errors import HipfireError, InternalError, MemoryLimitError, UnsupportedError


class CudaMemory:
    """Implements `MemoryDriver` on the GPU of number `index`, usable from any thread.

    `driver` is the module `cuda.bindings.driver`, which is imported if it is not given. UnsupportedError
    where it is missing or the GPU cannot do this.
    """

    def __init__(self, index: int, driver: Any = None) -> None:
        self._driver: Any = driver or _bindings()
        self._index = index
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", index)
        names = self._driver.CUdevice_attribute
        attribute = names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", attribute, device):
            raise UnsupportedError(f"GPU {index} cannot map memory into reserved addresses")
        # held until the process ends, as torch holds it
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        self._properties = self._driver.CUmemAllocationProp()
        self._properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = self._location()
        self._access = self._driver.CUmemAccessDesc()
        self._access.location = self._location()
        self._access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        kind = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity = int(self._within("cuMemGetAllocationGranularity", self._properties, kind))

    @property
    def granularity(self) -> int:
        """The unit that the driver recommends, usually 2 MiB."""
        return self._granularity

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of the device's addresses."""
        return int(self._within("cuMemAddressReserve", nbytes, self._granularity, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back."""
        self._within("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        """Take memory of the device."""
        return int(self._within("cuMemCreate", nbytes, self._properties, 0))

    def release(self, handle: int) -> None:
        """Give memory back."""
        self._within("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Place memory at an address."""
        self._within("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a `map`."""
        self._within("cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write a range."""
        self._within("cuMemSetAccess", address, nbytes, [self._access], 1)

    def synchronize(self) -> None:
        """Wait for everything that the device does."""
        self._within("cuCtxSynchronize")

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a range as uint8 [nbytes]."""
        return device_tensor(address, nbytes, self._index)

    def _location(self) -> Any:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._index
        return location

    def _within(self, name: str, *arguments: Any) -> Any:
        """Call with the device's context as this thread's."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver and return its one result, if it has one."""
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise self._error(name, status, arguments)
        return results[0] if results else None

    def _error(self, name: str, status: Any, arguments: tuple[Any, ...]) -> HipfireError:
        if name == "cuMemCreate" and status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            _, free, _ = self._driver.cuMemGetInfo()
            return MemoryLimitError(arguments[0], int(free), what=f"growing memory on GPU {self._index}")
        return InternalError(f"{name} failed on GPU {self._index}: {getattr(status, 'name', status)}")


class _Range:
    """Bytes at an address, as torch takes them from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_tensor(address: int, nbytes: int, index: int) -> torch.Tensor:
    """Return bytes on a GPU as uint8 [nbytes], on AMD's too; something must be mapped at `address`."""
    return torch.as_tensor(_Range(address, nbytes), device=torch.device("cuda", index))


def _bindings() -> Any:
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - only where there is such a GPU
    except ImportError as error:
        raise UnsupportedError(
            "memory that grows in place needs the package cuda-bindings",
            hint="install it, or choose the legacy backend for the cache",
        ) from error
    return driver
