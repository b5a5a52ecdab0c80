"""From a safetensors folder to a container and back to logits, against transformers and own figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import MemoryCheckpoint, make_runner, rms
from hipfire.base.qtypes import QType
from hipfire.checkpoint.hfq import HfqFile
from hipfire.quant.registry import format_of
from hipfire.quantize import pipeline
from hipfire.quantize.pipeline import quantize
from tiny_models import (
    IM_END,
    KINDS,
    TEMPLATE,
    TOKENS,
    change_weights,
    load,
    logits,
    reference,
    tiny_model,
    tokenizer_text,
    weights_of,
    write_folder,
)

Q = QType
ARCH_IDS = {"llama": 0, "qwen3": 1, "gemma3": 203, "qwen3_5": 5}
# greatest relative RMS of the logits; the random models amplify the error of a weight about fourfold
BOUNDS = {
    "mq4": 0.4, "mq4v1": 0.5, "hf4": 0.5, "mq6": 0.12, "mq6v2": 0.1, "hf6": 0.12, "q8": 0.03, "f16": 1e-6,
}  # fmt: skip
WHOLE = {
    "mq4": Q.MQ4G256V2, "mq4v1": Q.MQ4G256, "hf4": Q.HFQ4G256, "mq6": Q.MQ6G256, "mq6v2": Q.MQ6G256V2,
    "hf6": Q.HFQ6G256, "q8": Q.Q8F16, "f16": Q.F16,
}  # fmt: skip
ROTATED = (Q.MQ4G256V2, Q.MQ4G256, Q.MQ6G256, Q.MQ6G256V2)
BYTES = {Q.F16: (1, 2), Q.Q8F16: (32, 34), Q.HFQ4G128: (128, 72), Q.HFQ4G256: (256, 136)}


def expected_qtype(fmt: str, name: str, cols: int) -> QType:
    """State the policy for these models once more."""
    if "A_log" in name:
        return Q.F32
    if fmt == "f16" or any(part in name for part in ("norm", "conv1d", "dt_bias")):
        return Q.F16
    if "embed" in name:
        return Q.Q8F16
    if cols % 256 == 0:
        return WHOLE[fmt]
    return Q.HFQ4G128 if fmt in ("mq4", "mq4v1", "hf4") else Q.Q8F16


def decoded(qtype: int, values: torch.Tensor) -> torch.Tensor:
    """Return what a whole tensor becomes in a format, in the original basis."""
    fmt = format_of(qtype)
    matrix = values.view(-1, values.shape[-1])
    assert fmt.encode is not None
    return fmt.dense(fmt.encode(matrix), *matrix.shape).view(values.shape)


@pytest.mark.parametrize("fmt", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_container(kind: str, fmt: str, source: Any, tmp_path: Path) -> None:
    out = tmp_path / f"m.{fmt}"
    quantize(source(kind), fmt, out)
    loaded = load(out)
    got = loaded.runner.all_logits(0, TOKENS)
    model = tiny_model(kind)
    error = rms(got, reference(model))
    assert error < BOUNDS[fmt]
    # a container that holds the source's own weights would not be one of this format
    assert fmt == "f16" or error > BOUNDS[fmt] / 20

    memory = MemoryCheckpoint("safetensors", model.config.to_dict())
    qtypes = {}
    for name, values in weights_of(model).items():
        qtypes[name] = expected_qtype(fmt, name, values.shape[-1])
        memory.add(name, decoded(qtypes[name], values))
    own = make_runner(loaded.family, loaded.config, memory, max_seq=64).all_logits(0, TOKENS)
    if any(qtype in ROTATED for qtype in qtypes.values()):
        assert rms(got, own) < 1e-5
    else:
        assert torch.equal(got, own)
    with HfqFile.open(out) as container:
        assert {name: info.qtype for name, info in container.tensors.items()} == qtypes
        assert list(container.tensors) == sorted(qtypes)
        assert container.arch_id == ARCH_IDS[kind]


@pytest.mark.parametrize("jinja", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_bf16_folder_keeps_weights_and_text(kind: str, jinja: bool, tmp_path: Path) -> None:
    model = tiny_model(kind, dtype=torch.bfloat16)
    folder = write_folder(tmp_path / "src", model, shards=True, jinja=jinja)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").is_file()
    report = quantize(folder, "f16", tmp_path / "m.f16")
    assert report.total.relative_rms == 0.0
    loaded = load(tmp_path / "m.f16")
    # the same weights in float32: a model that was cast has also cast its rotary tables
    assert rms(loaded.runner.all_logits(0, TOKENS), reference(tiny_model(kind))) < 1e-6
    with HfqFile.open(tmp_path / "m.f16") as container:
        assert container.model_config == json.loads((folder / "config.json").read_text())
        assert container.metadata["architecture"] == container.model_config["model_type"]
        assert container.metadata["generation_config"]["eos_token_id"] == IM_END
        for name, values in weights_of(model).items():
            dtype = torch.float32 if name.endswith("A_log") else torch.float16
            stored = torch.frombuffer(bytearray(container.raw(name)), dtype=dtype)
            assert torch.equal(stored.float().view(values.shape), values), name
        assets = container.text_assets()
    assert assets.tokenizer_json == tokenizer_text()
    assert dict(assets.chat_templates) == {"default": TEMPLATE}
    assert loaded.tokenizer.eos_ids >= {IM_END}
    assert loaded.templates is not None
    messages = [{"role": "user", "content": "é AB <|im_end|>"}]
    ids = loaded.tokenizer.encode_chat(loaded.templates.pick(None).render(messages))
    original = load(folder)
    assert original.templates is not None
    assert ids == original.tokenizer.encode_chat(original.templates.pick(None).render(messages))
    assert ids.count(IM_END) == 1


@pytest.mark.parametrize("fmt", ["hf4", "mq4", "q8"])
def test_report_equals_an_independent_recomputation(fmt: str, source: Any, tmp_path: Path) -> None:
    out = tmp_path / "m"
    report = quantize(source("llama"), fmt, out)
    sums: dict[int, list[float]] = {}
    for name, values in weights_of(tiny_model("llama")).items():
        qtype = expected_qtype(fmt, name, values.shape[-1])
        elements, nbytes = BYTES.get(qtype, (256, 136))
        rows, cols = values.view(-1, values.shape[-1]).shape
        row = sums.setdefault(qtype, [0, 0, 0, 0.0, 0.0])
        difference = decoded(qtype, values).double() - values.double()
        added = (1, values.numel(), rows * math.ceil(cols / elements) * nbytes,
                 float((difference**2).sum()), float((values.double() ** 2).sum()))  # fmt: skip
        sums[qtype] = [a + b for a, b in zip(row, added, strict=True)]
    shown = report.to_json()
    assert set(shown["formats"]) == {QType(qtype).name for qtype in sums}
    everything = [sum(column) for column in zip(*sums.values(), strict=True)]
    for name, (tensors, weights, nbytes, error, squares) in [
        *((QType(qtype).name, row) for qtype, row in sums.items()), ("total", everything),
    ]:  # fmt: skip
        figures = shown["total"] if name == "total" else shown["formats"][name]
        assert (figures["tensors"], figures["weights"], figures["bytes"]) == (tensors, weights, nbytes)
        assert figures["bits_per_weight"] == pytest.approx(8 * nbytes / weights, abs=1e-4)
        assert figures["relative_rms"] == pytest.approx(math.sqrt(error / squares), rel=1e-5, abs=1e-12)
    assert shown["file_bytes"] == out.stat().st_size
    with HfqFile.open(out) as container:
        assert sum(info.nbytes for info in container.tensors.values()) == shown["total"]["bytes"]


def test_error_falls_with_every_bit(source: Any, tmp_path: Path) -> None:
    for ladder in (["hf4", "hf6", "q8", "f16"], ["mq4v1", "mq6", "q8", "f16"], ["mq4", "mq6v2", "q8", "f16"]):
        totals = [quantize(source("qwen3"), fmt, tmp_path / fmt).total for fmt in ladder]
        errors = [figures.relative_rms for figures in totals]
        assert errors == sorted(errors, reverse=True)
        assert len(set(errors)) == len(errors)
        bits = [figures.bits_per_weight for figures in totals]
        assert bits == sorted(bits)


@pytest.mark.parametrize("fmt", ["mq4", "hf4", "q8", "f16"])
def test_equal_input_gives_equal_bytes_whatever_the_chunk(
    fmt: str, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(source("llama"), fmt, tmp_path / "one")
    quantize(source("llama"), fmt, tmp_path / "two")
    # 14 rows of 352 at a time, the last chunk being shorter
    monkeypatch.setattr(pipeline, "CHUNK_ELEMENTS", 5000)
    report = quantize(source("llama"), fmt, tmp_path / "three")
    first = (tmp_path / "one").read_bytes()
    assert first == (tmp_path / "two").read_bytes()
    assert first == (tmp_path / "three").read_bytes()
    assert report.total.tensors == len(weights_of(tiny_model("llama")))


@pytest.mark.parametrize("intermediate", [129, 255, 260])
@pytest.mark.parametrize("fmt", ["mq4", "mq6"])
def test_ragged_widths_survive(intermediate: int, fmt: str, tmp_path: Path) -> None:
    model = tiny_model("llama", intermediate_size=intermediate, num_hidden_layers=1)
    folder = write_folder(tmp_path / "src", model)
    quantize(folder, fmt, tmp_path / "m")
    assert rms(logits(tmp_path / "m"), reference(model)) < BOUNDS[fmt]


def test_a_head_that_is_tied_is_left_out_and_reported(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    folder = write_folder(tmp_path / "src", model)
    change_weights(
        folder,
        {
            "lm_head.weight": torch.ones(264, 256),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        },
    )
    report = quantize(folder, "f16", tmp_path / "m")
    assert sorted(report.skipped) == ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert report.to_json()["skipped"] == report.skipped
    with HfqFile.open(tmp_path / "m") as container:
        assert not set(report.skipped) & set(container.tensors)
    assert rms(logits(tmp_path / "m"), reference(model)) < 1e-6


@pytest.mark.parametrize("amplitude", [6e-8, 1e-6, 6e4])
@pytest.mark.parametrize("fmt", ["mq4v1", "hf4", "q8"])
def test_extreme_amplitudes_survive_the_container(fmt: str, amplitude: float, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    changed = torch.randn(256, 256, generator=generator).clamp(-3, 3) / 3 * amplitude
    changed[0, 0] = amplitude
    name = "model.layers.0.self_attn.o_proj.weight"
    folder = write_folder(tmp_path / "src", tiny_model("llama", num_hidden_layers=1))
    change_weights(folder, {name: changed})
    quantize(folder, fmt, tmp_path / "m")
    with HfqFile.open(tmp_path / "m") as container:
        info = container.tensors[name]
        back = format_of(info.qtype).dense(
            torch.frombuffer(bytearray(container.raw(name)), dtype=torch.uint8), 256, 256
        )
    # the scale of an 8-bit block is a float16: below 2^-24 there is none left
    vanishes = fmt == "q8" and amplitude / 127 < 2.0**-24
    assert torch.isfinite(back).all()
    assert torch.equal(back, torch.zeros_like(back)) if vanishes else rms(back, changed) < 0.15


@pytest.mark.parametrize("amplitude", [1e-30, 1e30])
def test_the_error_is_measured_where_squares_leave_float32(amplitude: float, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "src", tiny_model("llama", num_hidden_layers=1))
    names = [name for name in weights_of(tiny_model("llama", num_hidden_layers=1)) if "_proj" in name]
    plain = quantize(folder, "hf4", tmp_path / "plain").formats[Q.HFQ4G128].relative_rms
    stored = weights_of(tiny_model("llama", num_hidden_layers=1))
    change_weights(folder, {name: stored[name] * amplitude for name in names})
    report = quantize(folder, "hf4", tmp_path / "m")
    assert report.formats[Q.HFQ4G128].relative_rms == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("fmt", ["mq4", "q8"])
def test_requantizing_a_container(fmt: str, source: Any, tmp_path: Path) -> None:
    quantize(source("gemma3"), "f16", tmp_path / "half")
    report = quantize(tmp_path / "half", fmt, tmp_path / "again")
    quantize(source("gemma3"), fmt, tmp_path / "direct")
    # the weights are exact in float16, so the way over it changes nothing
    assert (tmp_path / "again").read_bytes() == (tmp_path / "direct").read_bytes()
    assert report.formats[Q.F16].relative_rms == 0.0
    kept = quantize(tmp_path / "again", fmt, tmp_path / "same")
    assert kept.total.relative_rms == 0.0
    assert (tmp_path / "same").read_bytes() == (tmp_path / "again").read_bytes()
