"""Weights on packed matrices, alone and joined."""

from __future__ import annotations

import pytest
import torch
from packed_kit import block_cache, packed_matrix

from helpers import rms
from hipfire.base.errors import InternalError
from hipfire.base.qtypes import QType
from hipfire.base.types import CacheSpec
from hipfire.kernels.fwht import fwht256
from hipfire.kernels.launch import Launcher
from hipfire.kernels.packed import PACKED_LAYOUTS
from hipfire.layers.context import Segment, StepContext
from hipfire.layers.linear import Embedding, JoinedLinear, Linear
from hipfire.layers.weights import Joined, Weight, split_matrix
from hipfire.quant.registry import format_of

PLAIN, ROTATED = format_of(QType.HFQ4G256), format_of(QType.MQ4G256)
SIZES = (24, 8, 16)


def context(tokens: int) -> StepContext:
    cache, _ = block_cache((CacheSpec(1, 32),), "f32")
    return StepContext(Launcher(), cache, [Segment(0, 0, tokens)], torch.device("cpu"))


def activations(tokens: int, cols: int = 256) -> torch.Tensor:
    return torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_parts_of_a_joined_matrix_are_its_rows(layout: str, tokens: int) -> None:
    matrix = packed_matrix(sum(SIZES), 256, layout)
    for fmt in (PLAIN, ROTATED):
        joined = split_matrix(matrix, fmt, SIZES)
        assert joined.rotated == fmt.rotated
        x, step = activations(tokens), context(tokens)
        basis = fwht256(x) if fmt.rotated else x
        want = (basis.double() @ matrix.dense().double().T).split(SIZES, dim=1)
        together = JoinedLinear(joined)(x, step)
        apart = [Linear(part)(x, step) for part in joined.parts]
        for results in (together, apart):
            assert [result.shape for result in results] == [(tokens, size) for size in SIZES]
            assert all(rms(got, expected) < 1e-6 for got, expected in zip(results, want, strict=True))


@pytest.mark.parametrize("fmt", [PLAIN, ROTATED], ids=["plain", "rotated"])
def test_embedded_rows_are_in_the_original_basis(fmt: object) -> None:
    chosen = ROTATED if fmt is ROTATED else PLAIN
    matrix, ids = packed_matrix(40, 512), torch.tensor([3, 39, 3, 0])
    got = Embedding(Weight(chosen, 40, 512, packed=matrix), scale=4.0)(ids, context(4))
    dense = matrix.dense()[ids].double() * 4.0
    # rotating them gives what is stored
    assert rms(fwht256(got) if chosen.rotated else got, dense) < 1e-6


def test_weights_of_any_floating_type_are_used_as_they_are() -> None:
    dense = packed_matrix(40, 256).dense().to(torch.bfloat16)
    weight, x = Weight(PLAIN, 40, 256, resident=dense), activations(3)
    assert rms(Linear(weight)(x, context(3)), x.double() @ dense.double().T) < 1e-6
    assert torch.equal(weight.select(Launcher(), torch.tensor([7, 2])), dense[[7, 2]])


def test_what_does_not_belong_together_is_refused() -> None:
    matrix = packed_matrix(sum(SIZES), 256)
    with pytest.raises(InternalError, match="not the parts"):
        split_matrix(matrix, PLAIN, SIZES[:2])
    parts = [
        split_matrix(matrix, fmt, SIZES).parts[index] for index, fmt in enumerate((PLAIN, ROTATED, PLAIN))
    ]
    with pytest.raises(InternalError, match="not the parts"):
        Joined(tuple(parts), matrix)
    assert Joined(tuple(parts)).rotated
    with pytest.raises(InternalError, match="a weight holds"):
        Weight(PLAIN, 48, 256, packed=matrix, resident=matrix.dense())
