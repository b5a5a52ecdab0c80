"""What kernels that work row by row share: how tensors are seen as rows, and the types of results.

This file knows no operation.
"""

from __future__ import annotations

from typing import Final

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.engine import GpuEngine

# results of steps of up to this many tokens are float32; in larger ones, those that only products read are
# bfloat16
ROWS_FLOAT32: Final = 256
# the most rows of activations that products take in int8, and the most for which the tile decodes weights
GEMV_ROWS: Final = 2
GEMM_ROWS: Final = 128


def product_type(engine: GpuEngine, tokens: int) -> torch.dtype:
    """Return the type of a result that only products will read, in a step of so many tokens."""
    return torch.float32 if engine.exact or tokens <= ROWS_FLOAT32 else torch.bfloat16


def row_view(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] as [R, D] over the same memory; InternalError where its strides do not allow that."""
    if x.ndim and (x.shape[-1] <= 1 or x.stride(-1) == 1):
        try:
            return x if x.ndim == 2 else x.view(-1, x.shape[-1])
        except RuntimeError:
            pass
    raise InternalError(
        f"rows of shape {list(x.shape)} with strides {list(x.stride())} have no common distance"
    )


def same_shape(x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise InternalError unless x and y have one shape."""
    if x.shape != y.shape:
        raise InternalError(f"shapes {list(x.shape)} and {list(y.shape)} must be equal")
