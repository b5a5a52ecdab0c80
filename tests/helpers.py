"""What several test folders share: checkpoints in memory, tiny oracle models, relative RMS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hipfire.base.qtypes import QType
from hipfire.base.types import TensorInfo, TextAssets
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.cache.states import StateStore, state_nbytes
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.launch import Launcher
from hipfire.models.family import ModelConfig, ModelFamily
from hipfire.quant.registry import format_of
from hipfire.runtime.runner import Runner
from hipfire.runtime.weights import CheckpointWeights, Residency


def rms(test: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative RMS difference in float64."""
    difference = (test.double() - reference.double()).square().mean().sqrt()
    return float(difference / reference.double().square().mean().sqrt())


class MemoryCheckpoint:
    """A checkpoint made of bytes in memory; `kind` decides how names are read."""

    path = Path("memory")

    def __init__(self, kind: str = "safetensors", model_config: Mapping[str, Any] | None = None) -> None:
        self.kind = kind
        self.model_config: Mapping[str, Any] = model_config or {}
        self.tensors: dict[str, TensorInfo] = {}
        self._bytes: dict[str, bytes] = {}
        self.released: list[tuple[str, int | None]] = []

    def add(self, name: str, values: torch.Tensor, qtype: int = QType.F32) -> None:
        """Store a tensor, encoded in the given format."""
        matrix = values.detach().float().reshape(-1, values.shape[-1])
        encode = format_of(qtype).encode
        assert encode is not None
        self.add_raw(name, qtype, tuple(values.shape), encode(matrix).numpy().tobytes())

    def add_raw(self, name: str, qtype: int, shape: tuple[int, ...], data: bytes) -> None:
        """Store a tensor's bytes as they are."""
        self.tensors[name] = TensorInfo(name, qtype, shape, len(data))
        self._bytes[name] = data

    def raw(self, name: str) -> memoryview:
        return memoryview(self._bytes[name])

    def release(self, name: str, nbytes: int | None = None) -> None:
        self.released.append((name, nbytes))

    def text_assets(self) -> TextAssets:
        return TextAssets()

    def close(self) -> None:
        self._bytes.clear()

    def __enter__(self) -> MemoryCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def make_runner(
    family: ModelFamily,
    config: ModelConfig,
    checkpoint: MemoryCheckpoint,
    *,
    mode: str = "f32",
    slots: int = 1,
    max_seq: int = 128,
    chunk: int = 256,
    residency: Residency = "decoded",
    launcher: Launcher | None = None,
) -> Runner:
    """Build a model and its cache; the cache starts full of NaN (or of 0xFF bytes), so reading rows or
    states that nobody wrote shows."""
    named = NamedCheckpoint(checkpoint, family.names, config.sizes.layers)
    weights = CheckpointWeights(
        named, heads=config.sizes.heads, kv_heads=config.sizes.kv_heads, residency=residency
    )
    with torch.inference_mode():
        model = family.build(config, weights)
        specs = config.state_specs()
        memory = torch.full((slots, state_nbytes(specs)), 255, dtype=torch.uint8)
        states = StateStore(specs, slots, memory) if specs else None
        cache = KvCache(config.cache_specs(), mode=kv_mode(mode), slots=slots, max_seq=max_seq, states=states)
        for buffer in (*cache._keys, *cache._values):
            buffer.fill_(float("nan") if buffer.dtype.is_floating_point else 255)
    return Runner(model, cache, launcher, chunk=chunk)
