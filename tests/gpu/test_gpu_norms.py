"""Norms on a GPU, or interpreted, against their references."""

from __future__ import annotations

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms

from hipfire.base.errors import InternalError
from hipfire.kernels.fwht import fwht256
from hipfire.kernels.gpu import norms, rotate, rowwise
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.residual import residual_norm_ref
from hipfire.kernels.rms_norm import rms_norm_ref

EPS = 1e-6
# what bfloat16 costs where it is cut, as the interpreter does
HALF = 6e-3
# a row of one column, odd ones, a model's own, and the longest
WIDTHS = (1, 7, 64, 80, 576, 704, 1953, 2112, 2816, 4096, 16384)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def _inside(x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    """Return x [T, D] as a slice of wider rows of NaN."""
    wide = torch.full((x.shape[0], before + x.shape[1] + behind), torch.nan, dtype=x.dtype, device=x.device)
    view = wide[:, before : before + x.shape[1]]
    view.copy_(x)
    return view


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_of_any_width(width: int) -> None:
    scratch = Poisoned()
    x, weight = _random(3, width), _random(width, seed=1)
    out = norms.rms_norm(engine(scratch=scratch), x, weight, EPS, 1.0)
    scratch.check_guards()
    assert out.dtype == torch.float32
    assert relative_rms(out, rms_norm_ref(x, weight, EPS, 1.0)) < 1e-6


@pytest.mark.parametrize(("before", "behind"), [(1, 0), (3, 4), (8, 8)])
def test_rms_norm_of_slices_that_begin_anywhere(before: int, behind: int) -> None:
    scratch = Poisoned()
    x = _inside(_random(5, 100), before, behind)
    weight = _random(100 + before, seed=1)[before:]
    out = norms.rms_norm(engine(scratch=scratch), x, weight, EPS)
    scratch.check_guards()
    assert relative_rms(out, rms_norm_ref(x, weight, EPS)) < 1e-6


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("heads", [1, 3])
def test_rms_norm_of_heads_in_a_projection(size: int, heads: int) -> None:
    scratch = Poisoned()
    x = _inside(_random(5, heads * size, dtype=torch.bfloat16), 8, 24).unflatten(1, (heads, size))
    weight = _random(size, seed=1)
    out = norms.rms_norm(engine(scratch=scratch), x, weight, EPS)
    scratch.check_guards()
    assert out.shape == (5, heads, size)
    assert out.dtype == torch.float32
    for token in range(5):
        assert relative_rms(out[token], rms_norm_ref(x[token], weight, EPS)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_computes_in_float32_whatever_it_reads(dtype: torch.dtype) -> None:
    x, weight = _random(2, 200, dtype=dtype), _random(200, seed=1, dtype=dtype)
    assert relative_rms(norms.rms_norm(engine(), x, weight, EPS), rms_norm_ref(x, weight, EPS)) < 1e-6


@pytest.mark.parametrize("width", [1, 80, 576, 2816, 8200])
@pytest.mark.parametrize("sandwich", [False, True])
def test_residual_norm_of_any_width(width: int, sandwich: bool) -> None:
    scratch = Poisoned()
    x, delta = _random(3, width), _inside(_random(3, width, seed=1), 3, 5)
    weight = _random(width, seed=2)
    delta_weight = _random(width, seed=3) if sandwich else None
    got = norms.residual_norm(engine(scratch=scratch), x, delta, weight, EPS, 1.0, delta_weight)
    scratch.check_guards()
    wanted = residual_norm_ref(x, delta, weight, EPS, 1.0, delta_weight)
    for value, reference in zip(got, wanted, strict=True):
        assert value.dtype == torch.float32
        assert relative_rms(value, reference) < 1e-6


def test_residual_norm_without_a_delta_weight_adds_exactly() -> None:
    x, delta = _random(2, 576), _random(2, 576, seed=1, dtype=torch.bfloat16)
    total, _ = norms.residual_norm(engine(), x, delta, _random(576, seed=2), EPS)
    assert torch.equal(total, x + delta.float())


def test_zeros_are_normalized_to_zeros() -> None:
    zeros, weight = torch.zeros(2, 80, device=DEVICE), _random(80)
    total, normed = norms.residual_norm(engine(), zeros, zeros, weight, EPS, 0.0, weight)
    assert not total.any()
    assert not normed.any()


def test_large_steps_give_bfloat16_unless_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "ROWS_FLOAT32", 2)
    x, delta, weight = _random(3, 160), _random(3, 160, seed=1), _random(160, seed=2)
    wanted = residual_norm_ref(x, delta, weight, EPS)
    for arithmetic, kind, bound in (("int8", torch.bfloat16, HALF), ("float", torch.float32, 1e-6)):
        total, normed = norms.residual_norm(engine(arithmetic), x, delta, weight, EPS)
        alone = norms.rms_norm(engine(arithmetic), total, weight, EPS)
        assert (total.dtype, normed.dtype, alone.dtype) == (torch.float32, kind, kind)
        assert relative_rms(total, wanted[0]) < 1e-6
        assert relative_rms(normed, wanted[1]) < bound
        assert relative_rms(alone, wanted[1]) < bound


def test_steps_of_up_to_256_tokens_are_float32() -> None:
    kinds = [rowwise.product_type(engine(), tokens) for tokens in (1, 256, 257)]
    assert kinds == [torch.float32, torch.float32, torch.bfloat16]
    assert rowwise.product_type(engine("float"), 257) == torch.float32


def test_a_row_does_not_depend_on_its_neighbors() -> None:
    x, delta, weight = _random(17, 80), _random(17, 80, seed=1), _random(80, seed=2)
    together = norms.rms_norm(engine(), x, weight, EPS)
    total, normed = norms.residual_norm(engine(), x, delta, weight, EPS)
    for row in (0, 5, 16):
        one = slice(row, row + 1)
        assert torch.equal(norms.rms_norm(engine(), x[one], weight, EPS), together[one])
        alone = norms.residual_norm(engine(), x[one], delta[one], weight, EPS)
        assert torch.equal(alone[0], total[one])
        assert torch.equal(alone[1], normed[one])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("width", [256, 768])
def test_a_norm_leaves_what_products_read(width: int, rotated: bool) -> None:
    scratch = Poisoned()
    run, other = engine(scratch=scratch), engine()
    x, delta, weight = _random(2, width), _random(2, width, seed=1), _random(width, seed=2)
    _, normed = norms.residual_norm(run, x, delta, weight, EPS, rotated=rotated)
    read = rotate.fwht(run, normed) if rotated else normed
    scratch.check_guards()
    if rotated:
        assert torch.equal(read.cpu(), fwht256(normed.cpu()))
        assert run.prepared(rotate.ROTATED, normed) is read
    made, wanted = run.prepared("int8", read), prepare(other, read, "int8")
    assert torch.equal(made.values, wanted.values)
    assert relative_rms(made.scales, wanted.scales) < 1e-6
    assert relative_rms(made.sums, wanted.sums) < 1e-5


def test_a_norm_leaves_no_int8_where_products_read_floats() -> None:
    x, delta, weight = _random(3, 256), _random(3, 256, seed=1), _random(256, seed=2)
    for run, rows in ((engine("float"), 1), (engine(), 3)):
        _, normed = norms.residual_norm(run, x[:rows], delta[:rows], weight, EPS, rotated=True)
        rotated = rotate.fwht(run, normed)
        assert torch.equal(rotated.cpu(), fwht256(normed.cpu()))
        assert run.prepared("int8", rotated) is None
        assert run.prepared("int8", normed) is None


def test_no_rows_are_no_work() -> None:
    empty, weight = torch.empty(0, 80, device=DEVICE), _random(80)
    assert norms.rms_norm(engine(), empty, weight, EPS).shape == (0, 80)


def test_impossible_rows_are_refused() -> None:
    weight = _random(16)
    with pytest.raises(InternalError, match="1 to 16384"):
        norms.rms_norm(engine(), torch.zeros(1, 16385, device=DEVICE), weight, EPS)
    with pytest.raises(InternalError, match="must be equal"):
        norms.residual_norm(engine(), _random(2, 16), _random(1, 16), weight, EPS)
    with pytest.raises(InternalError, match="no common distance"):
        norms.rms_norm(engine(), _random(16, 3).t(), weight, EPS)
