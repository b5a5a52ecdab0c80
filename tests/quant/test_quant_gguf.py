"""GGML decoders bit for bit against the reference package, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import GGUF_BASE
from hipfire.quant.gguf_other import dequantize_other
from hipfire.quant.registry import format_of

GGML = gguf.GGMLQuantizationType
# where the float16 fields of a block are
F16_FIELDS = {
    GGML.Q4_0: (0,),
    GGML.Q4_1: (0, 2),
    GGML.Q5_0: (0,),
    GGML.Q8_0: (0,),
    GGML.Q4_K: (0, 2),
    GGML.Q5_K: (0, 2),
    GGML.Q6_K: (208,),
}
OTHERS = {
    GGML.Q5_1: (0, 2),
    GGML.Q2_K: (80, 82),
    GGML.Q3_K: (108,),
    GGML.IQ4_NL: (0,),
    GGML.IQ4_XS: (0,),
    GGML.IQ3_S: (0,),
    GGML.IQ3_XXS: (0,),
    GGML.IQ2_S: (0,),
    GGML.IQ2_XS: (0,),
    GGML.IQ2_XXS: (0,),
    GGML.IQ1_S: (0,),
    GGML.TQ1_0: (52,),
    GGML.TQ2_0: (64,),
}


def random_blocks(kind: GGML, fields: tuple[int, ...], rows: int, blocks: int) -> np.ndarray:
    """Random bytes with finite float16 of every magnitude in the given places: uint8 [rows, bytes]."""
    rng = np.random.default_rng(int(kind) + 31)
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    for offset in fields:
        bits = rng.integers(0, 0x7C00, rows * blocks) | rng.integers(0, 2, rows * blocks) << 15
        bits[:3] = (0, 1, 0x8001)
        data[:, offset : offset + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", F16_FIELDS, ids=lambda kind: kind.name)
def test_decoders_equal_the_reference_package(kind: GGML) -> None:
    found = format_of(GGUF_BASE + kind)
    # more weights than are decoded at a time
    blocks, rows = 4096 // found.group, 70
    data = random_blocks(kind, F16_FIELDS[kind], rows, blocks)
    want = gguf.quants.dequantize(data, kind)
    got = found.decode(torch.from_numpy(data).flatten(), rows, 4096)
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy().view(np.int32), want.view(np.int32))
    assert found.encode is None
    assert not found.rotated


@pytest.mark.parametrize("kind", [*F16_FIELDS, *OTHERS], ids=lambda kind: kind.name)
def test_geometry_is_that_of_the_reference_package(kind: GGML) -> None:
    found = format_of(GGUF_BASE + kind)
    assert (found.group, found.group_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert found.name == f"GGUF_{kind.name}"
    assert found.qtype == GGUF_BASE + kind


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_other_types_are_decoded_for_conversion(kind: GGML) -> None:
    found = format_of(GGUF_BASE + kind)
    cols = 3 * found.group
    data = random_blocks(kind, OTHERS[kind], 5, 3)
    got = found.decode(torch.from_numpy(data).flatten(), 5, cols)
    assert got.shape == (5, cols)
    for row in range(5):
        want = np.concatenate(
            [gguf.quants.dequantize(part, kind) for part in data[row].reshape(3, 1, -1)], axis=None
        )
        assert np.array_equal(got[row].numpy().view(np.int32), want.view(np.int32))
    assert found.encode is None
    assert torch.equal(found.dense(torch.from_numpy(data).flatten(), 5, cols), got)


def test_q5_1_by_hand() -> None:
    scale, minimum = np.float16(0.5), np.float16(-3.0)
    low, fifth = np.arange(16, dtype=np.uint8), 0x0001_8003
    packed = low | (15 - low) << 4
    data = scale.tobytes() + minimum.tobytes() + fifth.to_bytes(4, "little") + packed.tobytes()
    got = dequantize_other(GGML.Q5_1, torch.frombuffer(bytearray(data), dtype=torch.uint8), 1, 32)
    codes = [int(low[i]) for i in range(16)] + [15 - i for i in range(16)]
    want = [(code + 16 * (fifth >> i & 1)) * 0.5 - 3.0 for i, code in enumerate(codes)]
    assert got.tolist() == [want]


def test_every_type_that_the_package_decodes_has_a_format_and_no_other() -> None:
    for kind in GGML:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError:
            with pytest.raises(UnsupportedError, match=f"GGML type {kind.name} cannot be decoded"):
                format_of(GGUF_BASE + kind)
        else:
            assert format_of(GGUF_BASE + kind).name == f"GGUF_{kind.name}"


@pytest.mark.parametrize(
    "kind", [GGML.I8, GGML.I32, GGML.F64, GGML.Q8_1, GGML.Q8_K], ids=lambda kind: kind.name
)
def test_types_that_hold_no_weights_are_named(kind: GGML) -> None:
    with pytest.raises(UnsupportedError, match=f"GGML type {kind.name} .*use a GGUF file"):
        format_of(GGUF_BASE + kind)


@pytest.mark.parametrize("number", [999, 4, 255])
def test_a_number_that_no_type_has_is_named(number: int) -> None:
    with pytest.raises(UnsupportedError, match=f"GGML type {number} "):
        format_of(GGUF_BASE + number)


def test_other_types_check_their_size() -> None:
    with pytest.raises(ArtifactError, match="takes 168 bytes but 167 are stored"):
        dequantize_other(GGML.Q2_K, torch.zeros(167, dtype=torch.uint8), 1, 512)
    with pytest.raises(ArtifactError, match="blocks of 256 weights"):
        dequantize_other(GGML.Q2_K, torch.zeros(84, dtype=torch.uint8), 1, 200)
    assert dequantize_other(GGML.Q2_K, torch.zeros(0, dtype=torch.uint8), 0, 512).shape == (0, 512)
