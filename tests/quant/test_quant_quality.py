"""How far decoded weights may lie from their source: bounds from each group's own range, on any input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.base.errors import ValidationError
from hipfire.base.qtypes import QType
from hipfire.kernels.fwht import fwht256
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of

BITS = {
    "HFQ4G256": 4,
    "HFQ4G128": 4,
    "HFQ6G256": 6,
    "MQ4G256": 4,
    "MQ6G256": 6,
    "MQ4G256V2": 4,
    "MQ6G256V2": 6,
}
V2 = ["MQ4G256V2", "MQ6G256V2"]
F32_HEADERS = [name for name in BITS if name not in V2]
WRITERS = [*BITS, "Q8F16"]
F16_LOSS = 2.0**-10  # what truncation to float16 may take from a normal number
F16_TINY = 2.0**-24  # and from a subnormal one


def round_trip(found: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    assert found.encode is not None
    return found.decode(found.encode(weight), *weight.shape)


def bound(name: str, groups: torch.Tensor) -> torch.Tensor:
    """Return the largest allowed error of each group of float64 [n, g]: [n, 1]."""
    lo, hi = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    largest = groups.abs().amax(1, keepdim=True)
    rounding = largest * 2.0**-22 + 2.0**-148
    if name == "Q8F16":
        return 0.5 * largest / 127 + largest * F16_LOSS + 127 * F16_TINY + rounding
    qmax = (1 << BITS[name]) - 1
    step = (hi - lo) / qmax
    if name in V2:
        lost = (hi - lo) * F16_LOSS + lo.abs() * F16_LOSS + (qmax + 1) * F16_TINY
        return 0.5 * step + lost + rounding
    # a step below the smallest normal number has few bits itself
    return 0.5 * step + qmax * 2.0**-149 + rounding


def assert_within(name: str, stored_basis: torch.Tensor, decoded: torch.Tensor, group: int) -> None:
    assert bool(torch.isfinite(decoded).all())
    for row, got in zip(stored_basis.double(), decoded.double(), strict=True):
        for start in range(0, row.numel(), group):
            want = row[start : start + group].unsqueeze(0)
            error = (got[start : start + group] - want).abs().max()
            assert float(error) <= float(bound(name, want))


@st.composite
def matrices(draw: st.DrawFn, *, whole: bool) -> torch.Tensor:
    cols = draw(st.sampled_from([256, 512])) if whole else draw(st.integers(1, 700))
    rows = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, cols, generator=generator) * 10.0 ** draw(st.integers(-9, 3))
    weight += draw(st.sampled_from([0.0, 0.0, 1.0, -3.0, 1e-4]))
    kind = draw(st.sampled_from(["gaussian", "outlier", "sparse", "constant", "few levels"]))
    if kind == "outlier":
        weight[0, draw(st.integers(0, cols - 1))] *= 1000.0
    elif kind == "sparse":
        weight *= torch.rand(rows, cols, generator=generator) < 0.1
    elif kind == "constant":
        weight[:] = weight[0, 0]
    elif kind == "few levels":
        weight = weight.sign() * weight[0, 0]
    return weight


@pytest.mark.parametrize("name", ["HFQ4G256", "HFQ4G128", "HFQ6G256", "Q8F16"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(weight=matrices(whole=False))
def test_rows_of_any_length_stay_within_half_a_step(name: str, weight: torch.Tensor) -> None:
    found = format_of(QType[name])
    assert_within(name, weight, round_trip(found, weight), found.group)


@pytest.mark.parametrize("name", ["MQ4G256", "MQ6G256", *V2])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(weight=matrices(whole=True))
def test_rotated_rows_stay_within_half_a_step(name: str, weight: torch.Tensor) -> None:
    group = 128 if name in V2 else 256
    assert_within(name, fwht256(weight), round_trip(format_of(QType[name]), weight), group)


def hard_groups() -> dict[str, torch.Tensor]:
    base = torch.randn(4, 512, generator=torch.Generator().manual_seed(21)).clamp(-3, 3) / 3
    outlier = base * 1e-3
    outlier[:, 100] = 1e3
    return {str(scale): base * scale for scale in (1e-8, 6e-8, 1e4, 6e4, 1e30)} | {"outlier": outlier}


HARD = hard_groups()
# rotating 6e4 can give a minimum beyond float16
REFUSED = {
    ("Q8F16", "1e+30"),
    ("F16", "1e+30"),
    *((name, kind) for name in V2 for kind in ("60000.0", "1e+30")),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", [*WRITERS, "F16", "BF16", "F32"])
def test_extreme_amplitudes_are_held_or_refused_never_spoilt(name: str, kind: str) -> None:
    found = format_of(QType[name])
    assert found.encode is not None
    if (name, kind) in REFUSED:
        with pytest.raises(ValidationError, match=r"does not fit in float16 .*; use \w+") as caught:
            found.encode(HARD[kind])
        instead = caught.value.hint.split()[1]
        other = format_of(QType[instead])
        assert bool(torch.isfinite(round_trip(other, HARD[kind])).all())
        return
    decoded = round_trip(found, HARD[kind])
    if name in WRITERS:
        source = fwht256(HARD[kind]) if found.rotated else HARD[kind]
        assert_within(name, source, decoded, 128 if name in V2 else found.group)
    else:
        kept = {"F16": F16_LOSS, "BF16": 2.0**-8, "F32": 0.0}[name]
        floor = F16_TINY if name == "F16" else 0.0
        assert bool(((decoded - HARD[kind]).abs() <= HARD[kind].abs() * kept + floor).all())


@pytest.mark.parametrize("name", F32_HEADERS)
def test_a_range_beyond_float32_is_refused(name: str) -> None:
    weight = torch.zeros(1, 256)
    weight[0, 0], weight[0, 1] = 3e38, -3e38
    weight[0, 2:] = torch.randn(254, generator=torch.Generator().manual_seed(22)).sign() * 3e38
    encode = format_of(QType[name]).encode
    assert encode is not None
    with pytest.raises(ValidationError, match="more than float32 can hold"):
        encode(weight)


def test_bf16_refuses_what_would_round_to_infinity() -> None:
    encode = format_of(QType.BF16).encode
    assert encode is not None
    with pytest.raises(ValidationError, match="does not fit in bfloat16; use F32"):
        encode(torch.tensor([[3.4028e38]]))


def test_smallest_scales_survive() -> None:
    codes = torch.arange(32.0) * 4 - 60
    codes[0] = 127
    q8 = (codes * F16_TINY).unsqueeze(0)
    assert torch.equal(round_trip(format_of(QType.Q8F16), q8), q8)
    tiny = torch.arange(128.0).remainder(16).unsqueeze(0) * 2.0**-127
    assert torch.equal(round_trip(format_of(QType.HFQ4G128), tiny), tiny)


def test_a_step_without_a_finite_inverse_stays_within_the_range() -> None:
    weight = torch.arange(128.0).remainder(16).unsqueeze(0) * 2.0**-149
    decoded = round_trip(format_of(QType.HFQ4G128), weight)
    assert float(decoded.min()) == 0.0
    assert float(decoded.max()) == 15 * 2.0**-149


def test_a_v2_step_that_truncates_to_zero_decodes_to_the_stored_minimum() -> None:
    found = format_of(QType.MQ4G256V2)
    assert found.encode is not None
    data = found.encode(torch.randn(1, 256, generator=torch.Generator().manual_seed(23)) * 1e-8)
    assert not bool(data[8:].any())
    assert torch.equal(found.decode(data, 1, 256), torch.zeros(1, 256))


@pytest.mark.parametrize("constant", [0.75, -3.14159, 1e-30, 0.0])
def test_constant_rows_decode_to_the_constant(constant: float) -> None:
    weight = torch.full((2, 704), constant)
    for name in ("HFQ4G256", "HFQ4G128", "HFQ6G256"):
        assert torch.equal(round_trip(format_of(QType[name]), weight), weight)


def loss(name: str, weight: torch.Tensor) -> float:
    found = format_of(QType[name])
    assert found.encode is not None
    dense = found.dense(found.encode(weight), *weight.shape).double()
    return float((dense - weight.double()).norm() / weight.double().norm())


def test_more_bits_never_lose_more() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(24)) * 0.02
    order = ["F32", "F16", "Q8F16", "HFQ6G256", "HFQ4G128", "HFQ4G256"]
    losses = [loss(name, weight) for name in order]
    assert losses == sorted(losses)
    assert losses[0] == 0.0
    # halving the step halves the loss: 4 steps of a bit between 15 and 63 levels
    assert losses[3] == pytest.approx(losses[5] * 15 / 63, rel=0.05)
    for six, four in (("MQ6G256", "MQ4G256"), ("MQ6G256V2", "MQ4G256V2")):
        assert loss("Q8F16", weight) < loss(six, weight) < loss(four, weight) < 0.12
        assert loss(six, weight) == pytest.approx(loss(four, weight) * 15 / 63, rel=0.1)


def test_rotation_pays_where_rows_have_outliers() -> None:
    weight = torch.randn(32, 1024, generator=torch.Generator().manual_seed(25)) * 0.02
    weight[:, ::128] *= 30
    small = torch.ones(1024, dtype=torch.bool)
    small[::128] = False
    lost = {}
    for name in ("HFQ4G256", "MQ4G256", "MQ4G256V2"):
        found = format_of(QType[name])
        assert found.encode is not None
        dense = found.dense(found.encode(weight), 32, 1024)
        lost[name] = float((dense - weight)[:, small].norm())
    assert lost["MQ4G256"] < 0.6 * lost["HFQ4G256"]
    assert lost["MQ4G256V2"] < lost["MQ4G256"] * 1.02
