"""A whole mixture of experts on the GPU path against the references: prefill, decode, batches, replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from gpu_kit import relative_rms
from gpu_model_kit import CHUNK, MAX_SEQ, SLOTS, load, machine

from helpers import MemoryCheckpoint, make_runner
from hipfire.base.errors import UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.cache.block import BLOCK_MODES
from hipfire.cache.kv import kv_mode
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.gpu.engine import Arithmetic
from hipfire.kernels.gpu.experts import PAIR_TOKENS
from hipfire.layers.context import Segment
from hipfire.models.family import family_of
from hipfire.runtime.gpu_load import Request, plan_load
from hipfire.runtime.runner import Runner

FAMILY = family_of("qwen3_5_moe")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 1,
    "num_attention_heads": 2,
}
TEXT = [3, 17, 5, 90, 44]
# float32 in another order, through two layers of random weights
BOUND = 3e-5
# the same with activations of all products in int8 or bfloat16
ROUNDED = 0.12


def checkpoint_of(qtype: QType, routes: QType) -> MemoryCheckpoint:
    """A random model with matrices in a format; routers are sure of what they choose."""
    config = transformers.Qwen3_5MoeTextConfig(**{**FAMILY.tiny, **SIZES})
    torch.manual_seed(3)
    model = transformers.Qwen3_5MoeForCausalLM(config)
    checkpoint = MemoryCheckpoint("safetensors", config.to_dict())
    for name, values in model.state_dict().items():
        scale = 0.8 if "mlp.gate" in name else 0.3 if "norm" in name else 0.1
        values = values + torch.randn_like(values) * scale
        router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        kind = routes if router or values.shape[-1] % 256 else qtype
        plain = values.ndim == 1 or "conv1d" in name
        checkpoint.add(name, values, QType.F32 if plain else kind)
    return checkpoint


def request(
    qtype: QType, routes: QType = QType.Q8F16, *, mode: str = "f32", arithmetic: Arithmetic = "float"
) -> tuple[Request, Runner]:
    """A request to load such a model, and the same model decoded, run by the references."""
    checkpoint = checkpoint_of(qtype, routes)
    config = FAMILY.from_hf(checkpoint.model_config)
    named = NamedCheckpoint(checkpoint, FAMILY.names, config.sizes.layers)
    modes = kv_mode(mode, BLOCK_MODES)
    wanted = Request(FAMILY, config, named, modes, MAX_SEQ, SLOTS, CHUNK, "vmm", arithmetic)
    return wanted, make_runner(FAMILY, config, checkpoint, slots=SLOTS, max_seq=MAX_SEQ)


def test_exact_arithmetic_gives_the_numbers_of_the_references() -> None:
    wanted, right = request(QType.MQ4G256)
    model = load(wanted)
    assert relative_rms(model.runner.prefill(0, TEXT), right.prefill(0, TEXT)) < BOUND
    for position, token in enumerate((8, 9, 10), len(TEXT)):
        # the first step is recorded, the second captured, the third replayed, with experts of its own
        found, wants = model.runner.decode(0, token, position), right.decode(0, token, position)
        assert relative_rms(found, wants) < BOUND
    assert model.runner.replay is not None
    assert model.runner.replay.route().replays == 2
    both = [(Segment(0, len(TEXT) + 3, 1), [4]), (Segment(1, 0, 2), [5, 6])]
    assert relative_rms(model.runner.step(both), right.step(both)) < BOUND
    model.close()


def test_int8_activations_and_q8_caches_stay_close() -> None:
    wanted, right = request(QType.HFQ4G128, mode="q8", arithmetic="int8")
    model = load(wanted)
    # a few tokens, one, and as many as both kinds of kernels take, in memory that was planned for
    start = 0
    for length in (5, 1, PAIR_TOKENS, PAIR_TOKENS + 1):
        step = [(Segment(1, start, length), [(7 * index + length) % 100 for index in range(length)])]
        assert relative_rms(model.runner.step(step), right.step(step)) < ROUNDED
        start += length
    model.close()


def test_experts_of_floats_are_refused_before_memory_is_taken() -> None:
    wanted, _ = request(QType.BF16)
    with pytest.raises(UnsupportedError, match="have no kernels on a GPU"):
        plan_load(wanted, machine())
