"""Rounding rules and bit streams against scalar references, exhaustively where that is possible."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import quant_reference as slow
import torch

from hipfire.base.errors import ValidationError
from hipfire.quant import bitpack, scalar

BOUNDARIES = [
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF),  # zeros, float32 subnormals
    *(0x32FFFFFF, 0x33000000, 0x33000001, 0x337FFFFF),  # around 2^-25 .. 2^-24: the smallest f16
    *(0x33800000, 0xB3800000, 0x33800001, 0x33FFFFFF, 0x34000000),
    *(0x387FBFFF, 0x387FC000, 0x387FFFFF, 0x38800000),  # largest subnormal, smallest normal f16
    *(0x3F800000, 0x3F801FFF, 0x3F802000, 0xBF801FFF),
    *(0x477FE000, 0x477FFFFF, 0x47800000, 0xC77FFFFF),  # 65504, just below 65536, 65536
    *(0x7F7FFFFF, 0x7F800000, 0xFF800000),  # largest float32, infinities
    *(0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFF801FFF),  # quiet and signalling NaN
]


def from_patterns(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.astype(np.uint32).view(np.int32)).view(torch.float32)


def test_f16_conversion_drops_bits_for_every_kind_of_float32() -> None:
    rng = np.random.default_rng(7)
    any_bits = rng.integers(0, 1 << 32, 60_000, dtype=np.uint64)
    # random patterns rarely fall where float16 is finite, so take more from there
    near = (rng.integers(0x32, 0x49, 60_000, dtype=np.uint64) << 24) | rng.integers(
        0, 1 << 24, 60_000, dtype=np.uint64
    )
    near |= rng.integers(0, 2, 60_000, dtype=np.uint64) << 31
    every_exponent = np.array([(e << 23) | f for e in range(512) for f in (0, 1, 0x1FFF, 0x2000, 0x7FFFFF)])
    patterns = np.concatenate(
        [any_bits, near, every_exponent.astype(np.uint64), np.array(BOUNDARIES, dtype=np.uint64)]
    )
    got = scalar.f32_to_f16(from_patterns(patterns)).view(torch.int16).numpy().view(np.uint16)
    raw = patterns.astype("<u4").tobytes()
    want = [slow.f16_bits(v) for (v,) in struct.iter_unpack("<f", raw)]
    # unpacking to a Python float quiets signalling NaNs, which must not become infinities
    finite = ~np.isnan(patterns.astype(np.uint32).view(np.float32))
    assert np.array_equal(got[finite], np.array(want, dtype=np.uint16)[finite])
    nan = patterns[~finite].astype(np.uint32)
    assert np.array_equal(
        got[~finite], (nan >> 16 & 0x8000 | 0x7C00 | (nan & 0x7FFFFF) >> 13 | 1).astype(np.uint16)
    )


def test_f16_conversion_never_rounds_up() -> None:
    x = torch.tensor([1.0 + 2**-10 - 2**-23, 65535.996, 2**-14 - 2**-30, 3 * 2**-25])
    assert scalar.f32_to_f16(x).tolist() == [1.0, 65504.0, 2**-14 - 2**-24, 2**-24]
    assert torch.all(scalar.f32_to_f16(x) < x.to(torch.float16))


def test_every_f16_value_passes_unchanged() -> None:
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[torch.isfinite(halves)]
    assert torch.equal(scalar.f32_to_f16(halves.float()).view(torch.int16), halves.view(torch.int16))


@pytest.mark.parametrize("value", [65536.0, -1e30, float("inf"), float("nan")])
def test_header_that_does_not_fit_is_refused_with_another_format(value: float) -> None:
    with pytest.raises(ValidationError, match=r"a step of .* use HFQ6G256"):
        scalar.header_f16(torch.tensor([1.0, value]), what="a step", instead="HFQ6G256")
    assert scalar.header_f16(torch.tensor([65535.0]), what="a step", instead="").tolist() == [65504.0]


def test_codes_round_half_up_and_saturate() -> None:
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0.0)))
    x = torch.tensor(
        [-3.0, -0.5, 0.0, 0.49, 0.5, 1.5, 14.5, 15.4, 16.0, 300.0, 1e30, float("inf"), float("nan")]
    )
    assert scalar.trunc_u8(x, 15).tolist() == [0, 0, 0, 0, 1, 2, 15, 15, 15, 15, 15, 15, 0]
    # the rule adds 0.5 in float32, which rounds this sum up to 1
    assert scalar.trunc_u8(torch.tensor([below_half]), 15).tolist() == [1]


def test_int8_rounds_half_away_from_zero_and_saturates() -> None:
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0.0)))
    pairs = {
        0.5: 1,
        -0.5: -1,
        1.5: 2,
        2.5: 3,
        -2.5: -3,
        below_half: 0,
        -below_half: 0,
        126.5: 127,
        127.5: 127,
    }
    pairs |= {-127.5: -128, -128.5: -128, 1e30: 127, float("-inf"): -128, 0.0: 0, 3.49: 3}
    assert scalar.round_away_i8(torch.tensor(list(pairs))).tolist() == list(pairs.values())
    assert scalar.round_away_i8(torch.tensor([float("nan")])).tolist() == [0]


def test_minimum_keeps_the_sign_of_zero_in_any_order() -> None:
    for values in ([0.0, -0.0, 1.0], [-0.0, 0.0, 1.0], [1.0, 0.0, -0.0]):
        lo, hi = scalar.group_range(torch.tensor([values]))
        assert torch.signbit(lo).item()
        assert (lo.item(), hi.item()) == (0.0, 1.0)
    lo, _ = scalar.group_range(torch.tensor([[0.0, 0.0], [-2.0, -0.0], [-0.0, -0.0]]))
    assert lo.flatten().tolist() == [0.0, -2.0, 0.0]
    assert torch.signbit(lo).flatten().tolist() == [False, True, True]


def test_division_is_correctly_rounded() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(8))
    want = (x.numpy().astype(np.float64) / 127.0).astype(np.float32)
    assert np.array_equal(scalar.divide(x, 127.0).numpy(), want)
    assert not np.array_equal((x.numpy() * np.float32(1 / 127.0)), want)


def test_elements_are_read_at_any_byte() -> None:
    values = torch.tensor([[1.5, -2.0, 3.25]])
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), scalar.as_bytes(values).flatten()))[1:].view(
        1, 12
    )
    assert torch.equal(scalar.from_bytes(shifted, torch.float32), values)


def test_every_byte_of_two_nibbles() -> None:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256)
    codes = bitpack.unpack4(packed)
    assert codes.flatten().tolist() == [nibble for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert torch.equal(bitpack.pack4(codes), packed)


def test_every_word_of_four_six_bit_codes() -> None:
    words = np.arange(1 << 24, dtype=np.uint32)
    packed = torch.from_numpy(words.view(np.uint8).reshape(-1, 4)[:, :3].reshape(64, -1).copy())
    codes = bitpack.unpack6(packed)
    by_word = codes.view(-1, 4).numpy()
    for place in range(4):
        assert np.array_equal(by_word[:, place], (words >> (6 * place) & 63).astype(np.uint8))
    assert torch.equal(bitpack.pack6(codes), packed)


@pytest.mark.parametrize("bits", [4, 6])
def test_streams_equal_one_long_little_endian_integer(bits: int) -> None:
    codes = np.random.default_rng(9).integers(0, 1 << bits, (3, 256)).astype(np.uint8)
    packed = bitpack.PACK[bits](torch.from_numpy(codes))
    for row in range(3):
        assert packed[row].numpy().tobytes() == slow.stream(codes[row].tolist(), bits)
    assert np.array_equal(bitpack.UNPACK[bits](packed).numpy(), codes)
