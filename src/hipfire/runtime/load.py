"""Loading: from a path to a model with its tokenizer, template and caches, or one clear refusal.

Everything that can be refused is refused before memory is taken: the format of the file, the architecture
and its config, the tokenizer against the embedding, the cache mode, and the memory plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hipfire.base.cpu import usable_threads
from hipfire.base.errors import ValidationError
from hipfire.base.types import TextAssets
from hipfire.cache.kv import KvCache, KvMode, kv_mode
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint, open_checkpoint
from hipfire.kernels.cpu.build import compile_kernels, start_engine
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.launch import Launcher
from hipfire.models.family import Model, ModelConfig, ModelFamily
from hipfire.runtime.admission import MemoryPlan, admit, available_memory, fits, plan_memory
from hipfire.runtime.identify import named_checkpoint, read_config, unused_tensors
from hipfire.runtime.runner import PREFILL_CHUNK, Runner
from hipfire.runtime.templates import Templates, load_templates
from hipfire.runtime.weights import CheckpointWeights, Residency, resident_nbytes
from hipfire.text.tokenizer import Tokenizer

# the context that a load takes unless told otherwise, where the model itself allows more
DEFAULT_MAX_SEQ = 32768


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a caller may choose about a load; None and `auto` leave the choice to hipfire."""

    kv_cache: str = "auto"
    max_seq: int | None = None
    slots: int = 1
    residency: Literal["auto", "panels", "decoded", "packed"] = "auto"
    threads: int | None = None
    prefill_chunk: int = PREFILL_CHUNK
    template_file: Path | None = None
    template_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.residency not in ("auto", "panels", "decoded", "packed"):
            raise ValidationError(
                f"residency {self.residency!r} is unknown", hint="use auto, panels, decoded or packed"
            )
        for name in ("slots", "prefill_chunk", "max_seq", "threads"):
            value = getattr(self, name)
            if name in ("max_seq", "threads") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValidationError(f"{name} is {value!r} but must be an integer of at least 1")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Any of `end_ids` ends a turn: those of the tokenizer and those that a template writes.
    `templates` is None for a base model.
    `unknown_tensors` are names in the file that the model has no use for.
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
    residency: Residency
    unknown_tensors: tuple[str, ...]

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
    path: Path, options: LoadOptions | None = None, *, compiling: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Load the model at `path`: an HFQM container, a GGUF file, or a folder of safetensors.

    Raises ArtifactError, UnsupportedError, ValidationError or MemoryLimitError. Whatever the descriptions
    tell is refused before memory is taken; damage inside a tensor shows when its turn comes, and leaves
    nothing behind. Kernels that this machine has not compiled yet are compiled before this returns;
    `compiling` is told how many of how many are done.
    """
    options = options or LoadOptions()
    # packed weights keep their pages mapped after the checkpoint is closed
    with open_checkpoint(path) as checkpoint:
        found = _describe(checkpoint, path, options)
        config, tokenizer, templates = found.config, found.tokenizer, found.templates
        plan, residency = _admit(found, options, available_memory())
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
            cache = KvCache(config.cache_specs(), mode=found.mode, slots=options.slots, max_seq=found.max_seq)
    runner = Runner(model, cache, _launcher(engine), chunk=options.prefill_chunk)
    compile_kernels(runner.kernels(), compiling)
    ends = frozenset[int]()
    if templates is not None:
        ends = tokenizer.turn_end_ids(templates.chat.source) | tokenizer.turn_end_ids(templates.tools.source)
    return LoadedModel(
        path=path,
        family=found.family,
        config=config,
        model=model,
        runner=runner,
        tokenizer=tokenizer,
        templates=templates,
        end_ids=tokenizer.eos_ids | ends,
        assets=found.assets,
        plan=plan,
        residency=residency,
        unknown_tensors=found.unknown_tensors,
    )


def check_load(path: Path, options: LoadOptions | None = None, *, freed: int = 0) -> MemoryPlan:
    """Return what loading a model needs, having refused whatever `load_model` refuses before it takes memory.

    `freed` bytes count as available: those that will be given back before the load. Raises as `load_model`.
    """
    options = options or LoadOptions()
    with open_checkpoint(path) as checkpoint:
        found = _describe(checkpoint, path, options)
        plan, _ = _admit(found, options, available_memory() + freed)
    return plan


@dataclass(frozen=True)
class _Described:
    """What the descriptions in a checkpoint tell, checked against the options."""

    family: ModelFamily
    config: ModelConfig
    named: NamedCheckpoint
    mode: KvMode
    max_seq: int
    assets: TextAssets
    tokenizer: Tokenizer
    templates: Templates | None
    unknown_tensors: tuple[str, ...]


def _describe(checkpoint: Checkpoint, path: Path, options: LoadOptions) -> _Described:
    mode = kv_mode(options.kv_cache)
    family, config = read_config(checkpoint)
    named = named_checkpoint(checkpoint, family, config)
    unknown = unused_tensors(named, config)
    max_seq = _context(options, config)
    assets = checkpoint.text_assets()
    tokenizer = Tokenizer.from_assets(assets, config.sizes.vocab_size)
    templates = load_templates(
        assets,
        tokenizer,
        path,
        override_file=options.template_file,
        user_dir=options.template_dir,
    )
    return _Described(family, config, named, mode, max_seq, assets, tokenizer, templates, tuple(unknown))


def _launcher(engine: CpuEngine | None) -> Launcher:
    return Launcher(engines={} if engine is None else {"numba": engine})


def _context(options: LoadOptions, config: ModelConfig) -> int:
    limit = config.sizes.max_positions
    if options.max_seq is None:
        return min(limit, DEFAULT_MAX_SEQ)
    if not 1 <= options.max_seq <= limit:
        raise ValidationError(
            f"max_seq = {options.max_seq} but this model handles 1 to {limit} tokens",
            hint="lower memory.max_seq or leave it out",
        )
    return options.max_seq


def _admit(found: _Described, options: LoadOptions, available: int) -> tuple[MemoryPlan, Residency]:
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
            chunk=options.prefill_chunk,
            residency=residency,
        )

    if options.residency == "auto":
        residency: Residency = "panels" if fits(plan("panels"), available) else "packed"
    else:
        residency = options.residency
    chosen = plan(residency)
    admit(chosen, available)
    return chosen, residency
