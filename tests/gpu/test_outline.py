"""The blocks that stand for all of a model's in rehearsals."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gpu_kit import TARGET
from gpu_model_kit import FAMILIES

from hipfire.base.qtypes import QType
from hipfire.base.types import TensorInfo
from hipfire.cache.block import BLOCK_MODES
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.layers.context import RopeTable
from hipfire.layers.decoder import Decoder
from hipfire.layers.outline import form, outline
from hipfire.runtime import gpu_site
from hipfire.runtime.gpu_weights import GpuWeights

META = torch.device("meta")


class _Described:
    kind = "safetensors"

    def __init__(self, tensors: dict[str, TensorInfo]) -> None:
        self.tensors = tensors


def _info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    """Experts have no kernels as floats, everything else has."""
    if "experts" in name and len(shape) > 1:
        rows = torch.Size(shape[:-1]).numel()
        return TensorInfo(name, QType.Q8F16, shape, rows * -(-shape[-1] // 32) * 34)
    return TensorInfo(name, QType.F32, shape, 4 * torch.Size(shape).numel())


def _model(oracle: str, layers: int) -> tuple[Decoder, object]:
    family = FAMILIES[oracle]
    fields = {**family.tiny, "model_type": next(iter(family.gguf_architectures)), "num_hidden_layers": layers}
    fields.pop("layer_types", None)
    config = family.from_hf(fields)
    tensors = {name: _info(name, shape) for name, shape in config.tensors().items()}
    source = GpuWeights(
        NamedCheckpoint(_Described(tensors), family.names, config.sizes.layers),
        heads=config.sizes.heads,
        kv_heads=config.sizes.kv_heads,
        device=META,
        take=lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8, device=META),
        upload=None,
    )
    return family.build(config, source), config


def _plan(model, config):
    return gpu_site.plan_scratch(
        model,
        config,
        BLOCK_MODES["bf16"],
        GpuEngine(META, TARGET, processors=4),
        slots=3,
        max_seq=300,
        chunk=260,
    )


@pytest.mark.parametrize("oracle", sorted(FAMILIES))
def test_a_shortened_model_takes_the_scratch_of_the_whole(oracle, monkeypatch):
    model, config = _model(oracle, 31)
    short = model.outline()
    assert len(short.blocks) < len(model.blocks) == 31
    found = _plan(model, config)
    monkeypatch.setattr(Decoder, "outline", lambda self: self)
    assert found == _plan(model, config)


@dataclass
class _Block:
    layer: int
    size: int


def test_orders_that_repeat_are_cut_to_some_rounds_that_end_alike(monkeypatch):
    monkeypatch.setattr("hipfire.layers.outline._is_part", lambda value: isinstance(value, _Block))
    for sizes, kept in (((1,) * 36, 4), ((1, 1, 2) * 12, 12), ((1, 1, 2) * 12 + (1,), 13), ((1, 2, 3), 3)):
        blocks = [_Block(layer, size) for layer, size in enumerate(sizes)]
        short = outline(blocks)
        assert len(short) == kept
        assert [block.size for block in short] == list(sizes[:kept])
        assert short[-1].size == sizes[-1]
    # one odd block, and nothing repeats
    assert len(outline([_Block(0, 1 + (place == 20)) for place in range(36)])) == 36


def test_tables_of_angles_count_by_what_they_are_and_tensors_by_form():
    one, same = RopeTable(torch.ones(4)), RopeTable(torch.ones(4))
    assert form(one) != form(same)
    assert form(one) == form(one)
    assert form(torch.ones(4)) == form(torch.zeros(4)) != form(torch.ones(5))
