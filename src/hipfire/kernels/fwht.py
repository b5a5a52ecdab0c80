"""The 256-point rotation of the MQ formats: R = (1/16) · D2 · H · D1, with H the Walsh–Hadamard matrix.

Weights are rotated once when they are quantized, activations at run time, so that (R w)·(R x) = w·x.
R is orthogonal but not symmetric: activations need the forward rotation, `inverse_fwht256` only undoes it.
This file does not know which formats are rotated.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hipfire.base.errors import ValidationError
from hipfire.kernels.launch import Op

SEGMENT = 256
SEED_IN = 42
SEED_OUT = 1042

_LCG_FACTOR = 1103515245
_LCG_STEP = 12345
_LCG_MASK = 0x7FFFFFFF
_SIGN_BIT = 16


def lcg_states(n: int, seed: int) -> list[int]:
    """Return the first `n` states (31 bits each) of the generator that signs and angles are drawn from."""
    states = []
    state = seed
    for _ in range(n):
        state = (state * _LCG_FACTOR + _LCG_STEP) & _LCG_MASK
        states.append(state)
    return states


def signs(n: int, seed: int) -> Tensor:
    """Return the first `n` signs of a seed: float32 [n] of +1 and -1, on the CPU."""
    return torch.tensor([1.0 if state >> _SIGN_BIT & 1 else -1.0 for state in lcg_states(n, seed)])


def fwht256(x: Tensor) -> Tensor:
    """Rotate every 256 consecutive elements of the last dimension: floating [..., K] -> float32 [..., K].

    Computes in float32 with passes of stride 1, 2, 4 .. 128, so equal inputs give equal bits on any device.
    Raises ValidationError unless 256 divides K.
    """
    return _rotate(x, SEED_IN, SEED_OUT)


def inverse_fwht256(x: Tensor) -> Tensor:
    """Undo `fwht256`: floating [..., K] in the rotated basis -> float32 [..., K] in the original one.

    Raises ValidationError unless 256 divides K.
    """
    return _rotate(x, SEED_OUT, SEED_IN)


@functools.cache
def sign_column(seed: int, scale: float, device: torch.device) -> Tensor:
    """Return the 256 signs of a seed times `scale`: float32 [256, 1]; shared, so never to be written to."""
    return (signs(SEGMENT, seed) * scale).to(device).unsqueeze(1)


def _rotate(x: Tensor, first_seed: int, last_seed: int) -> Tensor:
    if not x.is_floating_point() or x.ndim == 0:
        raise ValidationError(
            f"the rotation takes floating-point rows, not {x.dtype} with {x.ndim} dimensions",
            hint="pass a float tensor of shape [..., K]",
        )
    if x.shape[-1] % SEGMENT:
        raise ValidationError(
            f"the rotation needs a multiple of {SEGMENT} columns, not {x.shape[-1]}",
            hint="use a format that is not rotated for this width",
        )
    # segments become columns: each pass then adds whole contiguous runs, whatever its stride
    segments = x.detach().to(torch.float32).reshape(-1, SEGMENT).t()
    work = segments * sign_column(first_seed, 1.0, x.device)
    work = _butterflies(work.contiguous())
    work.mul_(sign_column(last_seed, 1.0 / 16.0, x.device))
    return work.t().contiguous().view(x.shape)


def _butterflies(columns: Tensor) -> Tensor:
    """Apply the unnormalised transform down the columns of a contiguous [256, n]; overwrites its input."""
    source, target = columns, torch.empty_like(columns)
    stride = 1
    while stride < SEGMENT:
        pairs = source.view(SEGMENT // (2 * stride), 2, stride, -1)
        result = target.view(pairs.shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=result[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=result[:, 1])
        source, target = target, source
        stride *= 2
    return source


FWHT = Op(
    "fwht",
    fwht256,
    {"numba": "hipfire.kernels.cpu.ops.fwht", "triton": "hipfire.kernels.gpu.rotate.fwht"},
)
INVERSE_FWHT = Op(
    "inverse_fwht",
    inverse_fwht256,
    {"numba": "hipfire.kernels.cpu.ops.inverse_fwht", "triton": "hipfire.kernels.gpu.rotate.inverse_fwht"},
)
