"""The choice of the memory driver for a device."""

from __future__ import annotations

import torch

from hipfire.base.errors import UnsupportedError
from hipfire.device.vmm import MemoryDriver
from hipfire.device.vmm_cuda import CudaMemory
from hipfire.device.vmm_hip import HipMemory
from hipfire.device.vmm_host import HostMemory


def memory_driver(device: torch.device) -> MemoryDriver:
    """Return the driver of a device; UnsupportedError where memory cannot grow in place."""
    if device.type == "cpu":
        return HostMemory()
    if device.type != "cuda":
        raise UnsupportedError(f"memory on {device} cannot grow in place")
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaMemory(index) if torch.version.hip is None else HipMemory(index)
