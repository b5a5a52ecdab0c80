"""Products with packed and dense weights against float64, on every kernel that can make them."""

from __future__ import annotations

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms
from matrix_kit import as_multiplied, random_matrix, random_rows

from hipfire.kernels.elementwise import gelu_tanh_mul_ref, silu_mul_ref
from hipfire.kernels.gpu.engine import Arithmetic
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.products import GEMM_ROWS, linear, packed_gated, packed_linear
from hipfire.kernels.gpu.rows import packed_select
from hipfire.kernels.packed import PACKED_LAYOUTS

LAYOUTS = list(PACKED_LAYOUTS.values())
# one kernel's numbers of rows after the other: int8, matrix units, the library
TOKENS = (1, 2, 17, 129)
# rounding activations to int8 or bfloat16; large columns make the rest of their unit coarse
BOUNDS = {"int8": 3e-2, "float": 2e-6}


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return x.double() @ matrix.double().T


@pytest.mark.parametrize("arithmetic", ["int8", "float"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_products_with_packed_weights_match_float64(layout, tokens: int, arithmetic: Arithmetic) -> None:
    # rows that end inside a group and inside a unit, and rows of the matrix that fill no program
    matrix, x, scratch = random_matrix(layout, 13, 360), random_rows(tokens, 360), Poisoned()
    out = packed_linear(engine(arithmetic, scratch), x, matrix)
    assert relative_rms(out, product(x, matrix.dense())) < BOUNDS[arithmetic]
    scratch.check_guards()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nothing_but_the_activations_is_rounded_in_int8(layout, tokens: int) -> None:
    matrix, x, used = random_matrix(layout, 13, 360), random_rows(tokens, 360), engine()
    seen = as_multiplied(prepare(used, x, "int8"), 360)
    assert relative_rms(seen, x) < 2e-2
    assert relative_rms(packed_linear(used, x, matrix), product(seen, matrix.dense())) < 1e-6


@pytest.mark.parametrize("name", ["u4g128", "u4g256", "u4g128h"])
def test_codes_of_large_groups_are_not_rounded_on_matrix_units(name: str) -> None:
    matrix, x, used = random_matrix(PACKED_LAYOUTS[name], 13, 360), random_rows(5, 360), engine()
    seen = as_multiplied(prepare(used, x, "bf16"), 360)
    assert relative_rms(seen, x) < 4e-3
    assert relative_rms(packed_linear(used, x, matrix), product(seen, matrix.dense())) < 1e-5


@pytest.mark.parametrize("cols", [32, 576, 704, 2112, 2816])
@pytest.mark.parametrize("name", ["u4g128", "u4g256", "o6g16", "i8g32"])
def test_single_rows_of_many_widths(name: str, cols: int) -> None:
    matrix, x, scratch = random_matrix(PACKED_LAYOUTS[name], 5, cols), random_rows(1, cols), Poisoned()
    out = packed_linear(engine("int8", scratch), x, matrix)
    assert relative_rms(out, product(x, matrix.dense())) < BOUNDS["int8"]
    scratch.check_guards()


@pytest.mark.parametrize("rows", [1, 3, 66])
def test_matrices_of_few_rows(rows: int) -> None:
    matrix, x = random_matrix(PACKED_LAYOUTS["u4g128"], rows, 128), random_rows(2, 128)
    for arithmetic in ("int8", "float"):
        out = packed_linear(engine(arithmetic), x, matrix)
        assert relative_rms(out, product(x, matrix.dense())) < BOUNDS[arithmetic]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_gated_products(tokens: int, activation) -> None:
    matrix, x, scratch = (
        random_matrix(PACKED_LAYOUTS["u4g128h"], 22, 256),
        random_rows(tokens, 256),
        Poisoned(),
    )
    # gates of moderate size: where they are large, the activation is the identity
    x = x * 0.02
    gate, up = product(x, matrix.dense()).chunk(2, dim=-1)
    act = {"silu": silu_mul_ref, "gelu_pytorch_tanh": gelu_tanh_mul_ref}[activation]
    out = packed_gated(engine("int8", scratch), x, matrix, activation)
    assert relative_rms(out, act(gate.float(), up.float())) < 3e-2
    scratch.check_guards()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_embedding_rows_are_what_the_matrix_holds(layout) -> None:
    matrix, scratch = random_matrix(layout, 9, 360), Poisoned()
    ids = torch.tensor([8, 0, 8, 3], device=DEVICE)
    out = packed_select(engine(scratch=scratch), matrix, ids)
    # a GPU rounds scale times code plus minimum once, the reference twice
    assert relative_rms(out, matrix.select(ids)) < 2e-7
    scratch.check_guards()


@pytest.mark.parametrize("tokens", [1, 2, 40, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_with_dense_weights(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(37, 90, generator=generator).to(dtype).to(DEVICE)
    x, scratch = random_rows(tokens, 90), Poisoned()
    for arithmetic, bound in (("float", 2e-6), ("int8", 2e-2 if tokens > GEMM_ROWS else 2e-3)):
        out = linear(engine(arithmetic, scratch), x, weight)
        assert relative_rms(out, product(x, weight)) < bound
    scratch.check_guards()


def test_every_row_of_a_batch_is_what_it_would_be_alone_in_the_same_kernel() -> None:
    matrix, x = random_matrix(PACKED_LAYOUTS["u4g256"], 19, 512), random_rows(7, 512)
    whole = packed_linear(engine(), x, matrix)
    for first in (0, 2, 4):
        part = packed_linear(engine(), x[first : first + 3], matrix)
        assert torch.equal(part, whole[first : first + 3])
    one, two = (packed_linear(engine(), x[:count], matrix) for count in (1, 2))
    assert torch.equal(one[0], two[0])


def test_activations_may_be_columns_of_a_wider_tensor() -> None:
    matrix = random_matrix(PACKED_LAYOUTS["u4g32"], 6, 96)
    for tokens in (1, 3, 129):
        wide = random_rows(tokens, 200)
        x = wide[:, 41:137]
        out = packed_linear(engine(), x, matrix)
        assert torch.equal(out, packed_linear(engine(), x.contiguous(), matrix))


def test_zero_activations_and_zero_rows_give_zero() -> None:
    matrix = random_matrix(PACKED_LAYOUTS["u4g128"], 6, 96)
    for tokens in (1, 3, 129):
        assert not packed_linear(engine(), torch.zeros(tokens, 96, device=DEVICE), matrix).any()


def test_activations_are_prepared_once_for_all_products_of_them() -> None:
    used, x = engine(), random_rows(1, 96)
    first = prepare(used, x, "int8")
    assert prepare(used, x, "int8") is first
    used.settle()
    assert prepare(used, x, "int8") is not first
