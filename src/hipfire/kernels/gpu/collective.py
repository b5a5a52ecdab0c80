"""Sums and columns of several GPUs, by a library's kernels, which are captured in graphs like any others.

This file knows neither the library nor how GPUs are connected.
"""

from __future__ import annotations

import torch

from hipfire.kernels.collective import Group
from hipfire.kernels.gpu.engine import GpuEngine


def all_reduce(engine: GpuEngine, x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of all processes' x; see `all_reduce_ref`."""
    if not group.direct(x):
        engine.library("all_reduce", lambda: group.sum(x), reads=(x,), writes=(x,))
        return x
    out = engine.empty("summed", x.shape, x.dtype)
    engine.library("all_reduce", lambda: group.sum_into(x, out), reads=(x,), writes=(out,))
    return out


def gather_columns(engine: GpuEngine, x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return all processes' x [T, N] side by side, [T, size * N]; see `gather_columns_ref`."""
    tokens, columns = x.shape
    parts = engine.empty("gathered.parts", (group.size, tokens, columns), x.dtype)
    engine.library("gather", lambda: group.gather(x, parts), reads=(x,), writes=(parts,))
    if tokens == 1:
        return parts.view(1, -1)
    out = engine.empty("gathered", (tokens, group.size * columns), x.dtype)
    whole = out.view(tokens, group.size, columns)
    engine.library("columns", lambda: whole.copy_(parts.transpose(0, 1)), reads=(parts,), writes=(out,))
    return out
