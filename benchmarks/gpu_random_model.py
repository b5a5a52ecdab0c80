"""Models of real sizes with random weights, made on the device: there is no file, and nothing is downloaded.

Everything else is what a load builds: the plan of its memory, scratch, caches, and decode steps as graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from gpu_bench_kit import Bench, LaunchedAgain, fill_random
from hipfire.base.errors import InternalError
from hipfire.base.qtypes import BLOCKS, QType
from hipfire.base.types import TensorInfo
from hipfire.cache.block import BLOCK_MODES
from hipfire.cache.kv import kv_mode
from hipfire.checkpoint.names import Change, NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint
from hipfire.kernels.experts import PackedExperts
from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine
from hipfire.kernels.packed import PackedMatrix
from hipfire.layers.decoder import EMBEDDING, HEAD
from hipfire.layers.weights import ExpertStack, ExpertTensors
from hipfire.models.family import ModelConfig, family_of
from hipfire.quant.packing import Packing
from hipfire.runtime import gpu_load
from hipfire.runtime.gpu_experts import DeviceExperts
from hipfire.runtime.gpu_load import GpuModel, Request
from hipfire.runtime.gpu_weights import GpuWeights, dense_type, packing_of
from hipfire.runtime.runner import Runner

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# three gated DeltaNet layers, then one of attention
_QWEN3_5 = {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}
_FOUR_LAYERS = ["linear_attention"] * 3 + ["full_attention"]
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3.6-27b": {
        **_QWEN3_5,
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "layer_types": _FOUR_LAYERS * 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.6-35b-a3b": {
        **_QWEN3_5,
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": _FOUR_LAYERS * 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "tiny-hybrid": {
        **_QWEN3_5,
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "tiny": {
        **_QWEN3,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 40,
    },
}
# the matrices of a format, as `hipfire quantize` chooses them; embeddings are Q8 in all
FORMATS: Mapping[str, QType] = {
    "hf4": QType.HFQ4G256,
    "mq4": QType.MQ4G256V2,
    "hf6": QType.HFQ6G256,
    "q8": QType.Q8F16,
}


class NoFile:
    """A checkpoint that describes tensors and has none: what a plan asks for, and no more."""

    kind = "safetensors"
    path = Path("random weights")

    def __init__(self, fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.model_config = fields
        self.tensors = tensors


def _qtype(name: str, shape: Sequence[int], fmt: str) -> QType:
    """Return how a file of a format holds a tensor; vectors and convolutions stay as they are."""
    if len(shape) < 2 or "conv1d" in name:
        return QType.F32
    return QType.Q8F16 if name == EMBEDDING else FORMATS[fmt]


def tensor_infos(config: ModelConfig, fmt: str) -> dict[str, TensorInfo]:
    """Return what a file of a format would hold."""
    infos = {}
    for name, shape in config.tensors().items():
        qtype = _qtype(name, shape, fmt)
        block, numel = BLOCKS[qtype], torch.Size(shape).numel()
        infos[name] = TensorInfo(name, qtype, shape, numel // block.elements * block.nbytes)
    return infos


def _no_bytes(name: str) -> torch.Tensor:
    raise InternalError(f"there is no file that {name} could be read of")


class RandomWeights(GpuWeights):
    """Random weights on the device; `step_nbytes` are those that every decode step reads."""

    step_nbytes = 0
    # weights of matrices by whether they are multiplied with every token of a prompt or with its last
    body = head = 0

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """Return float32 of this shape around one."""
        info, _ = self._find(name, shape)
        return self._taker(info.name)(shape, torch.float32).uniform_(0.9, 1.1)

    def _fill(
        self, packing: Packing, target: PackedMatrix, first: int, info: TensorInfo, change: Change
    ) -> bool:
        rows, cols = info.rows_cols
        fill_random(target, first, rows)
        if info.name == HEAD:
            self.head += rows * cols
        elif info.name != EMBEDDING:
            self.body += rows * cols
        if info.name != EMBEDDING:
            self.step_nbytes += packing.nbytes(rows, cols)
        return True

    def experts(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Return random experts; a decode step reads those that it chooses."""
        stacks = DeviceExperts(self.named, _no_bytes, self._taker, None).stacks(projections)
        fields = self.named.checkpoint.model_config
        for each in stacks:
            packed = cast(PackedExperts, each.stack)
            fill_random(packed.matrix)
            chosen = int(fields["num_experts_per_tok"]) + each.shared
            self.step_nbytes += packed.matrix.nbytes * chosen // packed.experts
            self.body += packed.rows * packed.cols * chosen
        return stacks

    def _dense(self, info: TensorInfo, change: Change) -> torch.Tensor:
        if packing_of(info) is not None:
            raise InternalError(f"{info.name} is packed")
        made = self._taker(info.name)(info.rows_cols, dense_type(info))
        self.step_nbytes += made.nbytes
        return made.uniform_(-0.5, 0.5)


