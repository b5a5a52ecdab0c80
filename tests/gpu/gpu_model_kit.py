"""Tiny models on the GPU path: on a GPU if there is one, else with interpreted kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_kit import DEVICE, TARGET

from helpers import MemoryCheckpoint
from hipfire.base.qtypes import QType
from hipfire.cache.block import BLOCK_MODES
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.cache.states import StateStore, new_states
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.device.pool import Pool, device_pool
from hipfire.device.vmm_drivers import memory_driver
from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine, GpuTape
from hipfire.models.family import ModelConfig, ModelFamily, families
from hipfire.runtime.gpu_load import GpuModel, Machine, Request, build, plan_load
from hipfire.runtime.gpu_memory import KvBackend
from hipfire.runtime.runner import Runner
from hipfire.runtime.weights import CheckpointWeights
from tiny_models import KINDS, tiny_model, weights_of

FAMILIES: dict[str, ModelFamily] = {family.oracle: family for family in families().values()}
SLOTS, MAX_SEQ, CHUNK = 2, 300, 132


class Again:
    """Stands in for captured graphs where there are none: a replay starts the launches one by one."""

    def __init__(self) -> None:
        self.engine: GpuEngine | None = None
        self.states: StateStore | None = None

    def capture(self, run: Callable[[], object]) -> _Replay:
        assert self.engine is not None
        # the launches of this very run, which the engine is recording
        tape = self.engine._tape
        assert tape is not None
        # a captured step is not carried out; what else it writes here is written again by its first replay
        states = self.states
        kept = [states.snapshot(slot) for slot in range(states.slots)] if states is not None else []
        run()
        for slot, snapshot in enumerate(kept):
            assert states is not None
            states.restore(slot, snapshot)
        return _Replay(tape)


class _Replay:
    def __init__(self, tape: GpuTape) -> None:
        self._tape = tape

    def replay(self) -> None:
        for launch in self._tape.launches:
            launch.run()


def machine(pool: Pool | None = None, graphs: Again | None = None) -> Machine:
    """Return this machine, with graphs that work anywhere."""
    interpreted = TARGET == "plain"
    return Machine(
        "this machine",
        DEVICE,
        TARGET,
        1 if interpreted else torch.cuda.get_device_properties(0).multi_processor_count,
        pool or device_pool(DEVICE),
        overlapped=TARGET == "cuda" and torch.cuda.get_device_capability() >= (9, 0),
        driver=lambda: memory_driver(DEVICE),
        capture=(graphs or Again()).capture if interpreted else None,
    )


def checkpoint_of(kind: str, qtype: QType) -> tuple[ModelFamily, ModelConfig, MemoryCheckpoint]:
    """Return a random model whose matrices are encoded in a format."""
    sizes: dict[str, Any] = {"intermediate_size": 256, "num_hidden_layers": 2}
    if kind == "gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_model(kind, **sizes)
    fields = model.config.to_dict()
    checkpoint = MemoryCheckpoint("safetensors", fields)
    for name, values in weights_of(model).items():
        checkpoint.add(name, values, qtype if values.ndim == 2 else QType.F32)
    family = FAMILIES[KINDS[kind][0]]
    return family, family.from_hf(fields), checkpoint


def request(
    kind: str,
    qtype: QType,
    *,
    mode: str = "f32",
    arithmetic: Arithmetic = "float",
    backend: KvBackend = "vmm",
) -> Request:
    """Return a request to load such a model."""
    family, config, checkpoint = checkpoint_of(kind, qtype)
    named = NamedCheckpoint(checkpoint, family.names, config.sizes.layers)
    modes = kv_mode(mode, BLOCK_MODES)
    return Request(family, config, named, modes, MAX_SEQ, SLOTS, CHUNK, backend, arithmetic)


def load(wanted: Request, pool: Pool | None = None) -> GpuModel:
    """Plan a load and carry it out."""
    graphs = Again()
    on = machine(pool, graphs)
    model = build(wanted, on, plan_load(wanted, on))
    engine = model.runner.launcher.engines["triton"]
    assert isinstance(engine, GpuEngine)
    graphs.engine, graphs.states = engine, model.runner.cache.states
    return model


def reference(wanted: Request) -> Runner:
    """Return the same model decoded, run by the references."""
    config = wanted.config
    weights = CheckpointWeights(
        wanted.named,
        heads=config.sizes.heads,
        kv_heads=config.sizes.kv_heads,
        residency="decoded",
    )
    with torch.inference_mode():
        model = wanted.family.build(config, weights)
        states = new_states(config.state_specs(), SLOTS)
        cache = KvCache(
            config.cache_specs(), mode=kv_mode("f32"), slots=SLOTS, max_seq=MAX_SEQ, states=states
        )
    return Runner(model, cache, chunk=CHUNK)
