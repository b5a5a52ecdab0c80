"""Tiny random models with weights in panels, beside the same weights decoded and run by the references."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from cpu_kit import rounded_to_int8

from helpers import MemoryCheckpoint
from hipfire.base.qtypes import QType
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.cache.states import StateStore, state_nbytes
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.launch import Launcher, Op
from hipfire.kernels.linear import LINEAR
from hipfire.layers.context import Segment
from hipfire.models.family import ModelConfig, ModelFamily, families
from hipfire.runtime.runner import Runner
from hipfire.runtime.weights import CheckpointWeights, Residency
from tiny_models import KINDS, ROWS, tiny_model, weights_of

MODELS = tuple(KINDS)
FAMILIES: dict[str, ModelFamily] = {family.oracle: family for family in families().values()}
SLOTS, MAX_SEQ = 5, 200


class RoundingLauncher(Launcher):
    """References only, with the activations of products rounded to int8 as the CPU kernels do."""

    def run(self, op: Op, *args: Any, **kwargs: Any) -> Any:
        if op is LINEAR:
            x, weight = args
            args = (torch.from_numpy(rounded_to_int8(x.float())[2]), weight)
        return super().run(op, *args, **kwargs)


@functools.cache
def tiny(kind: str, qtype: QType) -> tuple[ModelFamily, ModelConfig, MemoryCheckpoint]:
    """A random model, whose matrices are encoded in a format; rows of 256 and 512 columns fit every one."""
    model = tiny_model(kind, intermediate_size=512)
    fields = model.config.to_dict()
    checkpoint = MemoryCheckpoint("safetensors", fields)
    for name, values in weights_of(model).items():
        checkpoint.add(name, values, qtype if values.ndim == 2 else QType.F32)
    family = FAMILIES[KINDS[kind][0]]
    return family, family.from_hf(fields), checkpoint


def tiny_runner(
    kind: str,
    qtype: QType = QType.HFQ4G256,
    *,
    threads: int = 2,
    residency: Residency = "panels",
    mode: str = "bf16",
    chunk: int = 64,
    launcher: Launcher | None = None,
) -> Runner:
    """A runner with a cache full of NaN; without a launcher one that runs on an engine of its own."""
    family, config, checkpoint = tiny(kind, qtype)
    engine = CpuEngine(threads)
    weights = CheckpointWeights(
        NamedCheckpoint(checkpoint, family.names, config.sizes.layers),
        heads=config.sizes.heads,
        kv_heads=config.sizes.kv_heads,
        residency=residency,
        engine=engine,
    )
    with torch.inference_mode():
        model = family.build(config, weights)
        specs = config.state_specs()
        memory = torch.full((SLOTS, state_nbytes(specs)), 255, dtype=torch.uint8)
        states = StateStore(specs, SLOTS, memory) if specs else None
        caches = config.cache_specs()
        cache = KvCache(caches, mode=kv_mode(mode), slots=SLOTS, max_seq=MAX_SEQ, states=states)
        for buffer in (*cache._keys, *cache._values):
            buffer.fill_(float("nan") if buffer.dtype.is_floating_point else 255)
    return Runner(model, cache, launcher or Launcher(engines={"numba": engine}), chunk=chunk)


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (length,), generator=generator).tolist()


def fill(runner: Runner, lengths: Sequence[int]) -> None:
    """Feed each slot a text of its own length."""
    for slot, length in enumerate(lengths):
        runner.prefill(slot, text(length, seed=slot))


def decode(runner: Runner, places: Sequence[tuple[int, int]], tokens: Sequence[int]) -> torch.Tensor:
    """Run one step of single tokens at (slot, position); returns the logits."""
    batch = [(Segment(slot, start, 1), [token]) for (slot, start), token in zip(places, tokens, strict=True)]
    return runner.step(batch)
