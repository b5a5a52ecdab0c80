"""Packed matrices hold what the formats decode, whatever the rows' widths."""

from __future__ import annotations

import pytest
import torch

from hipfire.kernels.packed import PackedMatrix
from hipfire.quant.packing import PACKINGS, Packing
from hipfire.quant.registry import format_of

# what the scales of K formats are rounded to
ROUNDED = {"GGUF_Q4_K", "GGUF_Q5_K", "GGUF_Q6_K"}


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def random_blocks(qtype: int, rows: int, cols: int) -> torch.Tensor:
    """Return stored rows of random codes under headers that are finite floats of moderate size."""
    fmt = format_of(qtype)
    data = torch.randint(0, 256, (rows, fmt.row_nbytes(cols)), dtype=torch.uint8)
    blocks = data.view(-1, fmt.group_bytes)
    scale = torch.rand(len(blocks), 2) + 0.1
    if fmt.name in ("HFQ4G128", "HFQ4G256", "HFQ6G256", "MQ4G256", "MQ6G256"):
        blocks[:, :8] = scale.view(torch.uint8)
    elif fmt.name in ("MQ4G256V2", "MQ6G256V2"):
        blocks[:, :8] = scale.repeat(1, 2).half().view(torch.uint8)
    elif fmt.name == "GGUF_Q6_K":
        blocks[:, 208:] = scale[:, :1].half().view(torch.uint8)
    else:
        width = {"GGUF_Q4_1": 2, "GGUF_Q4_K": 2, "GGUF_Q5_K": 2}.get(fmt.name, 1)
        blocks[:, : 2 * width] = scale[:, :width].half().view(torch.uint8)
    return data


def packed(packing: Packing, data: torch.Tensor, cols: int) -> tuple[PackedMatrix, torch.Tensor]:
    matrix = packing.empty(data.shape[0], cols, poisoned)
    return matrix, packing.fill(matrix, 0, data)


@pytest.mark.parametrize("qtype", list(PACKINGS))
def test_a_packed_matrix_decodes_to_what_its_format_decodes(qtype: int) -> None:
    torch.manual_seed(qtype)
    fmt = format_of(qtype)
    whole = 512
    ragged = 360 if fmt.name.startswith(("HFQ", "Q8")) else whole
    for cols in (whole, ragged):
        data = random_blocks(qtype, 5, cols)
        matrix, sound = packed(PACKINGS[qtype], data, cols)
        wanted = fmt.decode(data.flatten(), 5, cols)
        error = (
            matrix.dense() - wanted
        ).double().square().mean().sqrt() / wanted.double().square().mean().sqrt()
        assert error < (5e-4 if fmt.name in ROUNDED else 1e-7)
        assert sound.all()
        assert matrix.nbytes == PACKINGS[qtype].nbytes(5, cols)


def test_rows_can_be_filled_in_pieces() -> None:
    packing = PACKINGS[format_of(int(next(iter(PACKINGS)))).qtype]
    data = random_blocks(next(iter(PACKINGS)), 7, 64)
    whole, _ = packed(packing, data, 64)
    pieces = packing.empty(7, 64, poisoned)
    packing.fill(pieces, 0, data[:3])
    packing.fill(pieces, 3, data[3:])
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, pieces.tensors, strict=True))


def test_rows_with_headers_that_are_not_finite_are_told() -> None:
    for qtype, packing in PACKINGS.items():
        if format_of(qtype).name != "HFQ4G128":
            continue
        data = random_blocks(qtype, 4, 256)
        data[2, 72:76] = torch.tensor([float("nan")]).view(torch.uint8)
        assert packed(packing, data, 256)[1].tolist() == [True, True, False, True]