@dataclass
class RandomModel:
    """A loaded random model, its runner and engine.

    `step_nbytes` are the bytes of weights that a decode step reads; `body` and `head` the numbers of weights
    that are multiplied with every token of a prompt, and with its last one.
    """

    loaded: GpuModel
    runner: Runner
    engine: GpuEngine
    config: ModelConfig
    step_nbytes: int
    body: int
    head: int

    def prefill_operations(self, tokens: int) -> int:
        """Return the operations of a prompt's matrix products, without attention."""
        return 2 * (self.body * tokens + self.head)

    def close(self) -> None:
        """Give everything back."""
        self.loaded.close()


@dataclass(frozen=True)
class Wanted:
    """Which model, and what memory it has."""

    shape: str = "qwen3-8b"
    fmt: str = "hf4"
    kv: str = "q8"
    slots: int = 1
    max_seq: int = 1024
    chunk: int = 2048
    arithmetic: Arithmetic = "int8"


def request(wanted: Wanted) -> Request:
    """Return the request that loads such a model from a file."""
    fields = SHAPES[wanted.shape]
    family = family_of(str(fields["model_type"]))
    config = family.from_hf(fields)
    nothing = cast(Checkpoint, NoFile(fields, tensor_infos(config, wanted.fmt)))
    return Request(
        family=family,
        config=config,
        named=NamedCheckpoint(nothing, family.names, config.sizes.layers),
        mode=kv_mode(wanted.kv, BLOCK_MODES),
        max_seq=wanted.max_seq,
        slots=wanted.slots,
        chunk=wanted.chunk,
        kv_backend="auto",
        arithmetic=wanted.arithmetic,
    )


def build_random(bench: Bench, wanted: Wanted, seed: int = 0) -> RandomModel:
    """Build a model as `runtime.gpu_load.build` does, but make weights where it reads a file."""
    torch.manual_seed(seed)
    asked = request(wanted)
    again = LaunchedAgain()
    machine = bench.machine(None if bench.on_gpu else again.capture)
    plan = gpu_load.plan_load(asked, machine)
    with _weights_at_random() as made:
        loaded = gpu_load.build(asked, machine, plan)
    (weights,) = made
    engine = loaded.runner.launcher.engines["triton"]
    assert isinstance(engine, GpuEngine)
    again.engine, again.states = engine, loaded.runner.cache.states
    bench.synchronize()
    return RandomModel(
        loaded, loaded.runner, engine, asked.config, weights.step_nbytes, weights.body, weights.head
    )


@contextmanager
def _weights_at_random() -> Iterator[list[RandomWeights]]:
    """Let loads make their weights instead of reading them; yields those that were made."""
    made: list[RandomWeights] = []

    def make(*arguments: Any, **named: Any) -> RandomWeights:
        made.append(RandomWeights(*arguments, **named))
        return made[-1]

    kept = gpu_load.GpuWeights
    gpu_load.GpuWeights = make  # type: ignore[misc, assignment]
    try:
        yield made
    finally:
        gpu_load.GpuWeights = kept  # type: ignore[misc]
