"""Elementwise steps on a GPU, or interpreted, against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms

from hipfire.base.errors import InternalError
from hipfire.kernels import elementwise as references
from hipfire.kernels.gpu import elementwise, rowwise

Kernel = Callable[..., torch.Tensor]
WIDTHS = (1, 7, 576, 1953, 2112)
BINARY = ("silu_mul", "gelu_tanh_mul", "mul_sigmoid", "add")
UNARY = (("scale", 25.3), ("scale", 1.0), ("softcap", 30.0), ("softcap", 1.0))


def _pair(name: str) -> tuple[Kernel, Kernel]:
    return getattr(elementwise, name), getattr(references, f"{name}_ref")


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4.0 * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", BINARY)
def test_two_halves_of_a_projection(name: str, width: int) -> None:
    kernel, reference = _pair(name)
    scratch = Poisoned()
    both = _random(3, 2 * width)
    x, y = both.chunk(2, dim=1)
    out = kernel(engine(scratch=scratch), x, y)
    scratch.check_guards()
    assert out.dtype == torch.float32
    # each row alone, so that none of them hides behind the others
    for row in range(3):
        wanted = reference(x[row].double(), y[row].double())
        torch.testing.assert_close(out[row], wanted, rtol=2e-5, atol=1e-5)
        assert wanted.abs().max() < 0.1 or relative_rms(out[row], wanted) < 1e-6


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("name", BINARY)
def test_rows_that_begin_anywhere_in_any_type(name: str, offset: int) -> None:
    kernel, reference = _pair(name)
    scratch = Poisoned()
    x = _random(3, 70, dtype=torch.bfloat16)[:, offset : offset + 61]
    y = _random(3, 61, seed=1, dtype=torch.float16)
    out = kernel(engine(scratch=scratch), x, y)
    scratch.check_guards()
    assert relative_rms(out, reference(x, y)) < 1e-6


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "number"), UNARY)
def test_a_tensor_and_a_number(name: str, number: float, width: int) -> None:
    kernel, reference = _pair(name)
    scratch = Poisoned()
    x = _random(3, width + 2)[:, 1:-1]
    out = kernel(engine(scratch=scratch), x, number)
    scratch.check_guards()
    assert relative_rms(out, reference(x, number)) < 1e-6


def test_values_far_out_stay_finite() -> None:
    x = torch.tensor([[-3e38, -1e4, -100.0, -20.0, 20.0, 100.0, 1e4, 3e38]], device=DEVICE)
    one = torch.ones_like(x)
    for name in ("silu_mul", "gelu_tanh_mul"):
        kernel, reference = _pair(name)
        # the cube of GELU overflows in the reference's float32
        wanted = reference(x.clamp(-1e10, 1e10), one)
        out = kernel(engine(), x.clamp(-1e10, 1e10), one)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-12)
    out = elementwise.softcap(engine(), x, 30.0)
    torch.testing.assert_close(out, references.softcap_ref(x, 30.0), rtol=1e-6, atol=0.0)


def test_softcap_keeps_the_digits_of_small_logits() -> None:
    x = torch.logspace(-8, 1, 500, dtype=torch.float32).unsqueeze(0)
    x = torch.cat((x, -x), dim=1).to(DEVICE)
    wanted = references.softcap_ref(x.cpu(), 1.0)
    exact = torch.tanh(x.cpu().double())
    assert ((elementwise.softcap(engine(), x, 1.0).cpu() - exact) / exact).abs().max() < 2e-6
    assert ((wanted - exact) / exact).abs().max() < 2e-6


def test_large_steps_give_bfloat16_to_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "ROWS_FLOAT32", 2)
    x, y = _random(3, 80), _random(3, 80, seed=1)
    for name in BINARY:
        kernel, reference = _pair(name)
        for arithmetic in ("int8", "float"):
            out = kernel(engine(arithmetic), x, y)
            half = arithmetic == "int8" and name != "add"
            assert out.dtype == (torch.bfloat16 if half else torch.float32)
            assert relative_rms(out, reference(x, y)) < (6e-3 if half else 1e-6)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        *((torch.float32, width) for width in (1, 65, 1953)),
        *((torch.bfloat16, width) for width in (3, 64, 2112)),
        *((torch.uint8, width) for width in (1, 18, 132, 1153)),
        (torch.int64, 5),
    ],
)
def test_gathered_rows_are_equal(dtype: torch.dtype, width: int) -> None:
    scratch = Poisoned()
    table = (20.0 + 4.0 * _random(9, width + 3)).to(dtype)[:, :width]
    rows = torch.tensor([8, 0, 3, 3, 1], device=DEVICE)
    out = elementwise.gather_rows(engine(scratch=scratch), table, rows)
    scratch.check_guards()
    assert out.dtype == dtype
    assert torch.equal(out, references.gather_rows_ref(table, rows))


def test_rows_are_gathered_by_a_column_of_a_step() -> None:
    table = _random(6, 4, 5)
    rows = torch.tensor([[5, 0], [2, 1], [4, 2]], device=DEVICE)[:, 0]
    out = elementwise.gather_rows(engine(), table, rows)
    assert torch.equal(out, references.gather_rows_ref(table, rows))


def test_rows_outside_of_the_table_read_nothing() -> None:
    out = elementwise.gather_rows(engine(), _random(4, 8), torch.tensor([4, -1, 2**40], device=DEVICE))
    assert torch.equal(out, torch.zeros(3, 8, device=DEVICE))


def test_unequal_shapes_are_refused() -> None:
    for name in BINARY:
        with pytest.raises(InternalError, match="must be equal"):
            _pair(name)[0](engine(), _random(2, 8), _random(1, 8))
    with pytest.raises(InternalError, match="contiguous"):
        elementwise.gather_rows(engine(), _random(4, 8).t(), torch.tensor([0], device=DEVICE))
