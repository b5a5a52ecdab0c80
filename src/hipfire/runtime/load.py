"""Loading: from a path to a model with its tokenizer, template and caches, or one clear refusal.

Everything that can be refused is refused before memory is taken: the format of the file, the architecture
and its config, the tokenizer against the embedding, the device, the cache mode, and the memory plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

import torch

from hipfire.base.cpu import usable_threads
from hipfire.base.types import TextAssets
from hipfire.cache.kv import KvCache
from hipfire.cache.states import new_states
from hipfire.checkpoint.source import open_checkpoint
from hipfire.device.platform import Gpu
from hipfire.device.pool import PoolCounters
from hipfire.kernels.cpu.build import compile_kernels, start_engine
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.launch import Launcher
from hipfire.models.family import Model, ModelConfig, ModelFamily
from hipfire.runtime.admission import MemoryPlan, admit, available_memory, fits, plan_memory
from hipfire.runtime.describe import Description, describe
from hipfire.runtime.devices import choose_gpu, gpu_for
from hipfire.runtime.identify import read_config
from hipfire.runtime.load_options import PREFILL_CHUNK, LoadOptions
from hipfire.runtime.parallel_weights import Shard, planned_shard
from hipfire.runtime.runner import Runner
from hipfire.runtime.shard import whole_config
from hipfire.runtime.templates import Templates
from hipfire.runtime.weights import CheckpointWeights, Residency, resident_nbytes
from hipfire.text.tokenizer import Tokenizer

__all__ = ["LoadOptions", "LoadedModel", "OnGpu", "check_load", "device_of", "load_model"]


class OnGpu(Protocol):
    """A model on a GPU."""

    runner: Runner
    plan: MemoryPlan
    name: str
    kv_backend: Literal["vmm", "legacy"]

    def held(self) -> int:
        """Return the bytes of device memory that it has now and that `close` gives back."""

    def counters(self) -> PoolCounters:
        """Return how many blocks of device memory were taken, and how many are held."""

    def close(self) -> None:
        """Give everything back."""


class Partners(Protocol):
    """Processes that hold parts of a model."""

    def close(self) -> None:
        """End them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Any of `end_ids` ends a turn: those of the tokenizer and those that a template writes.
    `templates` is None for a base model.
    `unknown_tensors` are names in the file that the model has no use for.
    `partners` hold the other parts of a model that is spread over devices; `model` and `plan` are one part.
    """

    path: Path
    family: ModelFamily
    config: ModelConfig
    model: Model
    runner: Runner
    tokenizer: Tokenizer
    templates: Templates | None
    end_ids: frozenset[int]
    assets: TextAssets
    plan: MemoryPlan
    residency: Residency | Literal["device"]
    unknown_tensors: tuple[str, ...]
    on_gpu: OnGpu | None = None
    partners: Partners | None = None

    @property
    def device(self) -> str:
        """Return what computes: `cpu`, or the name of a GPU."""
        return "cpu" if self.on_gpu is None else self.on_gpu.name

    def close(self) -> None:
        """Give memory of GPUs back and end other processes; the model cannot be used any more.

        Nothing happens to a model that is in this process on the CPU.
        """
        try:
            if self.on_gpu is not None:
                self.on_gpu.close()
        finally:
            if self.partners is not None:
                self.partners.close()

    @property
    def kv_backend(self) -> Literal["vmm", "legacy"] | None:
        """Return how a GPU gets memory for keys and values; None on the CPU."""
        return None if self.on_gpu is None else self.on_gpu.kv_backend

    def memory(self) -> dict[str, int]:
        """Return the planned bytes by purpose, and on a GPU, as `held`, those that are taken by now."""
        plan = self.plan
        figures = {"weights": plan.weights, "caches": plan.caches, "scratch": plan.scratch}
        if self.config.state_specs():
            figures["states"] = plan.states
        return figures if self.on_gpu is None else {**figures, "held": self.on_gpu.held()}

    @property
    def threads(self) -> int:
        """Return the number of threads that compute."""
        engine = self.runner.launcher.engines.get("numba")
        return engine.threads if isinstance(engine, CpuEngine) else torch.get_num_threads()

    @property
    def max_seq(self) -> int:
        """Return the longest context of this load in tokens."""
        return self.runner.cache.max_seq


def load_model(
    path: Path,
    options: LoadOptions | None = None,
    *,
    compiling: Callable[[int, int], None] | None = None,
    reading: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load the model at `path`: an HFQM container, a GGUF file, or a folder of safetensors.

    Raises ArtifactError, UnsupportedError, ValidationError or MemoryLimitError. Whatever the descriptions
    tell is refused before memory is taken; damage inside a tensor shows when its turn comes, and leaves
    nothing behind. Kernels that this machine has not compiled yet are compiled before this returns;
    `compiling` is told how many of how many are done. `reading` is told how many bytes of how many have gone
    to a GPU; what it raises ends the load, and nothing stays behind.

    With `tp` other processes are started, which load their parts at the same time.
    """
    options = options or LoadOptions()
    if options.tp == 1:
        return load_shard(path, options, compiling=compiling, reading=reading)
    check_load(path, options)
    gpu = choose_gpu(options)
    with _parallel().start_crew(path, options, None if gpu is None else gpu.index) as crew:
        loaded = load_shard(path, crew.options, crew.shard, compiling=compiling, reading=reading)
        runner: Runner = crew.lead(loaded)
    return replace(loaded, runner=runner, partners=crew)


