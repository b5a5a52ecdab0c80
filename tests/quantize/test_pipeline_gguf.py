"""GGUF files: run as they are, converted, and against the same model from safetensors and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from helpers import rms
from hipfire.base.errors import ArtifactError
from hipfire.base.qtypes import GGUF_BASE, QType
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.gguf import GgufFile
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.hfq_writer import write_hfq
from hipfire.layers.context import RopeTable
from hipfire.models.family import family_of
from hipfire.models.fields import GgufFields
from hipfire.quantize.pipeline import quantize
from tiny_models import (
    IM_END,
    KINDS,
    TEMPLATE,
    TOKENS,
    gguf_name,
    interleaved,
    load,
    logits,
    reference,
    rotary_heads,
    tiny_model,
    weights_of,
    write_folder,
    write_gguf,
)

MIXED = {
    "attn_q.": "F16",
    "attn_k.": "Q8_0",
    "attn_v": "Q4_0",
    "ffn_up": "Q4_0",
    "ffn_down": "Q8_0",
    "token": "Q8_0",
}
HEADS = [(8, 2), (8, 8), (8, 1)]


def ropes(path: Path) -> list[torch.Tensor]:
    """Return the frequencies of all rotary tables of a loaded model, layer by layer."""
    model: Any = load(path).model
    mixers = [vars(block).get("mixer") or block.attention for block in model.blocks]
    tables = [table for mixer in mixers for table in vars(mixer).values()]
    return [table.inverse_frequencies for table in tables if isinstance(table, RopeTable)]


def is_q8_0(info: TensorInfo) -> bool:
    return info.qtype == QType.GGUF_Q8_0


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_llama_rows_are_put_in_order(heads: tuple[int, int], tmp_path: Path) -> None:
    model = tiny_model("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    path = write_gguf(tmp_path / "m.gguf", model, MIXED)
    with GgufFile.open(path) as file:
        kinds = {info.qtype - GGUF_BASE for info in file.tensors.values()}
    assert kinds == {gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q4_0", "Q8_0")}
    expected = reference(model)
    direct = logits(path)
    assert rms(direct, expected) < 2e-6
    quantize(path, "f16", tmp_path / "m.f16")
    converted = logits(tmp_path / "m.f16")
    # a Q4_0 or Q8_0 weight has up to 18 significant bits, float16 keeps 11
    assert rms(converted, expected) < 3e-3
    quantize(path, "q8", tmp_path / "m.q8")
    assert rms(logits(tmp_path / "m.q8"), expected) < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_one_model_from_gguf_and_from_safetensors(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    folder = write_folder(tmp_path / "src", model)
    path = write_gguf(tmp_path / "m.gguf", model, {"attn_": "F16", "ffn_": "F16"}, eos_token_id=IM_END)
    quantize(folder, "f16", tmp_path / "a.f16")
    quantize(path, "f16", tmp_path / "b.f16")
    expected = logits(folder)
    assert rms(expected, reference(model)) < 2e-6
    tables = ropes(folder)
    assert len(tables) == sum("self_attn.q_proj" in name for name in model.state_dict())
    for other in (path, tmp_path / "a.f16", tmp_path / "b.f16"):
        # all weights are exact in float16, so every way must lead to the same numbers
        got = logits(other)
        # value heads of a hybrid's file are in another order, which sums in another order
        assert torch.equal(got, expected) if kind != "qwen3_5" else rms(got, expected) < 1e-5, other.name
        assert all(map(torch.equal, ropes(other), tables))
    if kind == "gemma3":
        assert not torch.equal(tables[0], tables[1])
    with HfqFile.open(tmp_path / "a.f16") as a, HfqFile.open(tmp_path / "b.f16") as b:
        assert {n: (i.qtype, i.shape) for n, i in a.tensors.items()} == {
            n: (i.qtype, i.shape) for n, i in b.tensors.items()
        }
        moved = [name for name in a.tensors if kind == "qwen3_5" and "linear_attn" in name]
        assert all(a.raw(name) == b.raw(name) for name in a.tensors if name not in moved)
        assert a.arch_id == b.arch_id


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_from_gguf_keeps_config_and_text(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(kind), eos_token_id=IM_END, bos_token_id=258)
    report = quantize(path, "q8", tmp_path / "m.q8")
    assert report.skipped == []
    direct, loaded = load(path), load(tmp_path / "m.q8")
    assert loaded.config == direct.config
    with HfqFile.open(tmp_path / "m.q8") as container, GgufFile.open(path) as file:
        assert container.metadata["source"] == "gguf"
        assert container.metadata["gguf_meta"] == file.model_config
        assert container.model_config["eos_token_id"] == IM_END
        assert container.model_config["bos_token_id"] == 258
        assert dict(container.text_assets().chat_templates) == {"default": TEMPLATE}
        config = family_of(container.model_config["model_type"]).from_hf(container.model_config)
        assert config == loaded.family.from_gguf(GgufFields(file.model_config, file.tensors))
    for text in ("ABBA é", "\x00 x\n", "<|im_end|>"):
        assert loaded.tokenizer.encode(text) == direct.tokenizer.encode(text)
    assert (loaded.tokenizer.bos_id, loaded.tokenizer.eos_ids) == (258, direct.tokenizer.eos_ids)


def test_end_tokens_are_not_made_up(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    quantize(path, "q8", tmp_path / "m.q8")
    loaded = load(tmp_path / "m.q8")
    # the template's own turn end and nothing else; id 2 is an ordinary byte
    assert loaded.tokenizer.eos_ids == {IM_END}
    assert loaded.tokenizer.bos_id is None


def test_q8_0_blocks_are_copied_byte_for_byte(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model, {"weight": "Q8_0"})
    report = quantize(path, "q8", tmp_path / "m.q8")
    assert report.formats[QType.Q8F16].relative_rms == 0.0
    with GgufFile.open(path) as file, HfqFile.open(tmp_path / "m.q8") as container:
        copied = 0
        for name in weights_of(model):
            stored = file.tensors[gguf_name("llama", name)]
            if not is_q8_0(stored):
                continue
            copied += 1
            blocks = torch.frombuffer(bytearray(file.raw(stored.name)), dtype=torch.uint8)
            rows = blocks.view(stored.shape[0], -1)
            heads = rotary_heads(model.config, stored.name)
            if heads:
                # whole rows move, their bytes do not change
                rows = rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
            assert container.tensors[name].qtype == QType.Q8F16
            assert container.raw(name) == rows.contiguous().numpy().tobytes(), name
        assert copied == 16


def test_a_copy_of_damaged_blocks_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), {"weight": "Q8_0"})
    with GgufFile.open(path) as file:
        data = bytes(file.raw("blk.1.ffn_down.weight"))
    raw = path.read_bytes()
    # the scale of row 5, block 3 of rows of 11 blocks becomes infinite
    at = raw.index(data) + (5 * 11 + 3) * 34
    path.write_bytes(raw[:at] + np.float16(np.inf).tobytes() + raw[at + 2 :])
    for fmt in ("q8", "hf4"):
        with pytest.raises(ArtifactError, match=r"blk\.1\.ffn_down\.weight: .*not finite in row 5, block"):
            quantize(path, fmt, tmp_path / "m")
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


def test_rope_factors_of_a_gguf_are_kept_in_full(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    model = tiny_model("llama", rope_parameters=scaling)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.unique().numel() > 2
    path = tmp_path / "m.gguf"
    write_gguf_with_factors(path, model, factors.numpy())
    quantize(path, "mq4", tmp_path / "m.mq4")
    with HfqFile.open(tmp_path / "m.mq4") as container:
        assert container.tensors["rope_freqs.weight"].qtype == QType.F32
        assert container.raw("rope_freqs.weight") == factors.numpy().tobytes()
    quantize(write_folder(tmp_path / "src", model), "mq4", tmp_path / "hf.mq4")
    for name in ("m.gguf", "m.mq4"):
        for table in ropes(tmp_path / name):
            assert rms(table, model.model.rotary_emb.inv_freq) < 1e-6
    assert rms(logits(tmp_path / "m.mq4"), logits(tmp_path / "hf.mq4")) < 1e-5


def write_gguf_with_factors(path: Path, model: Any, factors: np.ndarray[Any, Any]) -> None:
    """Write a GGUF file that has frequency factors, a tensor that llama files put beside the weights."""
    close = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)
        close(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write_gguf(path, model)


def test_containers_of_the_original_converter_are_requantized_in_order(tmp_path: Path) -> None:
    """It writes GGUF sizes as [in, out], leaves rotary rows as they were and says nothing of tied heads."""
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=1)
    infos, payloads = [], []
    for name, values in sorted(weights_of(model).items()):
        heads = rotary_heads(model.config, gguf_name("llama", name))
        plain = interleaved(values, heads) if heads else values
        data = plain.half().numpy().tobytes()
        infos.append(TensorInfo(name, QType.F16, tuple(values.shape[::-1]), len(data)))
        payloads.append([data])
    config = {key: value for key, value in model.config.to_dict().items() if key in FIELDS}
    write_gguf(tmp_path / "m.gguf", model)
    with GgufFile.open(tmp_path / "m.gguf") as file:
        metadata = {"architecture": "llama", "config": config, "source": "gguf"}
        metadata["gguf_meta"] = dict(file.model_config)
    write_hfq(tmp_path / "old.hfq", 0, metadata, infos, payloads)
    expected = reference(model)
    assert rms(logits(tmp_path / "old.hfq"), expected) < 2e-6
    for source, out in (("old.hfq", "new.f16"), ("new.f16", "newer.f16")):
        quantize(tmp_path / source, "f16", tmp_path / out)
        assert torch.equal(logits(tmp_path / out), logits(tmp_path / "old.hfq"))
        with HfqFile.open(tmp_path / out) as container:
            assert container.tensors["model.layers.0.mlp.down_proj.weight"].shape == (256, 352)


FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "head_dim",
)  # fmt: skip


def test_types_that_the_reader_decodes_elsewhere_convert_too(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    path = write_gguf(tmp_path / "m.gguf", model, {"ffn_down": "Q5_1", "ffn_up": "Q4_1", "attn_o": "BF16"})
    report = quantize(path, "f16", tmp_path / "m")
    assert rms(logits(path), reference(model)) < 2e-6
    assert rms(logits(tmp_path / "m"), reference(model)) < 3e-3
    assert 0.0 < report.total.relative_rms < 1e-3
    assert len(TOKENS) == logits(tmp_path / "m").shape[0]
