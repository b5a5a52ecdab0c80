"""The choice of each token's experts, and the sum of what chosen and shared experts make.

One warp chooses for a token: logits and numbers are put into one integer, so that the largest of them is the
best expert, and among equal ones the first. This file does not know the experts' weights.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.elementwise import sigmoid
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.rowwise import same_shape
from hipfire.kernels.gpu.target import begin_launch

# a warp holds the logits of one token
MOST_EXPERTS: Final = 1024
_BLOCK: Final = 1024


@triton.jit
def _rank(logit, expert, BLOCK: tl.constexpr):
    """Return int64 that orders float32 logits, NaN like minus infinity, and equal ones by falling number."""
    # minus zero becomes zero
    bits = (tl.where(logit == logit, logit, -float("inf")) + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (BLOCK - 1 - expert)


@triton.jit
def _logit_of(rank):
    ordered = (rank >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _route(
    logits_ptr, shared_ptr, ids_ptr, weights_ptr, experts, logits_stride, shared_stride,
    COUNT: tl.constexpr, PLACES: tl.constexpr, ROOM: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    logit = tl.load(logits_ptr + token * logits_stride + expert, mask=inside, other=-float("inf"))
    logit = logit.to(tl.float32)
    nothing: tl.constexpr = -(1 << 63)
    rank = tl.where(inside, _rank(logit, expert, BLOCK), nothing)
    peak = _logit_of(tl.max(rank, axis=0))
    total = tl.sum(tl.where(inside, tl.exp(logit - peak), 0.0), axis=0)
    place = tl.arange(0, ROOM)
    ids = tl.zeros((ROOM,), tl.int32)
    weights = tl.zeros((ROOM,), tl.float32)
    for index in tl.static_range(COUNT):
        best = tl.max(rank, axis=0)
        rank = tl.where(rank == best, nothing, rank)
        ids = tl.where(place == index, BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32), ids)
        weights = tl.where(place == index, tl.exp(_logit_of(best) - peak) / total, weights)
    if NORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    if shared_ptr is not None:
        gate = tl.load(shared_ptr + token * shared_stride).to(tl.float32)
        ids = tl.where(place == COUNT, experts, ids)
        weights = tl.where(place == COUNT, sigmoid(gate), weights)
    tl.store(ids_ptr + token * PLACES + place, ids, mask=place < PLACES)
    tl.store(weights_ptr + token * PLACES + place, weights, mask=place < PLACES)


@triton.jit
def _add_gated(
    x_ptr, y_ptr, gate_ptr, out_ptr, columns, x_stride, y_stride, gate_stride,
    BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = sigmoid(tl.load(gate_ptr + row * gate_stride).to(tl.float32))
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, x + gate * y, mask=mask)


def route(
    engine: GpuEngine, logits: torch.Tensor, count: int, normalize: bool, shared: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `route_ref`, for up to 1024 experts."""
    tokens, experts = logits.shape
    if not count <= experts <= MOST_EXPERTS or logits.stride(1) != 1:
        raise InternalError(f"{count} of {experts} experts cannot be chosen: at most {MOST_EXPERTS} can be")
    places = count + (shared is not None)
    ids = engine.empty("route.ids", (tokens, places), torch.int32)
    weights = engine.empty("route.weights", (tokens, places))
    engine.launch(
        _route,
        (tokens,),
        reads=(logits,) if shared is None else (logits, shared),
        writes=(ids, weights),
        logits_ptr=logits,
        shared_ptr=shared,
        ids_ptr=ids,
        weights_ptr=weights,
        experts=experts,
        logits_stride=logits.stride(0),
        shared_stride=0 if shared is None else shared.stride(0),
        constants=_constants(experts, count, places, normalize) | {"TARGET": engine.target},
        warps=1,
    )
    return ids, weights


def _constants(experts: int, count: int, places: int, normalize: bool) -> dict[str, object]:
    return {
        "COUNT": count,
        "PLACES": places,
        "ROOM": triton.next_power_of_2(places),
        "NORMALIZE": normalize,
        "BLOCK": max(32, triton.next_power_of_2(experts)),
    }


def add_gated(engine: GpuEngine, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run `add_gated_ref` on rows of any distance."""
    same_shape(x, y)
    rows, columns = x.shape
    out = engine.empty("add_gated", (rows, columns))
    engine.launch(
        _add_gated,
        (rows, -(-columns // _BLOCK)),
        reads=(x, y, gate),
        writes=(out,),
        x_ptr=x,
        y_ptr=y,
        gate_ptr=gate,
        out_ptr=out,
        columns=columns,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        gate_stride=gate.stride(0),
        constants={"BLOCK": _BLOCK, "TARGET": engine.target},
    )
    return out


_ROUTE_TYPES = {
    **{"logits_ptr": "*fp32", "ids_ptr": "*i32", "weights_ptr": "*fp32", "experts": "i32"},
    **{"logits_stride": "i32", "shared_stride": "i32"},
}
_ADD_TYPES = {
    **{"x_ptr": "*fp32", "gate_ptr": "*fp32", "out_ptr": "*fp32", "columns": "i32"},
    **{"x_stride": "i32", "y_stride": "i32", "gate_stride": "i32"},
}
OFFLINE: tuple[Offline, ...] = (
    Offline(
        _route,
        {**_ROUTE_TYPES, "shared_ptr": "*fp32"},
        _constants(256, 8, 9, True),
        1,
        name="256 shared",
        unaligned=frozenset({"shared_ptr"}),
    ),
    Offline(_route, _ROUTE_TYPES, {**_constants(1024, 8, 8, False), "shared_ptr": None}, 1, name="1024"),
    Offline(
        _route,
        {**_ROUTE_TYPES, "logits_ptr": "*bf16", "shared_ptr": "*bf16"},
        _constants(256, 8, 9, True),
        1,
        name="256 bf16",
        unaligned=frozenset({"shared_ptr"}),
    ),
    *(
        Offline(
            _add_gated,
            {**_ADD_TYPES, "y_ptr": kind},
            {"BLOCK": _BLOCK},
            name=kind[1:],
            unaligned=frozenset({"gate_ptr"}),
        )
        for kind in ("*fp32", "*bf16")
    ),
)
