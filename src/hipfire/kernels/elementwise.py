"""Elementwise steps between the matrix products: gated activations, residual sums, scales, row gathers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipfire.kernels.launch import Op

_PLACES = {"numba": "cpu.ops", "triton": "gpu.elementwise"}


def silu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, float32."""
    return torch.nn.functional.silu(gate.float()) * up.float()


def gelu_tanh_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up with the tanh approximation of GELU, float32."""
    return torch.nn.functional.gelu(gate.float(), approximate="tanh") * up.float()


def mul_sigmoid_ref(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), float32."""
    return x.float() * gate.float().sigmoid()


def add_ref(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y, float32."""
    return x.float() + y.float()


def scale_ref(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x * factor, float32."""
    return x.float() * factor


def softcap_ref(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap), float32."""
    return cap * torch.tanh(x.float() / cap)


def gather_rows_ref(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return table[rows] in the table's own type; table [N, ...], rows [T]."""
    return table.index_select(0, rows)


def _op(name: str, reference: Callable[..., torch.Tensor]) -> Op:
    kernels = {kind: f"hipfire.kernels.{place}.{name}" for kind, place in _PLACES.items()}
    return Op(name, reference, kernels)


SILU_MUL = _op("silu_mul", silu_mul_ref)
GELU_TANH_MUL = _op("gelu_tanh_mul", gelu_tanh_mul_ref)
MUL_SIGMOID = _op("mul_sigmoid", mul_sigmoid_ref)
ADD = _op("add", add_ref)
SCALE = _op("scale", scale_ref)
SOFTCAP = _op("softcap", softcap_ref)
GATHER_ROWS = Op("gather_rows", gather_rows_ref, {"triton": "hipfire.kernels.gpu.elementwise.gather_rows"})
