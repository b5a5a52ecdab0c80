"""Products of activations with weight matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipfire.kernels.launch import Op


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weight^T as float32 [T, N]; x [T, K], weight [N, K] of any floating type."""
    return torch.nn.functional.linear(x.float(), weight.float())


def dequantize_ref(
    data: torch.Tensor, rows: int, cols: int, decode: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> torch.Tensor:
    """Return packed bytes `data` as float32 [rows, cols] by the format's own `decode`."""
    return decode(data, rows, cols)


LINEAR = Op("linear", linear_ref, {"triton": "hipfire.kernels.gpu.products.linear"})
DEQUANTIZE = Op("dequantize", dequantize_ref)
