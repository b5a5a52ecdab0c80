"""A model on a GPU: what it will take, and bringing it there as a whole or not at all.

This file knows no file format and no architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from hipfire.base.errors import MemoryLimitError
from hipfire.cache.block import BlockCache, block_count, block_nbytes
from hipfire.cache.kv import KvMode
from hipfire.cache.states import new_states, state_nbytes
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.device.platform import Gpu, free_memory, keep_kernels
from hipfire.device.pool import Block, Pool, PoolCounters, device_pool
from hipfire.device.scratch import FixedScratch, Plan, plan_nbytes
from hipfire.device.staging import Owner, Staging, release_all
from hipfire.device.vmm import MemoryDriver
from hipfire.device.vmm_drivers import memory_driver
from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine
from hipfire.kernels.gpu.target import TargetName
from hipfire.kernels.launch import Launcher
from hipfire.models.family import Model, ModelConfig, ModelFamily
from hipfire.runtime.admission import MemoryPlan
from hipfire.runtime.describe import Description
from hipfire.runtime.gpu_memory import KvBackend, OwnedCacheMemory, WholeCacheMemory, cache_memory
from hipfire.runtime.gpu_site import GpuSite, plan_scratch
from hipfire.runtime.gpu_upload import Upload
from hipfire.runtime.gpu_weights import GpuWeights, UnprovenError, device_nbytes
from hipfire.runtime.load_options import GPU_PREFILL_CHUNK, LoadOptions
from hipfire.runtime.retained import Capture
from hipfire.runtime.runner import Runner

# behind each result, to show writes that go too far
GUARD_BYTES = 256
# what libraries and the driver take besides, for products of long prompts
LIBRARY_BYTES = 256 << 20
# share of the free memory that a load may take
USABLE = 0.97
# NVIDIA GPUs from this capability on start a launch up while the one before it ends
OVERLAP_CAPABILITY = 90


@dataclass(frozen=True)
class Request:
    """What is to be loaded, checked already."""

    family: ModelFamily
    config: ModelConfig
    named: NamedCheckpoint
    mode: KvMode
    max_seq: int
    slots: int
    chunk: int
    kv_backend: KvBackend
    arithmetic: Arithmetic


@dataclass(frozen=True)
class Machine:
    """The device and what it offers; tests bring their own.

    `overlapped` as `GpuEngine`. `driver` makes what maps memory as it is needed, None where there is no
    such thing. `capture` makes graphs, None for the device's own.
    """

    name: str
    device: torch.device
    target: TargetName
    processors: int
    pool: Pool
    overlapped: bool = False
    driver: Callable[[], MemoryDriver] | None = None
    capture: Capture | None = None


class GpuModel:
    """A model on a GPU with its runner and everything that it holds there: `runtime.load.OnGpu`."""

    def __init__(
        self,
        name: str,
        plan: MemoryPlan,
        runner: Runner,
        pool: Pool,
        caches: OwnedCacheMemory,
        owners: tuple[Owner, ...],
    ) -> None:
        self.name = name
        self.plan = plan
        self.runner = runner
        whole = isinstance(caches, WholeCacheMemory)
        self.kv_backend: Literal["vmm", "legacy"] = "legacy" if whole else "vmm"
        self._pool = pool
        self._caches = caches
        self._owners = owners

    def counters(self) -> PoolCounters:
        """Return what the pool has handed out."""
        return self._pool.counters()

    def held(self) -> int:
        """Return the bytes of device memory that it has now and that `close` gives back."""
        return self._pool.counters().live_bytes + self._caches.total_mapped()

    def close(self) -> None:
        """Give all memory back to the device. The model cannot be used any more."""
        owners, self._owners = self._owners, ()
        if self.runner.replay is not None:
            self.runner.replay.forget()
            # the two hold each other, and the weights: they should go when the last holder does
            self.runner.replay = None
        try:
            release_all(owners)
        finally:
            self._pool.drain()


# told how many bytes of how many have been read
Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class GpuPlan:
    """What a load takes: bytes by purpose, and the slots of its scratch."""

    memory: MemoryPlan
    scratch: Plan


def plan_load(request: Request, machine: Machine) -> GpuPlan:
    """Return what a load will take of the device; nothing is allocated."""
    config = request.config
    nothing = torch.device("meta")
    source = GpuWeights(
        request.named,
        heads=config.sizes.heads,
        kv_heads=config.sizes.kv_heads,
        device=nothing,
        take=lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8, device=nothing),
        upload=None,
    )
    scratch = plan_scratch(
        request.family.build(config, source),
        config,
        request.mode,
        GpuEngine(
            machine.device, machine.target, arithmetic=request.arithmetic, processors=machine.processors
        ),
        slots=request.slots,
        max_seq=request.max_seq,
        chunk=request.chunk,
    )
    stored = [request.named.require(name, shape).info for name, shape in config.tensors().items()]
    caches = request.slots * block_count(request.max_seq) * block_nbytes(config.cache_specs(), request.mode)
    plan = MemoryPlan(
        weights=sum(device_nbytes(info) for info in stored),
        caches=caches,
        states=request.slots * state_nbytes(config.state_specs()),
        scratch=plan_nbytes(scratch, GUARD_BYTES) + LIBRARY_BYTES,
    )
    return GpuPlan(plan, scratch)


def build(request: Request, machine: Machine, plan: GpuPlan, progress: Progress = None) -> GpuModel:
    """Bring a model to the device; if that fails, everything taken until then is given back.

    `progress` is told how many bytes of how many of the file have been read. It is read on trust first, which
    waits for nothing in between; a file with a matrix that cannot be packed is read again, to find which.
    """
    try:
        return _build(request, machine, plan, progress, trusting=True)
    except UnprovenError:
        return _build(request, machine, plan, progress, trusting=False)


def _build(
    request: Request, machine: Machine, plan: GpuPlan, progress: Progress, *, trusting: bool
) -> GpuModel:
    config = request.config
    stored = [request.named.require(name, shape).info for name, shape in config.tensors().items()]
    total, done = sum(info.nbytes for info in stored), 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    with Staging[Owner](machine.pool.take) as staging, torch.inference_mode():

        def take(name: str, nbytes: int) -> torch.Tensor:
            block = staging.take(name, nbytes)
            assert isinstance(block, Block)
            return block.memory

        source = GpuWeights(
            request.named,
            heads=config.sizes.heads,
            kv_heads=config.sizes.kv_heads,
            device=machine.device,
            take=take,
            upload=Upload(machine.device, progress=read),
            trusting=trusting,
        )
        model = request.family.build(config, source)
        source.prove()
        blocks, block_bytes = block_count(request.max_seq), block_nbytes(config.cache_specs(), request.mode)
        memory = cache_memory(
            request.kv_backend, machine.driver, machine.pool.take, request.slots, blocks, block_bytes
        )
        staging.stage("caches", lambda: memory)
        states = new_states(config.state_specs(), request.slots, take)
        cache = BlockCache(
            config.cache_specs(), mode=request.mode, max_seq=request.max_seq, memory=memory, states=states
        )
        scratch = FixedScratch(machine.pool.take, plan.scratch, GUARD_BYTES)
        staging.stage("scratch", lambda: scratch)
        runner = _runner(request, machine, model, cache, scratch)
        owners = staging.publish()
    return GpuModel(machine.name, plan.memory, runner, machine.pool, memory, owners)


def _runner(
    request: Request, machine: Machine, model: Model, cache: BlockCache, scratch: FixedScratch
) -> Runner:
    engine = GpuEngine(
        machine.device,
        machine.target,
        arithmetic=request.arithmetic,
        processors=machine.processors,
        overlapped=machine.overlapped,
        scratch=scratch,
    )
    site = GpuSite(engine, scratch, request.chunk, machine.capture)
    return Runner(
        model, cache, Launcher(engines={"triton": engine}, only="triton"), chunk=request.chunk, site=site
    )


def load_on_gpu(found: Description, options: LoadOptions, gpu: Gpu, progress: Progress = None) -> GpuModel:
    """Bring what was described to a GPU, with decode steps prepared; MemoryLimitError if it does not fit."""
    keep_kernels()
    request, machine = _request(found, options), _machine(gpu)
    plan = plan_load(request, machine)
    _admit(plan.memory, gpu, free_memory(gpu))
    return build(request, machine, plan, progress)


def check_on_gpu(found: Description, options: LoadOptions, gpu: Gpu, freed: int) -> MemoryPlan:
    """Return what a load will take; MemoryLimitError if it does not fit once `freed` bytes are given back."""
    plan = plan_load(_request(found, options), _machine(gpu)).memory
    _admit(plan, gpu, free_memory(gpu) + freed)
    return plan


def _request(found: Description, options: LoadOptions) -> Request:
    return Request(
        family=found.family,
        config=found.config,
        named=found.named,
        mode=found.mode,
        max_seq=found.max_seq,
        slots=options.slots,
        chunk=options.prefill_chunk or GPU_PREFILL_CHUNK,
        kv_backend=options.kv_backend,
        arithmetic=options.activations,
    )


def _machine(gpu: Gpu) -> Machine:
    device = gpu.device
    return Machine(
        gpu.name,
        device,
        gpu.vendor,
        gpu.processors,
        device_pool(device),
        overlapped=gpu.vendor == "cuda" and int(gpu.arch.removeprefix("sm_")) >= OVERLAP_CAPABILITY,
        driver=lambda: memory_driver(device),
    )


def _admit(plan: MemoryPlan, gpu: Gpu, available: int) -> None:
    """Raise MemoryLimitError with both numbers unless the plan leaves the device a margin."""
    usable = int(available * USABLE)
    if plan.total > usable:
        raise MemoryLimitError(
            plan.total,
            usable,
            what=f"this model on {gpu.name} ({plan.weights >> 20} MiB weights, "
            f"{plan.caches >> 20} MiB caches, {plan.states >> 20} MiB states, "
            f"{plan.scratch >> 20} MiB scratch)",
            hint="lower memory.max_seq or the number of slots, use memory.kv_cache=q8 or a smaller format",
        )
