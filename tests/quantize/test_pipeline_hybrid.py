"""Hybrid models in containers: what stays float, what is left out, and the names of a wrapper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from helpers import rms
from hipfire.base.qtypes import QType
from hipfire.checkpoint.hfq import HfqFile
from hipfire.quant.registry import format_of
from hipfire.quantize.pipeline import quantize
from hipfire.runtime.identify import named_checkpoint, read_config, unused_tensors
from tiny_models import logits, reference, tokenizer_text

FIELDS: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
DELTA = "model.layers.0.linear_attn."


def model(*, tied: bool) -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen3_5TextConfig(**FIELDS, tie_word_embeddings=tied)
    made = transformers.Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            # exact in half precision
            parameter.copy_((torch.randn_like(parameter) * 64).round() / 256)
    return made


def write(folder: Path, *, tied: bool, wrapped: bool) -> dict[str, torch.Tensor]:
    """Write a folder; returns the text model's weights by canonical name."""
    folder.mkdir()
    made = model(tied=tied)
    state = {name: values.detach().contiguous() for name, values in made.state_dict().items()}
    if tied:
        state.pop("lm_head.weight")
    stored = dict(state)
    config: dict[str, Any] = made.config.to_dict() | {"model_type": "qwen3_5_text"}
    if wrapped:
        stored = {
            name.replace("model.", "model.language_model.", 1): values for name, values in state.items()
        }
        stored["model.visual.patch_embed.proj.weight"] = torch.ones(8, 8)
        stored["mtp.fc.weight"] = torch.ones(256, 512)
        config = {"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": config}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    return state


@pytest.mark.parametrize("fmt", ["mq4", "q8", "f16"])
@pytest.mark.parametrize(("tied", "wrapped"), [(True, False), (False, True)])
def test_formats_and_bytes_of_every_tensor(tied: bool, wrapped: bool, fmt: str, tmp_path: Path) -> None:
    state = write(tmp_path / "src", tied=tied, wrapped=wrapped)
    report = quantize(tmp_path / "src", fmt, tmp_path / "m")
    assert report.mtp == (["mtp.fc.weight"] if wrapped else [])
    assert set(report.skipped) == (
        {"mtp.fc.weight", "model.visual.patch_embed.proj.weight"} if wrapped else set()
    )
    base = {"mq4": QType.MQ4G256V2, "q8": QType.Q8F16, "f16": QType.F16}[fmt]
    ragged = {"mq4": QType.HFQ4G128, "q8": QType.Q8F16, "f16": QType.F16}[fmt]
    with HfqFile.open(tmp_path / "m") as container:
        assert container.arch_id == 5
        # under names without the wrapper, but with its configuration
        assert list(container.tensors) == sorted(state)
        assert container.model_config["model_type"] == ("qwen3_5" if wrapped else "qwen3_5_text")
        for name, info in container.tensors.items():
            values = state[name]
            small = values.ndim < 2 or name.endswith("conv1d.weight")
            embedding = QType.F16 if fmt == "f16" else QType.Q8F16
            wide = base if values.shape[-1] % 256 == 0 else ragged
            wanted = QType.F16 if small else embedding if "embed_tokens" in name else wide
            wanted = QType.F32 if name.endswith("A_log") else wanted
            assert info.qtype == wanted, name
            matrix = values.reshape(-1, values.shape[-1])
            encode = format_of(wanted).encode
            assert encode is not None
            # rows stay in the order of the source, a head's gates behind its queries, and norms as they are
            assert bytes(container.raw(name)) == bytes(encode(matrix).numpy()), name
        family, config = read_config(container)
        assert unused_tensors(named_checkpoint(container, family, config), config) == []
        assert config.sizes.tied == tied
    quantize(tmp_path / "src", fmt, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


def test_names_of_what_stays_float(tmp_path: Path) -> None:
    write(tmp_path / "src", tied=True, wrapped=False)
    quantize(tmp_path / "src", "mq4", tmp_path / "m")
    with HfqFile.open(tmp_path / "m") as container:
        assert container.tensors[f"{DELTA}A_log"].qtype == QType.F32
        for part in ("dt_bias", "norm.weight", "conv1d.weight"):
            assert container.tensors[DELTA + part].qtype == QType.F16
        for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
            assert container.tensors[f"{DELTA}{part}.weight"].qtype == QType.MQ4G256V2


MIXTURE = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 6,
           "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.parametrize(("fmt", "bound"), [("f16", 1e-5), ("q8", 0.1), ("mq4", 0.6)])
def test_a_mixture_of_experts_is_written_and_read(fmt: str, bound: float, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = transformers.Qwen3_5MoeTextConfig(**FIELDS, **MIXTURE, tie_word_embeddings=False)
    made = transformers.Qwen3_5MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scale = 8 if "norm" in name else 64
            parameter.copy_((torch.randn_like(parameter) * scale / 4).round() / 256)
    made.save_pretrained(tmp_path / "src")
    (tmp_path / "src" / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    report = quantize(tmp_path / "src", fmt, tmp_path / "m")
    assert report.skipped == []
    with HfqFile.open(tmp_path / "m") as container:
        assert container.arch_id == 6
        eight = QType.F16 if fmt == "f16" else QType.Q8F16
        for name in ("mlp.gate.weight", "mlp.shared_expert_gate.weight", "linear_attn.in_proj_qkv.weight"):
            assert container.tensors[f"model.layers.1.{name}"].qtype == eight
        assert container.tensors["lm_head.weight"].qtype == eight
        experts = [name for name in container.tensors if name.startswith("model.layers.1.mlp.experts.")]
        assert len(experts) == 2 * MIXTURE["num_experts"]
    error = rms(logits(tmp_path / "m"), reference(made))
    # a router that chooses others moves a whole token
    assert error < bound
