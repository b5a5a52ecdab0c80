"""The rotation on a GPU, or interpreted, against its reference: bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms

from hipfire.base.errors import ValidationError
from hipfire.kernels.fwht import fwht256, inverse_fwht256
from hipfire.kernels.gpu import rotate, rowwise

PAIRS = ((rotate.fwht, fwht256), (rotate.inverse_fwht, inverse_fwht256))


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("segments", [1, 2, 3, 11])
@pytest.mark.parametrize("pair", PAIRS, ids=("forward", "inverse"))
def test_rotations_equal_the_reference_bit_for_bit(pair: tuple, segments: int) -> None:
    kernel, reference = pair
    scratch = Poisoned()
    x = _random(3, segments * 256)
    out = kernel(engine(scratch=scratch), x)
    scratch.check_guards()
    assert torch.equal(out.cpu(), reference(x.cpu()))


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("pair", PAIRS, ids=("forward", "inverse"))
def test_rows_begin_anywhere_in_any_type(pair: tuple, offset: int) -> None:
    kernel, reference = pair
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = _random(2, 530).to(dtype)[:, offset : offset + 512]
        assert torch.equal(kernel(engine(), x).cpu(), reference(x.cpu()))


def test_the_inverse_undoes_the_rotation() -> None:
    x = _random(2, 512)
    rotated = rotate.fwht(engine(), x)
    assert relative_rms(rotate.inverse_fwht(engine(), rotated), x) < 1e-6
    assert relative_rms(rotated, x) > 0.5


def test_large_steps_give_bfloat16_unless_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "ROWS_FLOAT32", 2)
    x = _random(3, 256)
    wanted = fwht256(x.cpu())
    half = rotate.fwht(engine(), x)
    assert half.dtype == torch.bfloat16
    assert relative_rms(half, wanted) < 6e-3
    assert torch.equal(rotate.fwht(engine("float"), x).cpu(), wanted)
    assert torch.equal(rotate.inverse_fwht(engine(), x).cpu(), inverse_fwht256(x.cpu()))


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValidationError, match="multiple of 256"):
        rotate.fwht(engine(), _random(1, 300))
