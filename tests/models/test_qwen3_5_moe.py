"""The mixture of experts as a whole: weight formats, files in GGUF, recorded steps, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from helpers import MemoryCheckpoint, make_runner, rms
from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.fwht import inverse_fwht256
from hipfire.kernels.launch import Launcher
from hipfire.layers.context import Segment
from hipfire.models.family import family_of, family_of_gguf
from hipfire.models.fields import GgufFields
from hipfire.quant.registry import format_of
from hipfire.runtime.weights import CheckpointWeights

FAMILY = family_of("qwen3_5_moe")
# rows of rotated formats need 256 columns
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
TOKENS = [5, 77, 12, 0, 96, 31, 31, 8, 64, 2, 101, 40, 17]
EXPERTS = ("mlp.experts.", "mlp.shared_expert.")


def oracle(**change: Any) -> Any:
    config = transformers.Qwen3_5MoeTextConfig(**{**FAMILY.tiny, **change})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.Qwen3_5MoeForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # experts that are chosen by far, so that rounding chooses no others
            scale = 0.8 if "mlp.gate" in name else 0.3 if "norm" in name else 0.1
            parameter += torch.randn_like(parameter) * scale
    return model


def stored(model: Any, qtype: QType = QType.F32) -> MemoryCheckpoint:
    """The model as a checkpoint with its experts in a format; they become what the stored ones decode to."""
    checkpoint = MemoryCheckpoint("safetensors", model.config.to_dict())
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if not any(part in name for part in EXPERTS):
                checkpoint.add(name, values)
                continue
            checkpoint.add(name, values, qtype)
            info, fmt = checkpoint.tensors[name], format_of(qtype)
            data = torch.frombuffer(bytearray(checkpoint.raw(name)), dtype=torch.uint8)
            decoded = fmt.decode(data, *info.rows_cols)
            values.copy_((inverse_fwht256(decoded) if fmt.rotated else decoded).view(values.shape))
    return checkpoint


def logits(model: Any, tokens: list[int] = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def runner_of(
    model: Any, checkpoint: MemoryCheckpoint, residency: Any, monkeypatch: Any, **change: Any
) -> Any:
    """A runner; weights in panels are run by compiled kernels."""
    config, launcher = FAMILY.from_hf(model.config.to_dict()), None
    if residency == "panels":
        engine = CpuEngine(2)
        launcher = Launcher(engines={"numba": engine})

        def source(*arguments: Any, **named: Any) -> CheckpointWeights:
            return CheckpointWeights(*arguments, **named, engine=engine)

        monkeypatch.setattr("helpers.CheckpointWeights", source)
    return make_runner(FAMILY, config, checkpoint, residency=residency, launcher=launcher, **change)


@pytest.mark.parametrize("qtype", [QType.Q8F16, QType.MQ4G256, QType.MQ4G256V2, QType.HFQ4G128])
def test_every_format_gives_the_numbers_of_what_it_decodes_to(
    qtype: QType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = oracle(**WIDE)
    checkpoint = stored(model, qtype)
    want = logits(model)
    for residency, bound in (("decoded", 2e-5), ("packed", 2e-5), ("panels", 6e-2)):
        with monkeypatch.context() as patch:
            runner = runner_of(model, checkpoint, residency, patch)
        assert rms(runner.all_logits(0, TOKENS), want) < bound, residency


def test_compiled_kernels_give_the_numbers_of_float_weights_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = oracle()
    want = logits(model)
    runner = runner_of(model, stored(model), "panels", monkeypatch, slots=2)
    rows = [runner.prefill(0, TOKENS[:4])]
    # decode steps are recorded once and then run again, whatever experts they choose
    rows += [runner.decode(0, token, 4 + index) for index, token in enumerate(TOKENS[4:])]
    assert rms(torch.stack(rows), want[3:]) < 1e-5
    runner.prefill(1, TOKENS[:6])
    both = runner.step([(Segment(0, len(TOKENS), 1), [9]), (Segment(1, 6, 1), TOKENS[6:7])])
    assert rms(both[1], want[6]) < 1e-5
    assert rms(both[0], logits(model, [*TOKENS, 9])[-1]) < 1e-5


def as_gguf(model: Any) -> MemoryCheckpoint:
    """The model under the names of GGUF files: norms plus one, decays as used, filters of two dimensions."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }  # fmt: skip
    parts = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight", "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
        "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
        "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    }  # fmt: skip
    found = MemoryCheckpoint("gguf")
    for name, tensor in model.state_dict().items():
        values = tensor.detach()
        if name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1.0
        if name in names:
            found.add(names[name], values)
            continue
        _, _, layer, part = name.split(".", 3)
        block = f"blk.{layer}"
        if part == "mlp.experts.gate_up_proj":
            gate, up = values.chunk(2, dim=1)
            found.add(f"{block}.ffn_gate_exps.weight", gate)
            found.add(f"{block}.ffn_up_exps.weight", up)
            continue
        if part == "linear_attn.A_log":
            values = -values.exp()
        if part in ("linear_attn.conv1d.weight", "mlp.shared_expert_gate.weight"):
            values = values.squeeze()
        found.add(f"{block}.{parts[part]}", values)
    return found


