"""The block of experts against transformers, on every device and in every form that weights are kept in."""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest
import torch
import transformers
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from helpers import MemoryCheckpoint, rms
from hipfire.base.errors import UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.fwht import inverse_fwht256
from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine
from hipfire.kernels.launch import Launcher, LaunchRecord
from hipfire.layers.context import CacheStore, Segment, StepContext
from hipfire.layers.experts import ExpertMlp, ExpertShape
from hipfire.layers.weights import WeightSource
from hipfire.models.qwen3_5_moe import EXPERT_RULES
from hipfire.quant.registry import format_of
from hipfire.runtime.gpu_upload import Upload
from hipfire.runtime.gpu_weights import GpuWeights
from hipfire.runtime.weights import CheckpointWeights

PREFIX = "model.layers.0.mlp"
HIDDEN, WIDTH, EXPERTS, CHOSEN = 256, 256, 6, 2
ROUTES = ("gate.weight", "shared_expert_gate.weight")
# the number of tokens decides between the kernels of pairs and those of groups
TOKENS = (1, 11)
CPU = torch.device("cpu")


class NoCache:
    """A cache that is not asked for anything."""

    states = None

    def tiles(self, lengths: Any) -> None:
        return None


def block_of(shared: int = WIDTH) -> Any:
    config = transformers.Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=shared,
        hidden_act="silu",
    )
    config._experts_implementation = "eager"
    torch.manual_seed(5)
    block = Qwen3_5MoeSparseMoeBlock(config).eval()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            scale = 0.5 if "gate.weight" in name else 0.08
            parameter.copy_(torch.randn_like(parameter) * scale)
    return block


def stored(
    block: Any, qtype: QType, routes: QType = QType.F32, shared: QType | None = None
) -> MemoryCheckpoint:
    """The block as a checkpoint; its own weights become what the stored ones decode to."""
    checkpoint = MemoryCheckpoint()
    with torch.no_grad():
        for name, values in block.state_dict().items():
            kind = routes if name in ROUTES else (shared or qtype) if "shared_expert." in name else qtype
            checkpoint.add(f"{PREFIX}.{name}", values, kind)
            info, fmt = checkpoint.tensors[f"{PREFIX}.{name}"], format_of(kind)
            data = torch.frombuffer(bytearray(checkpoint.raw(info.name)), dtype=torch.uint8)
            decoded = fmt.decode(data, *info.rows_cols)
            values.copy_((inverse_fwht256(decoded) if fmt.rotated else decoded).view(values.shape))
    return checkpoint


@functools.cache
def cpu_engine() -> CpuEngine:
    return CpuEngine(2)


def host(checkpoint: MemoryCheckpoint, residency: Any) -> tuple[WeightSource, Launcher]:
    engine = cpu_engine() if residency == "panels" else None
    named = NamedCheckpoint(checkpoint, EXPERT_RULES, 1)
    source = CheckpointWeights(named, heads=1, kv_heads=1, residency=residency, engine=engine)
    return source, Launcher(engines={} if engine is None else {"numba": engine})


def device(checkpoint: MemoryCheckpoint, arithmetic: Arithmetic) -> tuple[WeightSource, Launcher]:
    """The GPU's weights and kernels, interpreted."""
    source = GpuWeights(
        NamedCheckpoint(checkpoint, EXPERT_RULES, 1),
        heads=1,
        kv_heads=1,
        device=CPU,
        take=lambda _, nbytes: torch.full((nbytes,), 255, dtype=torch.uint8),
        upload=Upload(CPU),
    )
    engine = GpuEngine(CPU, "plain", arithmetic=arithmetic, processors=4)
    return source, Launcher(engines={"triton": engine}, only="triton")


def run(
    arm: tuple[WeightSource, Launcher], x: torch.Tensor, shared: int = WIDTH, tape: Any = None
) -> tuple[torch.Tensor, ExpertMlp]:
    source, launcher = arm
    launcher.tape = tape
    shape = ExpertShape(HIDDEN, EXPERTS, CHOSEN, WIDTH, shared)
    with torch.inference_mode():
        mlp = ExpertMlp(source, PREFIX, shape, "silu")
        segments = [Segment(0, 0, len(x))]
        return mlp(x, StepContext(launcher, cast(CacheStore, NoCache()), segments, CPU)), mlp


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))


def wanted(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = block(x[None])[0]
    return found


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("residency", ["decoded", "packed", "panels"])
def test_float_weights_give_the_numbers_of_transformers(residency: str, tokens: int) -> None:
    block, x = block_of(), inputs(tokens)
    out, mlp = run(host(stored(block, QType.F32), residency), x)
    assert mlp.shared is None
    assert rms(out, wanted(block, x)) < 1e-5


@pytest.mark.parametrize(
    "qtype", [QType.Q8F16, QType.MQ4G256, QType.MQ4G256V2, QType.MQ6G256, QType.HFQ4G128]
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_format_gives_the_numbers_of_what_it_decodes_to(qtype: QType, tokens: int) -> None:
    block, x = block_of(), inputs(tokens)
    checkpoint = stored(block, qtype)
    want = wanted(block, x)
    # rounded activations are all that differs where there is more than the order of sums
    arms = {
        "packed": (host(checkpoint, "packed"), 1e-5),
        "panels": (host(checkpoint, "panels"), 2.5e-2),
        "float": (device(checkpoint, "float"), 1e-5),
        "int8": (device(checkpoint, "int8"), 2.5e-2),
    }
    for name, (arm, bound) in arms.items():
        out, mlp = run(arm, x)
        assert mlp.shared is None
        assert mlp.rotated == format_of(qtype).rotated
        assert rms(out, want) < bound, name


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_shared_expert_of_another_format_or_size(tokens: int) -> None:
    x = inputs(tokens)
    for shared, qtype in ((WIDTH, QType.Q8F16), (512, None)):
        block = block_of(shared)
        checkpoint = stored(block, QType.MQ4G256, shared=qtype)
        want = wanted(block, x)
        for arm, bound in (
            (host(checkpoint, "decoded"), 1e-5),
            (host(checkpoint, "panels"), 2.5e-2),
            (device(checkpoint, "float"), 1e-5),
            (device(checkpoint, "int8"), 2.5e-2),
        ):
            out, mlp = run(arm, x, shared)
            assert mlp.shared is not None
            assert rms(out, want) < bound


@pytest.mark.parametrize(("qtype", "launches"), [(QType.MQ4G256, 4), (QType.Q8F16, 3)])
def test_a_token_takes_few_launches(qtype: QType, launches: int) -> None:
    """Router and gate are one product, and the shared expert is one of the experts."""
    block, x = block_of(), inputs(1)
    tape: list[LaunchRecord] = []
    out, _ = run(device(stored(block, qtype, routes=QType.Q8F16), "float"), x, tape=tape)
    assert rms(out, wanted(block, x)) < 1e-5
    names = [record.op for record in tape]
    assert len(names) == launches
    rotation = ["fwht"] if qtype == QType.MQ4G256 else []
    assert names == ["route_packed", *rotation, "expert_gated", "expert_down"]


def test_an_activation_that_is_not_known_is_refused() -> None:
    source, _ = host(stored(block_of(), QType.F32), "decoded")
    with pytest.raises(UnsupportedError, match="activation"):
        ExpertMlp(source, PREFIX, ExpertShape(HIDDEN, EXPERTS, CHOSEN, WIDTH, WIDTH), "relu")
