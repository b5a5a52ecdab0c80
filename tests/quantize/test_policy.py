"""Which tensor gets which format, for every recipe and every role, and what a plan says before any work."""

from __future__ import annotations

import pytest
import torch

from helpers import MemoryCheckpoint
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.library import FORMAT_SUFFIXES
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.models.family import ModelConfig, family_of
from hipfire.quantize.plan import plan_tensors
from hipfire.quantize.policy import RECIPES, recipe, role
from tiny_models import SHARED

Q = QType
LAYER = "model.layers.3."
MATRICES = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"]
MATRICES += [f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
# recipe: matrices of whole groups of 256, other matrices
MATRIX = {
    "mq4": (Q.MQ4G256V2, Q.HFQ4G128),
    "mq4v1": (Q.MQ4G256, Q.HFQ4G128),
    "hf4": (Q.HFQ4G256, Q.HFQ4G128),
    "mq6": (Q.MQ6G256, Q.Q8F16),
    "mq6v2": (Q.MQ6G256V2, Q.Q8F16),
    "hf6": (Q.HFQ6G256, Q.Q8F16),
    "q8": (Q.Q8F16, Q.Q8F16),
    "f16": (Q.F16, Q.F16),
}
ALIASES = {
    "mq4v2": "mq4", "mq4g256v2": "mq4", "mq4g256": "mq4v1", "magnum": "mq4v1", "hfq4": "hf4",
    "hfq4g256": "hf4", "mq6g256": "mq6", "mq6g256v2": "mq6v2", "hfq6": "hf6", "hfq6g256": "hf6",
    "q8f16": "q8", "fp16": "f16",
}  # fmt: skip
HALF = [
    ("model.norm.weight", (256,)),
    (f"{LAYER}input_layernorm.weight", (256,)),
    (f"{LAYER}self_attn.q_norm.weight", (32,)),
    (f"{LAYER}self_attn.q_proj.bias", (256,)),
    (f"{LAYER}linear_attn.norm.weight", (2, 256)),
    (f"{LAYER}attn.D", (64, 256)),
    (f"{LAYER}linear_attn.conv1d.weight", (512, 1, 4)),
    (f"{LAYER}linear_attn.conv1d.weight", (512, 4)),
    (f"{LAYER}linear_attn.dt_bias", (48,)),
    (f"{LAYER}mlp.tiny.weight", (1, 31)),
    (f"{LAYER}mlp.gate_proj.weight", (30, 1)),
]


def test_the_table_covers_every_recipe() -> None:
    assert {candidate.name for candidate in RECIPES} == set(MATRIX)
    # the library finds quantized files by these suffixes
    assert tuple(candidate.name for candidate in RECIPES) == FORMAT_SUFFIXES
    assert {alias: candidate.name for candidate in RECIPES for alias in candidate.aliases} == ALIASES


@pytest.mark.parametrize("fmt", MATRIX)
def test_every_role_of_every_recipe(fmt: str) -> None:
    chosen = recipe(fmt)
    whole, ragged = MATRIX[fmt]
    for name in [*MATRICES, "lm_head.weight"]:
        for cols in (256, 512, 11008):
            assert chosen.qtype(name, (32, cols)) == whole, name
        for cols in (32, 128, 255, 257, 704, 2112, 4304, 10944):
            assert chosen.qtype(name, (32, cols)) == ragged, name
    for cols in (256, 704):
        embedding = chosen.qtype("model.embed_tokens.weight", (1000, cols))
        assert embedding == (Q.F16 if fmt == "f16" else Q.Q8F16)
    for name, shape in HALF:
        assert chosen.qtype(name, shape) == Q.F16, name
    for name in ("rope_freqs.weight", f"{LAYER}linear_attn.A_log"):
        assert chosen.qtype(name, (64,)) == Q.F32


MIXED = [
    *(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{LAYER}linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    f"{LAYER}linear_attn.out_proj.weight",
    "lm_head.weight",
]
EXPERTS = [f"{LAYER}mlp.experts.17.{part}_proj.weight" for part in ("gate_up", "down")]
EXPERTS += [f"{LAYER}mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")]


@pytest.mark.parametrize("fmt", MATRIX)
def test_a_mixture_of_experts_keeps_all_but_its_experts_at_eight_bits(fmt: str) -> None:
    chosen = recipe(fmt)
    eight = Q.F16 if fmt == "f16" else Q.Q8F16
    for cols in (256, 128):
        base = MATRIX[fmt][cols != 256]
        for name in MIXED:
            assert chosen.qtype(name, (64, cols), mixture=True) == eight, name
            assert chosen.qtype(name, (64, cols)) == base, name
        for name in EXPERTS:
            assert chosen.qtype(name, (64, cols), mixture=True) == base, name
        for name in (f"{LAYER}mlp.gate.weight", f"{LAYER}mlp.shared_expert_gate.weight"):
            # whatever the model is: a choice among experts hangs on small differences
            assert chosen.qtype(name, (8, cols), mixture=True) == eight, name
            assert chosen.qtype(name, (8, cols)) == eight, name
    for name, shape in HALF:
        assert chosen.qtype(name, shape, mixture=True) == Q.F16, name


@pytest.mark.parametrize(("elements", "expected"), [(31, "small"), (32, "matrix"), (33, "matrix")])
def test_the_smallest_matrix(elements: int, expected: str) -> None:
    assert role("model.layers.0.mlp.up_proj.weight", (1, elements)) == expected


@pytest.mark.parametrize("alias", [*ALIASES, "MQ4", "Hf4", "FP16"])
def test_aliases_and_capitals(alias: str) -> None:
    assert recipe(alias).name == ALIASES.get(alias.lower(), alias.lower())


@pytest.mark.parametrize(
    ("name", "part"),
    [("mq44", "did you mean mq4?"), ("q4", "did you mean"), ("f17", "did you mean f16?"),
     ("zzz", "use one of mq4, mq4v1, hf4, mq6, mq6v2, hf6, q8, f16"), ("", "use one of")],
)  # fmt: skip
def test_unknown_format_says_what_there_is(name: str, part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(name)
    assert repr(name) in caught.value.message
    assert part in caught.value.hint


def llama_plan_source(intermediate: int) -> tuple[NamedCheckpoint, ModelConfig]:
    family = family_of("llama")
    fields = {**SHARED, "intermediate_size": intermediate, "model_type": "llama"}
    config = family.from_hf(fields)
    checkpoint = MemoryCheckpoint("safetensors", fields)
    for name, shape in config.tensors().items():
        checkpoint.add(name, torch.zeros(shape))
    return NamedCheckpoint(checkpoint, family.names, config.sizes.layers), config


@pytest.mark.parametrize("intermediate", [256, 257, 128, 129, 255, 33, 704])
@pytest.mark.parametrize("fmt", ["mq4", "hf4", "mq6", "q8"])
def test_a_plan_names_shape_and_fallback_of_every_tensor(intermediate: int, fmt: str) -> None:
    named, config = llama_plan_source(intermediate)
    plan = {planned.info.name: planned.info for planned in plan_tensors(named, config, recipe(fmt))}
    assert list(plan) == sorted(config.tensors())
    whole, ragged = MATRIX[fmt]
    groups = {Q.MQ4G256V2: (256, 136), Q.HFQ4G256: (256, 136), Q.MQ6G256: (256, 200), Q.HFQ4G128: (128, 72),
              Q.Q8F16: (32, 34)}  # fmt: skip
    for name, info in plan.items():
        assert info.shape == config.tensors()[name]
        if "down_proj" in name:
            assert info.qtype == (whole if intermediate % 256 == 0 else ragged)
            elements, nbytes = groups[QType(info.qtype)]
            assert info.nbytes == 256 * -(-intermediate // elements) * nbytes
            assert info.group_size == elements
        elif "norm" in name:
            assert (info.qtype, info.nbytes, info.group_size) == (Q.F16, 512, 0)


def test_a_plan_touches_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    named, config = llama_plan_source(704)

    def touched(self: MemoryCheckpoint, name: str) -> memoryview:
        raise HipfireError(f"{name} was read")

    monkeypatch.setattr(MemoryCheckpoint, "raw", touched)
    assert len(plan_tensors(named, config, recipe("mq4"))) == len(config.tensors())