def gguf_keys(change: Mapping[str, Any] | None = None) -> dict[str, Any]:
    keys = {
        "block_count": 4, "embedding_length": 48, "context_length": 256, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 8, "rope.freq_base": 10000.0,
        "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 4, "ssm.time_step_rank": 4,
        "ssm.inner_size": 128, "full_attention_interval": 4, "expert_count": 6, "expert_used_count": 3,
        "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 40, **(change or {}),
    }  # fmt: skip
    metadata = {f"qwen35moe.{key}": value for key, value in keys.items()}
    return {"general.architecture": "qwen35moe", **metadata}


def test_a_file_in_gguf_gives_the_numbers_of_its_twin() -> None:
    # as many key heads as value heads: their order is another test's
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    model = oracle(**heads, num_hidden_layers=4, layer_types=None)
    checkpoint = as_gguf(model)
    family = family_of_gguf("qwen35moe")
    assert family is FAMILY
    config = family.from_gguf(GgufFields(gguf_keys(), checkpoint.tensors))
    runner = make_runner(family, config, checkpoint)
    assert rms(runner.all_logits(0, TOKENS), logits(model)) < 1e-5


def test_a_config_is_what_its_own_form_says() -> None:
    tiny = {**FAMILY.tiny, "shared_expert_intermediate_size": 56}
    config = FAMILY.from_hf(tiny)
    assert FAMILY.from_hf(config.to_hf()) == config
    assert config.sizes.intermediate == 3 * 40 + 56
    nested = FAMILY.from_hf({"text_config": tiny, "model_type": "qwen3_5_moe"})
    assert nested.tensors() == config.tensors()


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ({"norm_topk_prob": False}, UnsupportedError, "norm_topk_prob"),
        ({"mlp_only_layers": [0]}, UnsupportedError, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, UnsupportedError, "decoder_sparse_step"),
        ({"num_experts": 4096}, UnsupportedError, "4096 experts"),
        ({"num_experts_per_tok": 7}, ArtifactError, "7 experts for each token"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    change: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        FAMILY.from_hf({**FAMILY.tiny, **change})


@pytest.mark.parametrize("change", [{"expert_gating_func": 2}, {"expert_weights_norm": False}])
def test_keys_of_files_in_gguf_that_are_not_implemented(change: dict[str, Any]) -> None:
    checkpoint = MemoryCheckpoint("gguf")
    checkpoint.add("token_embd.weight", torch.zeros(107, 48))
    with pytest.raises(UnsupportedError, match=next(iter(change))):
        FAMILY.from_gguf(GgufFields(gguf_keys(change), checkpoint.tensors))
