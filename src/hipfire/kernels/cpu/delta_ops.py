"""Gated DeltaNet layers as the CPU engine runs them."""

from __future__ import annotations

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu import delta as kernels
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.products import float_rows
from hipfire.kernels.cpu.simd import LANES


def delta_net(
    engine: CpuEngine,
    mixed: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    tail: torch.Tensor,
    matrix: torch.Tensor,
    rows: torch.Tensor,
    pieces: torch.Tensor | None,
    eps: float,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """Run `delta_net_ref`; InternalError for heads that are no whole vectors."""
    mixed, z, b, a = (float_rows(x) for x in (mixed, z, b, a))
    _, values, key_dim, value_dim = matrix.shape
    (tokens, channels), width = mixed.shape, conv_weight.shape[1]
    keys = (channels - values * value_dim) // (2 * key_dim)
    if key_dim % LANES or value_dim % kernels.BLOCK or a.stride(0) != b.stride(0):
        raise InternalError(f"heads of {key_dim} x {value_dim} or their gates do not fit the kernels")
    count = tokens if pieces is None else pieces.shape[0]
    table: torch.Tensor | int = 0 if pieces is None else pieces
    read = () if pieces is None else (pieces,)
    x = torch.empty(tokens, channels)
    engine.launch(
        kernels.convolution,
        *(mixed, 4 * mixed.stride(0), channels, width, conv_weight, tail, 4 * tail.stride(0)),
        *(rows, table, count, x, *engine.scratch(2 * kernels.VECTOR * width)),
        reads=(mixed, conv_weight, tail, rows, *read),
        writes=(x, tail),
    )
    out = torch.empty(tokens, values * value_dim)
    engine.launch(
        kernels.heads,
        *(x, z, 4 * z.stride(0), b, a, 4 * a.stride(0), decay, dt_bias, norm_weight),
        *(matrix, 4 * matrix.stride(0), rows, table, count),
        *(-keys if tiled else keys, values, key_dim, value_dim, float(eps), out),
        *engine.scratch(kernels.BLOCK_BYTES * key_dim + kernels.TOKEN_BYTES * tokens),
        reads=(x, z, b, a, decay, dt_bias, norm_weight, matrix, rows, *read),
        writes=(out, matrix),
    )
    return out
