"""The 256-point rotation: its signs, its bits, and the identities that inference rests on."""

from __future__ import annotations

import numpy as np
import pytest
import quant_reference as slow
import torch

from hipfire.base.errors import ValidationError
from hipfire.kernels.fwht import fwht256, inverse_fwht256, lcg_states, signs


def bitmap(values: torch.Tensor) -> str:
    return np.packbits(values.numpy() > 0, bitorder="little").tobytes().hex()


def dense_rotation() -> torch.Tensor:
    """R in float64, built from the Sylvester matrix and the published bitmaps."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(8):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    first = torch.tensor(np.array(slow.sign_list(slow.SIGNS_IN)), dtype=torch.float64)
    last = torch.tensor(np.array(slow.sign_list(slow.SIGNS_OUT)), dtype=torch.float64)
    return last[:, None] * hadamard * first[None, :] / 16.0


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(
    ("seed", "states", "bits", "plus"),
    [
        (42, [1250496027, 1116302264, 1000676753], slow.SIGNS_IN, 133),
        (1042, [959145955, 229938656, 651051161], slow.SIGNS_OUT, 125),
    ],
)
def test_signs_follow_the_published_generator(seed: int, states: list[int], bits: str, plus: int) -> None:
    assert lcg_states(3, seed) == states
    assert bitmap(signs(256, seed)) == bits
    assert int((signs(256, seed) > 0).sum()) == plus
    assert torch.equal(signs(128, seed), signs(256, seed)[:128])


def test_bits_equal_a_scalar_rotation() -> None:
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1.0], [1e-30], [1e30], [1e-42], [3.0], [0.0]]
    )
    want = [[v for k in (0, 256) for v in slow.rotate(list(row[k : k + 256]))] for row in x.numpy()]
    assert np.array_equal(fwht256(x).numpy().view(np.int32), np.array(want, dtype=np.float32).view(np.int32))
    back = [[v for k in (0, 256) for v in slow.unrotate(list(row[k : k + 256]))] for row in x.numpy()]
    assert np.array_equal(
        inverse_fwht256(x).numpy().view(np.int32), np.array(back, dtype=np.float32).view(np.int32)
    )


def test_matrix_is_the_signed_hadamard_matrix_and_orthogonal() -> None:
    want = dense_rotation()
    got = fwht256(torch.eye(256)).t()
    assert torch.equal(got.double(), want)
    assert torch.equal(want @ want.t(), torch.eye(256, dtype=torch.float64))
    assert not torch.equal(want, want.t())
    assert torch.equal(inverse_fwht256(torch.eye(256)).t().double(), want.t())


def test_rotation_against_float64_and_back() -> None:
    x = torch.randn(3, 5, 768, generator=torch.Generator().manual_seed(2))
    want = (x.double().view(3, 5, 3, 256) @ dense_rotation().t()).view(3, 5, 768)
    assert relative_rms(fwht256(x), want) < 3e-7
    assert relative_rms(inverse_fwht256(fwht256(x)), x) < 5e-7
    assert relative_rms(fwht256(fwht256(x)), x) > 0.5


def test_inner_products_survive_when_both_sides_are_rotated_forward() -> None:
    generator = torch.Generator().manual_seed(3)
    w, x = torch.randn(64, 1024, generator=generator), torch.randn(9, 1024, generator=generator)
    want = x.double() @ w.double().t()
    assert relative_rms(fwht256(x).double() @ fwht256(w).double().t(), want) < 1e-6
    assert relative_rms(inverse_fwht256(x).double() @ fwht256(w).double().t(), want) > 0.5


def test_segments_and_rows_do_not_influence_each_other() -> None:
    x = torch.randn(7, 1024, generator=torch.Generator().manual_seed(4))
    whole = fwht256(x)
    for row in range(7):
        for start in range(0, 1024, 256):
            assert torch.equal(fwht256(x[row, start : start + 256]), whole[row, start : start + 256])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_floating_input_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(5)).to(dtype)
    got = fwht256(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, fwht256(x.float()))


def test_the_argument_is_left_alone_and_may_be_strided() -> None:
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(6))
    kept = x.clone()
    got = fwht256(x.t())
    assert torch.equal(x, kept)
    assert torch.equal(got, fwht256(x.t().contiguous()))


def test_no_rows_give_no_rows() -> None:
    assert fwht256(torch.empty(0, 512)).shape == (0, 512)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(2, 255), "255"),
        (torch.zeros(704), "704"),
        (torch.zeros(256, dtype=torch.int32), "int32"),
        (torch.tensor(1.0), "0 dimensions"),
    ],
)
def test_what_cannot_be_rotated_is_refused(x: torch.Tensor, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        fwht256(x)
    with pytest.raises(ValidationError, match=said):
        inverse_fwht256(x)
