"""Random packed matrices for tests of GPU kernels."""

from __future__ import annotations

import torch
from gpu_kit import DEVICE

from hipfire.kernels.gpu.prepare import Prepared
from hipfire.kernels.packed import PackedLayout, PackedMatrix, unit_count


def random_matrix(layout: PackedLayout, rows: int, cols: int, seed: int = 0) -> PackedMatrix:
    """Return a matrix with weights around zero; what lies behind the last column is arbitrary."""
    generator = torch.Generator().manual_seed(seed)
    units, groups = unit_count(cols), -(-cols // layout.group)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)

    scales = torch.rand(rows, groups, generator=generator) + 0.5
    middle = 0.0 if layout.bits == 8 else 2.0 ** (layout.bits - 1) - layout.offset
    noise = torch.rand(rows, groups, generator=generator)
    minima = -scales * (middle + noise) if layout.minimum else None
    return PackedMatrix(
        layout,
        rows,
        cols,
        codes(rows, 2, 4, 4 * units) if layout.bits == 8 else codes(rows, 4, 4 * units),
        scales.to(layout.scale_type).to(DEVICE),
        None if minima is None else minima.to(layout.scale_type).to(DEVICE),
        codes(rows, 4, 2 * units) if layout.bits == 6 else None,
    )


def random_rows(tokens: int, cols: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return activations [tokens, cols] with a few large columns, as language models have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=generator)
    x[:, :: max(1, cols // 3)] *= 8
    return x.to(dtype).to(DEVICE)


def as_multiplied(prepared: Prepared, cols: int) -> torch.Tensor:
    """Return the activations [T, cols] that a product of the prepared form really sees, float64."""
    tokens, units = prepared.sums.shape
    # [T, parity, word, unit, byte] -> [T, unit, word, byte, parity]
    values = prepared.values.view(tokens, 2, 4, units, 4).permute(0, 3, 2, 4, 1).reshape(tokens, units, 32)
    scales = torch.ones(1, device=DEVICE) if prepared.scales is None else prepared.scales[..., None]
    return (values.double() * scales.double()).reshape(tokens, -1)[:, :cols]
