"""Experts in a container: a matrix for each, the same bytes whatever the source holds them in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helpers import MemoryCheckpoint
from hipfire.base.errors import ArtifactError, UnsupportedError, ValidationError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.hfq_writer import write_hfq
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.models.family import ModelConfig
from hipfire.models.qwen3_5_moe import EXPERT_RULES
from hipfire.quant.registry import format_of
from hipfire.quantize.pipeline import Converter, quantize
from hipfire.quantize.plan import PlannedTensor, plan_tensors
from hipfire.quantize.policy import recipe
from hipfire.quantize.report import NoProgress, QuantizeReport
from hipfire.runtime.identify import draft_head, unused_tensors
from tiny_models import change_weights, tiny_model, write_folder

EXPERTS, WIDE, NARROW = 12, 256, 128
LAYER = "model.layers.0.mlp"
TENSORS = {
    "model.layers.0.self_attn.q_proj.weight": (64, WIDE),
    "model.layers.0.linear_attn.conv1d.weight": (64, 1, 4),
    f"{LAYER}.gate.weight": (EXPERTS, WIDE),
    f"{LAYER}.experts.gate_up_proj": (EXPERTS, 2 * NARROW, WIDE),
    f"{LAYER}.experts.down_proj": (EXPERTS, WIDE, NARROW),
    f"{LAYER}.shared_expert_gate.weight": (1, WIDE),
    f"{LAYER}.shared_expert.up_proj.weight": (NARROW, WIDE),
}
CONFIG = cast(
    ModelConfig,
    SimpleNamespace(
        tensors=lambda: TENSORS, optional_tensors=dict, sizes=SimpleNamespace(layers=1, heads=1, kv_heads=1)
    ),
)


def values(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    # exact in half precision
    return (torch.randn(TENSORS[name], generator=generator) * 64).round() / 256


def source(form: str, **more: torch.Tensor) -> NamedCheckpoint:
    """Return a checkpoint that holds the same experts as one tensor, as two, or as many."""
    checkpoint = MemoryCheckpoint("safetensors", {})
    for name in TENSORS:
        whole = values(name)
        stack = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if "experts." not in name or form == "fused":
            checkpoint.add(name, whole)
        elif form == "each":
            for expert in range(EXPERTS):
                if name.endswith("down_proj"):
                    checkpoint.add(f"{stack}{expert}.down_proj.weight", whole[expert])
                else:
                    checkpoint.add(f"{stack}{expert}.gate_proj.weight", whole[expert, :NARROW])
                    checkpoint.add(f"{stack}{expert}.up_proj.weight", whole[expert, NARROW:])
        else:
            for expert in range(EXPERTS):
                checkpoint.add(f"{stack}{expert}.{name[len(stack) :]}.weight", whole[expert])
    for name, tensor in more.items():
        checkpoint.add(name.replace("__", "."), tensor)
    return NamedCheckpoint(checkpoint, EXPERT_RULES, 1)


def converted(named: NamedCheckpoint, plan: list[PlannedTensor]) -> tuple[dict[str, bytes], QuantizeReport]:
    report = QuantizeReport(Path("a"), Path("b"), "mq4")
    converter = Converter(cast(Any, named.checkpoint), {}, torch.device("cpu"), report, NoProgress())
    return {each.info.name: b"".join(map(bytes, converter.chunks(each))) for each in plan}, report


@pytest.mark.parametrize("fmt", ["mq4", "q8", "f16"])
def test_one_matrix_for_each_expert_from_every_form(fmt: str) -> None:
    expected: dict[str, bytes] | None = None
    for form in ("fused", "each", "container"):
        named = source(form)
        plan = plan_tensors(named, CONFIG, recipe(fmt))
        made, report = converted(named, plan)
        for each in plan:
            assert len(made[each.info.name]) == each.info.nbytes
        assert report.total.nbytes == sum(each.info.nbytes for each in plan)
        assert expected is None or made == expected
        expected = made
        names = [each.info.name for each in plan]
        stacks = [
            f"{LAYER}.experts.{x}.{part}_proj.weight" for part in ("down", "gate_up") for x in range(EXPERTS)
        ]
        # in the order of the experts' numbers, where the stack's name stands in the order of names
        assert [name for name in names if ".experts." in name] == stacks
        assert sorted(set(names) - set(stacks)) == [name for name in names if name not in stacks]
        infos = {each.info.name: each.info for each in plan}
        assert infos[stacks[-1]].shape == (2 * NARROW, WIDE)
        assert infos[stacks[0]].shape == (WIDE, NARROW)
        if fmt == "mq4":
            assert infos[stacks[-1]].qtype == QType.MQ4G256V2
            assert infos[stacks[0]].qtype == QType.HFQ4G128
            assert infos[f"{LAYER}.gate.weight"].qtype == QType.Q8F16
            assert infos["model.layers.0.self_attn.q_proj.weight"].qtype == QType.Q8F16
        assert infos["model.layers.0.linear_attn.conv1d.weight"].qtype == QType.F16


def test_gate_stands_above_up_and_experts_keep_their_numbers() -> None:
    named = source("each")
    made, _ = converted(named, plan_tensors(named, CONFIG, recipe("f16")))
    whole = values(f"{LAYER}.experts.gate_up_proj")
    for expert in (0, 2, 10, 11):
        name = f"{LAYER}.experts.{expert}.gate_up_proj.weight"
        got = torch.frombuffer(bytearray(made[name]), dtype=torch.float16).view(2 * NARROW, WIDE)
        assert torch.equal(got, whole[expert].half())


def test_a_container_is_read_and_converted_again(tmp_path: Path) -> None:
    named = source("fused")
    plan = plan_tensors(named, CONFIG, recipe("f16"))
    made, _ = converted(named, plan)
    infos = [each.info for each in plan]
    write_hfq(tmp_path / "m.f16", 6, {}, infos, ([made[info.name]] for info in infos))
    with HfqFile.open(tmp_path / "m.f16") as container:
        again = NamedCheckpoint(container, EXPERT_RULES, 1)
        assert unused_tensors(again, CONFIG) == []
        same, report = converted(again, plan_tensors(again, CONFIG, recipe("f16")))
        assert same == made
        assert report.total.squared_error == 0
        packed, _ = converted(again, plan_tensors(again, CONFIG, recipe("mq4")))
    for name in (f"{LAYER}.experts.3.gate_up_proj.weight", f"{LAYER}.experts.3.down_proj.weight"):
        fmt = format_of(QType.MQ4G256V2 if "gate" in name else QType.HFQ4G128)
        wanted = values(f"{LAYER}.experts.{'gate_up' if 'gate' in name else 'down'}_proj")[3]
        assert fmt.encode is not None
        assert packed[name] == bytes(fmt.encode(wanted).numpy())


def test_experts_that_are_not_there_are_named() -> None:
    named = source("each")
    tensors = cast(MemoryCheckpoint, named.checkpoint).tensors
    cast(Any, tensors).pop(f"{LAYER}.experts.7.up_proj.weight")
    with pytest.raises(ArtifactError, match="expert 7 is incomplete"):
        plan_tensors(named, CONFIG, recipe("mq4"))


MTP: Mapping[str, torch.Tensor] = {
    "mtp.fc.weight": torch.ones(256, 512),
    "mtp.norm.weight": torch.ones(256),
    "mtp.layers.0.mlp.experts.down_proj": torch.ones(2, 256, 128),
    "model.visual.merger.norm.weight": torch.ones(4),
}


def test_a_head_for_further_tokens_is_no_part_of_the_model() -> None:
    named = source("fused", **{name.replace(".", "__"): tensor for name, tensor in MTP.items()})
    found = draft_head(named, CONFIG)
    assert found == [name for name in MTP if name.startswith("mtp.")]
    assert unused_tensors(named, CONFIG) == list(MTP)
    kept = {each.info.name: each.info for each in plan_tensors(named, CONFIG, recipe("mq4"), tuple(found))}
    assert kept["mtp.fc.weight"].qtype == QType.MQ4G256V2
    assert kept["mtp.norm.weight"].qtype == QType.F16
    assert kept["mtp.layers.0.mlp.experts.1.down_proj.weight"].shape == (256, 128)
    assert "mtp.layers.0.mlp.experts.down_proj" not in kept


def test_a_head_in_blocks_behind_the_last_layer_of_a_gguf_file() -> None:
    checkpoint = MemoryCheckpoint("gguf", {})
    for name in (
        "blk.0.attn_q.weight",
        "blk.1.attn_q.weight",
        "blk.1.nextn.eh_proj.weight",
        "blk.1.ffn_up.weight",
    ):
        checkpoint.add(name, torch.ones(2, 2))
    named = NamedCheckpoint(checkpoint, EXPERT_RULES, 1)
    assert draft_head(named, CONFIG) == list(checkpoint.tensors)[1:]
    # a layer too many that says nothing of the kind is a fault
    lacking = MemoryCheckpoint("gguf", {})
    lacking.add("blk.1.attn_q.weight", torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="the text model has 1 tensors"):
        unused_tensors(NamedCheckpoint(lacking, EXPERT_RULES, 1), CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_folder(tmp_path / "model", tiny_model("qwen3"))
    return Path(change_weights(made, {name: MTP[name] for name in ("mtp.fc.weight", "mtp.norm.weight")}))


def test_the_head_is_listed_and_kept_on_request(folder: Path, tmp_path: Path) -> None:
    report = quantize(folder, "mq4", tmp_path / "a")
    assert report.mtp == ["mtp.fc.weight", "mtp.norm.weight"] == report.skipped
    assert report.to_json()["mtp"] == {"tensors": report.mtp, "kept": False}
    kept = quantize(folder, "mq4", tmp_path / "b", keep_mtp=True)
    assert (kept.mtp, kept.skipped) == (report.mtp, [])
    assert kept.total.tensors == report.total.tensors + 2
    with HfqFile.open(tmp_path / "a") as plain, HfqFile.open(tmp_path / "b") as container:
        assert set(container.tensors) - set(plain.tensors) == set(kept.mtp)
        for name in plain.tensors:
            assert bytes(plain.raw(name)) == bytes(container.raw(name))
    # a container with the head is a source like any other
    assert quantize(tmp_path / "b", "q8", tmp_path / "c").mtp == report.mtp
    first = (tmp_path / "b").read_bytes()
    quantize(folder, "mq4", tmp_path / "b", keep_mtp=True)
    assert (tmp_path / "b").read_bytes() == first


def test_a_head_that_is_not_there_cannot_be_kept(tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "model", tiny_model("qwen3"))
    with pytest.raises(ValidationError, match="has no head that predicts further tokens"):
        quantize(plain, "mq4", tmp_path / "a", keep_mtp=True)
    assert not (tmp_path / "a").exists()
