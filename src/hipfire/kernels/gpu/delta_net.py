"""Gated DeltaNet on a GPU: convolution, recurrence and gated norm, for decode steps and for prompts.

Steps of single tokens take two launches and read and write each state once. Prompts go through chunks on
matrix units, or token by token where the engine takes activations as they are. This file starts kernels and
has none.
"""

from __future__ import annotations

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.delta_chunks import delta_chunks
from hipfire.kernels.gpu.delta_input import DeltaCall, delta_input
from hipfire.kernels.gpu.delta_step import delta_step
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.rowwise import product_type


def delta_net(
    engine: GpuEngine,
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
    """Run `delta_net_ref`; the result is float32, or bfloat16 in long steps."""
    own = conv_weight, decay, dt_bias, norm_weight
    call = DeltaCall(mixed, z, b, a, *own, tail, matrix, rows, pieces, eps, tiled)
    _check(call)
    chunked = pieces is not None and not engine.exact
    # the interpreter cuts off what does not fit into bfloat16 instead of rounding
    kind = torch.bfloat16 if chunked and engine.target != "plain" else torch.float32
    x = delta_input(engine, call, kind)
    out = engine.empty("delta_net", z.shape, product_type(engine, call.tokens))
    if chunked:
        delta_chunks(engine, call, x, out)
    else:
        delta_step(engine, call, x, out)
    return out


def _check(call: DeltaCall) -> None:
    """Raise InternalError unless rows and states lie as the kernels take them."""
    sizes, slots = call.sizes, call.matrix.shape[0]
    channels, width = call.conv_weight.shape
    values, dk, dv = sizes.values, sizes.dk, sizes.dv
    if sizes.channels != channels or sizes.keys < 1 or values % sizes.keys or width < 2:
        raise InternalError(f"{channels} channels and {values} DeltaNet heads of {dk} x {dv} do not fit")
    wanted = (call.mixed, channels), (call.z, values * dv), (call.b, values), (call.a, values)
    if any(x.shape != (call.tokens, columns) or x.stride(1) != 1 for x, columns in wanted):
        raise InternalError("inputs of a DeltaNet layer are not rows of its channels and heads")
    inner = (call.matrix.stride()[1:], (dk * dv, dv, 1)), (call.tail.stride()[1:], (width - 1, 1))
    if call.tail.shape != (slots, channels, width - 1) or any(found != needed for found, needed in inner):
        raise InternalError("states of a DeltaNet layer are not contiguous in each slot")
