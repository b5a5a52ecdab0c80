"""Stacks of experts out of checkpoints: every form in which files hold them, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from helpers import MemoryCheckpoint, rms
from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.experts import FloatExperts, PackedExperts, PanelExperts, StoredExperts
from hipfire.layers.weights import ExpertStack, ExpertTensors, WeightSource
from hipfire.models.qwen3_5_moe import EXPERT_RULES
from hipfire.quant.registry import format_of
from hipfire.runtime.gpu_upload import Upload
from hipfire.runtime.gpu_weights import GpuWeights, device_nbytes
from hipfire.runtime.panels import panels_nbytes
from hipfire.runtime.weights import CheckpointWeights

LAYER = "model.layers.0.mlp"
GATE_UP, DOWN = f"{LAYER}.experts.gate_up_proj", f"{LAYER}.experts.down_proj"
EXPERTS, WIDTH, HIDDEN = 3, 32, 256
SHARED = {part: f"{LAYER}.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
PROJECTIONS = (
    ExpertTensors(GATE_UP, EXPERTS, 2 * WIDTH, HIDDEN, sections=2, shared=(SHARED["gate"], SHARED["up"])),
    ExpertTensors(DOWN, EXPERTS, HIDDEN, WIDTH, shared=(SHARED["down"],)),
)
FORMS = ("stacked", "single", "fused", "gguf", "gguf fused")
KINDS = ("decoded", "packed", "panels", "gpu")
HELD = {"decoded": FloatExperts, "packed": StoredExperts, "panels": PanelExperts, "gpu": PackedExperts}


def weights(width: int = WIDTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        # exact in every format with eight bits or more, and in blocks of 32
        return torch.randint(-127, 128, shape, generator=generator) / 128.0

    return {
        "gate": some(EXPERTS + 1, width, HIDDEN),
        "up": some(EXPERTS + 1, width, HIDDEN),
        "down": some(EXPERTS + 1, HIDDEN, width),
    }


def checkpoint_of(
    form: str, qtype: QType = QType.Q8F16, shared: QType | None = None, width: int = WIDTH
) -> MemoryCheckpoint:
    """A checkpoint of one layer's experts; the last of the weights are the shared expert's."""
    parts = weights(width)
    found = MemoryCheckpoint("gguf" if "gguf" in form else "safetensors")
    fused = torch.cat((parts["gate"], parts["up"]), dim=1)[:-1]
    if form == "stacked":
        found.add(GATE_UP, fused, qtype)
        found.add(DOWN, parts["down"][:-1], qtype)
    elif "gguf" in form:
        if "fused" in form:
            found.add("blk.0.ffn_gate_up_exps.weight", fused, qtype)
        else:
            found.add("blk.0.ffn_up_exps.weight", parts["up"][:-1], qtype)
            found.add("blk.0.ffn_gate_exps.weight", parts["gate"][:-1], qtype)
        found.add("blk.0.ffn_down_exps.weight", parts["down"][:-1], qtype)
    else:
        # with the prefix of a multimodal checkpoint
        layer = LAYER.replace("model.", "model.language_model.", 1)
        for expert in range(EXPERTS):
            prefix = f"{layer}.experts.{expert}"
            if form == "fused":
                found.add(f"{prefix}.gate_up_proj.weight", fused[expert], qtype)
            else:
                found.add(f"{prefix}.gate_proj.weight", parts["gate"][expert], qtype)
                found.add(f"{prefix}.up_proj.weight", parts["up"][expert], qtype)
            found.add(f"{prefix}.down_proj.weight", parts["down"][expert], qtype)
    for part in ("gate", "up", "down"):
        name = f"blk.0.ffn_{part}_shexp.weight" if "gguf" in form else SHARED[part]
        found.add(name, parts[part][-1], shared or qtype)
    return found


@functools.cache
def cpu_engine() -> CpuEngine:
    return CpuEngine(2)


def source(checkpoint: MemoryCheckpoint, kind: str) -> WeightSource:
    named = NamedCheckpoint(checkpoint, EXPERT_RULES, 1)
    if kind != "gpu":
        arguments: dict[str, Any] = {"residency": kind, "engine": cpu_engine() if kind == "panels" else None}
        return CheckpointWeights(named, heads=1, kv_heads=1, **arguments)
    device = torch.device("cpu")
    return GpuWeights(
        named,
        heads=1,
        kv_heads=1,
        device=device,
        take=lambda _, nbytes: torch.full((nbytes,), 255, dtype=torch.uint8),
        # pieces that end within an expert
        upload=Upload(device, piece=7 * 34 * (HIDDEN // 32)),
    )


def dense(stack: ExpertStack) -> torch.Tensor:
    return torch.stack([stack.stack.dense(expert) for expert in range(stack.stack.experts)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_stacks(form: str, kind: str) -> None:
    inputs, down = source(checkpoint_of(form), kind).experts(PROJECTIONS)
    want = weights()
    assert isinstance(inputs.stack, HELD[kind])
    assert inputs.shared
    assert down.shared
    # one step of a block's scale is 1/127 of its largest weight
    assert rms(dense(inputs), torch.cat((want["gate"], want["up"]), dim=1)) < 5e-3
    assert rms(dense(down), want["down"]) < 5e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "qtype", [QType.F32, QType.BF16, QType.HFQ4G256, QType.MQ4G256, QType.MQ6G256V2, QType.HFQ4G128]
)
def test_every_format_gives_what_it_decodes_to(qtype: QType, kind: str) -> None:
    if kind == "gpu" and qtype in (QType.F32, QType.BF16):
        with pytest.raises(UnsupportedError, match="have no kernels on a GPU"):
            source(checkpoint_of("stacked", qtype), kind).experts(PROJECTIONS)
        return
    # rows of a rotated format have whole blocks
    width = 256
    projections = (
        ExpertTensors(GATE_UP, EXPERTS, 2 * width, HIDDEN, sections=2),
        ExpertTensors(DOWN, EXPERTS, HIDDEN, width),
    )
    checkpoint = checkpoint_of("stacked", qtype, width=width)
    for stack, tensors in zip(source(checkpoint, kind).experts(projections), projections, strict=True):
        rows = tensors.experts * tensors.rows
        data = torch.frombuffer(bytearray(checkpoint.raw(tensors.name)), dtype=torch.uint8)
        want = format_of(qtype).decode(data, rows, tensors.cols).view(EXPERTS, tensors.rows, tensors.cols)
        assert rms(dense(stack), want) < 1e-6
        assert stack.rotated == format_of(qtype).rotated
        assert not stack.shared


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_fill_no_panel(kind: str) -> None:
    checkpoint = checkpoint_of("single", width=20)
    projection = ExpertTensors(GATE_UP, EXPERTS, 40, HIDDEN, sections=2)
    (stack,) = source(checkpoint, kind).experts((projection,))
    want = weights(20)
    assert rms(dense(stack), torch.cat((want["gate"], want["up"]), dim=1)[:-1]) < 5e-3
    info = NamedCheckpoint(checkpoint, EXPERT_RULES, 1).require(GATE_UP, (EXPERTS, 40, HIDDEN)).info
    if isinstance(stack.stack, PanelExperts):
        assert stack.stack.data.numel() <= panels_nbytes(info)
    if isinstance(stack.stack, PackedExperts):
        assert stack.stack.matrix.nbytes <= device_nbytes(info)


@pytest.mark.parametrize("kind", ["decoded", "packed", "panels", "gpu"])
def test_a_shared_expert_of_another_kind_stays_apart(kind: str) -> None:
    stacks = source(checkpoint_of("fused", QType.HFQ4G128, QType.Q8F16), kind).experts(PROJECTIONS)
    assert [stack.shared for stack in stacks] == [False, False]
    assert [stack.stack.experts for stack in stacks] == [EXPERTS, EXPERTS]


def test_the_tensors_of_a_stack_are_known_and_no_others() -> None:
    for form in FORMS:
        checkpoint = checkpoint_of(form)
        checkpoint.add("something.new", torch.ones(2, 2))
        named = NamedCheckpoint(checkpoint, EXPERT_RULES, 1)
        assert named.unknown([GATE_UP, DOWN, *SHARED.values()]) == ["something.new"]
        info = named.require(GATE_UP, (EXPERTS, 2 * WIDTH, HIDDEN)).info
        assert info.nbytes == EXPERTS * 2 * WIDTH * HIDDEN // 32 * 34


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_several_formats_are_refused(kind: str) -> None:
    checkpoint = checkpoint_of("fused")
    name = next(name for name in checkpoint.tensors if "experts.1.gate_up" in name)
    checkpoint.add(name, torch.zeros(2 * WIDTH, HIDDEN), QType.HFQ4G128)
    with pytest.raises(UnsupportedError, match="formats HFQ4G128, Q8F16"):
        source(checkpoint, kind).experts(PROJECTIONS)


def test_an_expert_that_is_incomplete_or_missing_is_named() -> None:
    checkpoint = checkpoint_of("single")
    name = next(name for name in checkpoint.tensors if "experts.1.up" in name)
    del checkpoint.tensors[name]
    with pytest.raises(ArtifactError, match="expert 1 is incomplete"):
        source(checkpoint, "decoded").experts(PROJECTIONS)
    checkpoint = checkpoint_of("fused")
    for name in [name for name in checkpoint.tensors if "experts.2." in name]:
        del checkpoint.tensors[name]
    with pytest.raises(ArtifactError, match="has shape"):
        source(checkpoint, "decoded").experts(PROJECTIONS)
    checkpoint = checkpoint_of("fused")
    checkpoint.add(next(n for n in checkpoint.tensors if ".1.down" in n), torch.zeros(HIDDEN, 8), QType.Q8F16)
    with pytest.raises(ArtifactError, match="other experts"):
        source(checkpoint, "decoded").experts(PROJECTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_names_the_tensor(kind: str) -> None:
    checkpoint = checkpoint_of("fused", QType.HFQ4G128)
    name = next(name for name in checkpoint.tensors if "experts.1.down" in name)
    info, data = checkpoint.tensors[name], bytearray(checkpoint.raw(name))
    data[:4] = b"\x00\x00\xc0\x7f"
    checkpoint.add_raw(name, info.qtype, info.shape, bytes(data))
    with pytest.raises(ArtifactError, match="not finite") as caught:
        source(checkpoint, kind).experts(PROJECTIONS)
    assert caught.value.field == f"tensor {name}"
