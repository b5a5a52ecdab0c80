"""Encoders and decoders against the slow scalar reference, byte for byte, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import quant_reference as slow
import torch

from hipfire.base.errors import ValidationError
from hipfire.base.qtypes import QType
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import all_formats, format_of

NAMES = sorted(slow.FORMATS)
RAGGED = [name for name in NAMES if not name.startswith("MQ")]
WRITERS = [found for found in all_formats() if found.encode is not None]


def by_name(name: str) -> WeightFormat:
    return format_of(QType[name])


def encode(found: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    assert found.encode is not None
    return found.encode(weight)


def groups_of_every_kind(cols: int) -> np.ndarray:
    """Rows of every kind: gaussian, constant, zeros of both signs, tiny, subnormal, large, one outlier."""
    rng = np.random.default_rng(11)
    base = rng.standard_normal((18, cols)).astype(np.float32)
    base[1] = 0.75
    base[2] = 0.0
    base[3] = -0.0
    base[4] = np.where(rng.random(cols) < 0.5, np.float32(0.0), np.float32(-0.0))
    base[5] *= np.float32(1e-8)
    base[6] *= np.float32(6e-8)
    base[7] *= np.float32(1e-42)
    base[8] = rng.integers(0, 3, cols).astype(np.float32) * np.float32(1.4e-45)
    base[9] = np.float32(1.0) + rng.integers(0, 2, cols).astype(np.float32) * np.float32(2**-23)
    base[10] *= np.float32(1e3)
    base[11] = base[11] * np.float32(1e-3)
    base[11, cols // 2] = 1e3
    base[12] = np.abs(base[12])
    base[13] = -np.abs(base[13]) - 5
    base[14] = np.round(base[14] * 4) / 4
    base[15] = rng.integers(-127, 128, cols).astype(np.float32) * np.float32(2**-24)
    base[16] = np.where(np.arange(cols) % 3 == 0, np.abs(base[16]), np.float32(-0.0))
    base[17] = -0.3
    return base


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cols", [256, 768])
def test_bytes_equal_the_scalar_encoder(name: str, cols: int) -> None:
    weights = groups_of_every_kind(cols)
    data = encode(by_name(name), torch.from_numpy(weights))
    assert data.dtype == torch.uint8
    assert data.numpy().tobytes() == slow.pack_rows(weights, name)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("cols", [1, 31, 33, 129, 255, 257, 704])
def test_short_groups_are_packed_row_by_row(name: str, cols: int) -> None:
    weights = groups_of_every_kind(cols)
    data = encode(by_name(name), torch.from_numpy(weights))
    assert data.numel() == by_name(name).nbytes(18, cols)
    assert data.numpy().tobytes() == slow.pack_rows(weights, name)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_bits_equal_the_scalar_decoder(name: str) -> None:
    weights = groups_of_every_kind(512)
    found = by_name(name)
    data = encode(found, torch.from_numpy(weights))
    raw = data.numpy().tobytes()
    stored = slow.unpack_flat(raw, name, 18, 512)
    assert np.array_equal(found.decode(data, 18, 512).numpy().view(np.int32), stored.view(np.int32))
    original = slow.unpack_flat(raw, name, 18, 512, original=found.rotated)
    assert np.array_equal(found.dense(data, 18, 512).numpy().view(np.int32), original.view(np.int32))


@pytest.mark.parametrize(
    ("found", "cols"),
    [(found, cols) for found in WRITERS for cols in (704, 768) if cols == 768 or not found.rotated],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_row_chunks_join_to_the_whole(found: WeightFormat, cols: int) -> None:
    weight = torch.randn(500, cols, generator=torch.Generator().manual_seed(12))
    whole = encode(found, weight)
    parts = [encode(found, weight[i : i + 77]) for i in range(0, 500, 77)]
    assert torch.equal(torch.cat(parts), whole)
    stride = found.row_nbytes(cols)
    decoded = found.decode(whole, 500, cols)
    assert torch.equal(found.decode(whole[123 * stride : 125 * stride], 2, cols), decoded[123:125])
    shuffled = whole.view(500, stride).flip(0).flatten()
    assert torch.equal(found.dense(shuffled, 500, cols), found.dense(whole, 500, cols).flip(0))


@pytest.mark.parametrize("found", WRITERS, ids=lambda found: found.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_is_computed_in_float32(found: WeightFormat, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(13)).to(dtype)
    assert torch.equal(encode(found, weight), encode(found, weight.to(torch.float32)))


@pytest.mark.parametrize("found", WRITERS, ids=lambda found: found.name)
def test_strided_parameters_are_read_and_left_alone(found: WeightFormat) -> None:
    weight = torch.nn.Parameter(torch.randn(512, 256, generator=torch.Generator().manual_seed(14)))
    kept = weight.detach().clone()
    data = encode(found, weight.t())
    assert torch.equal(data, encode(found, kept.t().contiguous()))
    assert not data.requires_grad
    assert torch.equal(weight.detach(), kept)


@pytest.mark.parametrize("found", WRITERS, ids=lambda found: found.name)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0)])
def test_a_matrix_without_weights_takes_no_bytes(found: WeightFormat, shape: tuple[int, int]) -> None:
    data = encode(found, torch.empty(shape))
    assert data.numel() == found.nbytes(*shape) == 0
    assert found.decode(data, *shape).shape == shape
    assert found.dense(data, *shape).shape == shape
    assert found.bits_per_weight(*shape) == 0.0


@pytest.mark.parametrize("found", WRITERS, ids=lambda found: found.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_with_their_place(found: WeightFormat, bad: float) -> None:
    weight = torch.zeros(600, 512)
    weight[587, 301] = bad
    with pytest.raises(ValidationError, match=f"{found.name} .*{bad} at row 587, column 301"):
        encode(found, weight)


def test_the_place_is_right_in_short_rows_too() -> None:
    weight = torch.zeros(700, 704)
    weight[650, 703] = float("nan")
    with pytest.raises(ValidationError, match="row 650, column 703"):
        encode(by_name("HFQ4G128"), weight)


@pytest.mark.parametrize("found", [f for f in WRITERS if f.rotated], ids=lambda found: found.name)
@pytest.mark.parametrize("cols", [1, 128, 255, 704, 2112])
def test_rotated_formats_refuse_widths_that_256_does_not_divide(found: WeightFormat, cols: int) -> None:
    with pytest.raises(
        ValidationError, match=f"{found.name} needs a multiple of 256 columns, not {cols}; use"
    ):
        encode(found, torch.zeros(2, cols))


@pytest.mark.parametrize(
    "weight", [torch.zeros(256), torch.zeros(1, 2, 256), torch.zeros(2, 256, dtype=torch.int8)]
)
def test_only_floating_matrices_are_encoded(weight: torch.Tensor) -> None:
    for found in WRITERS:
        with pytest.raises(ValidationError, match="floating-point matrix"):
            encode(found, weight)


def test_plain_formats_keep_their_own_bits() -> None:
    rng = np.random.default_rng(15)
    patterns = rng.integers(-(1 << 15), 1 << 15, (40, 64)).astype(np.int16)
    half = torch.from_numpy(patterns).view(torch.float16)
    half = torch.where(torch.isfinite(half), half, torch.zeros_like(half))
    assert torch.equal(encode(by_name("F16"), half).view(torch.int16), half.view(torch.int16).flatten())
    brain = torch.from_numpy(patterns).view(torch.bfloat16)
    brain = torch.where(torch.isfinite(brain), brain, torch.zeros_like(brain))
    assert torch.equal(encode(by_name("BF16"), brain).view(torch.int16), brain.view(torch.int16).flatten())
    single = torch.randn(40, 64, generator=torch.Generator().manual_seed(16))
    assert torch.equal(encode(by_name("F32"), single).view(torch.float32), single.flatten())


def test_plain_types_widen_exactly() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(64, 1024)
    data = patterns.view(torch.uint8).flatten()
    for qtype in (QType.BF16, QType.GGUF_BF16):
        wide = format_of(qtype).decode(data, 64, 1024).view(torch.int32)
        assert torch.equal(wide, patterns.to(torch.int32) << 16)
    for qtype in (QType.F16, QType.GGUF_F16):
        half = format_of(qtype).decode(data, 64, 1024).numpy()
        assert np.array_equal(half, patterns.numpy().view(np.float16).astype(np.float32), equal_nan=True)
    odd = torch.cat((torch.zeros(1, dtype=torch.uint8), data))[1:]
    single = format_of(QType.GGUF_F32).decode(odd, 32, 1024)
    assert torch.equal(single.view(torch.int32), data.view(torch.int32).view(32, 1024))


def test_f16_truncates_and_bf16_rounds_to_even() -> None:
    x = torch.tensor([[1.0 + 2**-10 - 2**-20, -1.0 - 2**-11, 2**-25, 65535.0]])
    f16 = by_name("F16")
    assert f16.decode(encode(f16, x), 1, 4).tolist() == [[1.0, -1.0, 0.0, 65504.0]]
    bf16 = by_name("BF16")
    assert bf16.decode(encode(bf16, torch.tensor([[1.0 + 2**-8, 1.0 + 3 * 2**-8]])), 1, 2).tolist() == [
        [1.0, 1.0 + 2**-6]
    ]
