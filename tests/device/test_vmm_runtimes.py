"""The memory drivers of both kinds of GPU, on stand-ins for their runtimes: what is called, and with what."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from vmm_kit import UNIT, FakeCuda, FakeHip, Result, host_tensor, outcome

from hipfire.base.errors import InternalError, MemoryLimitError, UnsupportedError
from hipfire.device import vmm_cuda, vmm_hip
from hipfire.device.vmm import Arena, MemoryDriver
from hipfire.device.vmm_cuda import CudaMemory
from hipfire.device.vmm_hip import HipMemory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs the memory calls of POSIX")


@pytest.fixture(params=["cuda", "hip"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryDriver, Any]:
    """The driver of GPU 3, and the stand-in that it calls."""
    monkeypatch.setattr(vmm_cuda, "device_tensor", host_tensor)
    monkeypatch.setattr(vmm_hip, "device_tensor", host_tensor)
    if request.param == "cuda":
        cuda = FakeCuda()
        return CudaMemory(3, cuda), cuda
    hip = FakeHip()
    return HipMemory(3, hip), hip


def at_rest(runtime: Any) -> bool:
    """Tell whether the thread has the context or the GPU that it had before."""
    return runtime.contexts == [] if isinstance(runtime, FakeCuda) else runtime.current == 1


def test_an_arena_lives_on_either_runtime(pair: tuple[MemoryDriver, Any]) -> None:
    driver, runtime = pair
    assert driver.granularity == UNIT
    arena = Arena(driver, 4 * UNIT, lanes=2)
    for lane in (0, 1, 0):
        arena.grow(UNIT, lane)
    values = torch.randint(0, 256, (2 * UNIT,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    arena.view(2 * UNIT).copy_(values)
    assert torch.equal(arena.whole()[0, : 2 * UNIT], values)
    assert runtime.host.live == (3, 3)
    arena.release()
    assert runtime.host.live == (0, 0)
    assert at_rest(runtime)
    tail = [name.removeprefix("cuMem").removeprefix("cuCtx").lower() for name in runtime.seen[-8:]]
    assert [name.removeprefix("hipdevice").removeprefix("address") for name in tail] == [
        "synchronize", *["unmap", "release"] * 3, "free",
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["map", "allow"])
def test_a_fault_of_the_runtime_is_named_and_undone(pair: tuple[MemoryDriver, Any], call: str) -> None:
    driver, runtime = pair
    arena = Arena(driver, 4 * UNIT)
    arena.grow(UNIT)
    if isinstance(runtime, FakeCuda):
        name = {"map": "cuMemMap", "allow": "cuMemSetAccess"}[call]
        runtime.fail[name] = Result.CUDA_ERROR_UNKNOWN
        text = f"{name} failed on GPU 3: CUDA_ERROR_UNKNOWN"
    else:
        runtime.fail[call] = 719
        name = {"map": "hipMemMap", "allow": "hipMemSetAccess"}[call]
        text = f"{name} failed on GPU 3 with HIP error 719"
    with pytest.raises(InternalError, match=text):
        arena.grow(UNIT)
    assert runtime.host.live == (1, 1)
    assert at_rest(runtime)
    runtime.fail.clear()
    assert arena.grow(UNIT) == 2 * UNIT
    arena.release()
    assert runtime.host.live == (0, 0)


def test_missing_memory_is_an_error_with_both_numbers(pair: tuple[MemoryDriver, Any]) -> None:
    driver, runtime = pair
    arena = Arena(driver, 4 * UNIT)
    runtime.fail["cuMemCreate" if isinstance(runtime, FakeCuda) else "create"] = (
        Result.CUDA_ERROR_OUT_OF_MEMORY
    )
    error = outcome(lambda: arena.grow(2 * UNIT))
    assert isinstance(error, MemoryLimitError)
    assert (error.required, error.available) == (2 * UNIT, 4000)
    assert runtime.host.live == (0, 0)
    assert at_rest(runtime)
    arena.release()


def test_a_gpu_that_cannot_map_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="GPU 3 cannot map memory"):
        CudaMemory(3, FakeCuda(able=0))


def test_a_missing_package_or_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match="needs the package cuda-bindings; install it, or choose"):
        CudaMemory(3)

    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(vmm_hip.ctypes, "CDLL", missing)
    with pytest.raises(
        UnsupportedError, match=r"needs HIP's library libamdhip64.so; install ROCm, or choose"
    ):
        HipMemory(3)