def load_shard(
    path: Path,
    options: LoadOptions,
    shard: Shard | None = None,
    *,
    compiling: Callable[[int, int], None] | None = None,
    reading: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load into this process, as `load_model`; with `shard` only a part of the model."""
    # packed weights keep their pages mapped after the checkpoint is closed
    with open_checkpoint(path) as checkpoint:
        gpu = gpu_for(read_config(checkpoint)[1], options)
        found = _part(describe(checkpoint, path, options, on_gpu=gpu is not None), shard)
        if gpu is not None:
            on_gpu: OnGpu = _gpu_loading().load_on_gpu(found, options, gpu, reading)
            return _loaded(path, found, on_gpu.runner, on_gpu.plan, "device", on_gpu)
        plan, residency = _admit(found, options, available_memory())
        runner = _on_cpu(found, options, residency)
    compile_kernels(runner.kernels(), compiling)
    return _loaded(path, found, runner, plan, residency)


def check_load(path: Path, options: LoadOptions | None = None, *, freed: int = 0) -> MemoryPlan:
    """Return what loading a model needs, having refused whatever `load_model` refuses before it takes memory.

    `freed` bytes count as available: those that will be given back before the load. Raises as `load_model`.
    """
    options = options or LoadOptions()
    shard = None if options.tp == 1 else planned_shard(options.tp)
    with open_checkpoint(path) as checkpoint:
        gpu = gpu_for(read_config(checkpoint)[1], options)
        found = _part(describe(checkpoint, path, options, on_gpu=gpu is not None), shard)
        if gpu is not None:
            needed: MemoryPlan = _gpu_loading().check_on_gpu(found, options, gpu, freed)
            return needed
        plan, _ = _admit(found, options, available_memory() + freed)
    return plan


def device_of(path: Path, options: LoadOptions) -> Gpu | None:
    """Return the GPU that loading this model takes it to, None for the CPU; raises as `load_model`."""
    with open_checkpoint(path) as checkpoint:
        return gpu_for(read_config(checkpoint)[1], options)


def _part(found: Description, shard: Shard | None) -> Description:
    return found if shard is None else shard.of(found)


def _parallel() -> ModuleType:
    from hipfire.runtime import parallel  # noqa: PLC0415 - torch.distributed is slow to import, or not there

    return parallel


def _gpu_loading() -> ModuleType:
    from hipfire.runtime import gpu_load  # noqa: PLC0415 - imports Triton, which exists where a GPU is

    return gpu_load


def _on_cpu(found: Description, options: LoadOptions, residency: Residency) -> Runner:
    """Bring the model into memory, with a runner on the CPU."""
    config = found.config
    engine = start_engine(options.threads or usable_threads()) if residency == "panels" else None
    weights = CheckpointWeights(
        found.named,
        heads=config.sizes.heads,
        kv_heads=config.sizes.kv_heads,
        residency=residency,
        engine=engine,
    )
    with torch.inference_mode():
        model = found.family.build(config, weights)
        cache = KvCache(
            config.cache_specs(),
            mode=found.mode,
            slots=options.slots,
            max_seq=found.max_seq,
            states=new_states(config.state_specs(), options.slots),
        )
    launcher = Launcher(engines={} if engine is None else {"numba": engine})
    return Runner(model, cache, launcher, chunk=options.prefill_chunk or PREFILL_CHUNK)


def _loaded(
    path: Path,
    found: Description,
    runner: Runner,
    plan: MemoryPlan,
    residency: Residency | Literal["device"],
    on_gpu: OnGpu | None = None,
) -> LoadedModel:
    ends, templates = frozenset[int](), found.templates
    if templates is not None:
        tokenizer = found.tokenizer
        ends = tokenizer.turn_end_ids(templates.chat.source) | tokenizer.turn_end_ids(templates.tools.source)
    return LoadedModel(
        path=path,
        family=found.family,
        config=whole_config(found.config),
        model=runner.model,
        runner=runner,
        tokenizer=found.tokenizer,
        templates=templates,
        end_ids=found.tokenizer.eos_ids | ends,
        assets=found.assets,
        plan=plan,
        residency=residency,
        unknown_tensors=found.unknown_tensors,
        on_gpu=on_gpu,
    )


def _admit(found: Description, options: LoadOptions, available: int) -> tuple[MemoryPlan, Residency]:
    config = found.config
    stored = [found.named.require(name, shape).info for name, shape in config.tensors().items()]

    def plan(residency: Residency) -> MemoryPlan:
        return plan_memory(
            sizes=config.sizes,
            weights=sum(resident_nbytes(info, residency) for info in stored),
            specs=config.cache_specs(),
            mode=found.mode,
            slots=options.slots,
            max_seq=found.max_seq,
            chunk=options.prefill_chunk or PREFILL_CHUNK,
            residency=residency,
            states=config.state_specs(),
        )

    if options.residency == "auto":
        residency: Residency = "panels" if fits(plan("panels"), available) else "packed"
    else:
        residency = options.residency
    chosen = plan(residency)
    admit(chosen, available)
    return chosen, residency
