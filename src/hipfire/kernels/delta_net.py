"""A gated DeltaNet layer between its projections: convolution, recurrence over a matrix, gated norm.

Each value head keeps a matrix [Dk, Dv] that maps keys to values. A token lets it decay, writes the difference
between its value and what the matrix says for its key, and reads it with its query. The layer also keeps the
last inputs of its convolution, the tail.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from hipfire.kernels.launch import Op

# added to the squared length of queries and keys
L2_EPS = 1e-6


def delta_net_ref(
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
    """Return what a layer's heads see, float32 [T, Hv * Dv], and move the states of its sequences on.

    mixed [T, C] holds the channels of queries and keys (Hk * Dk each) and of values (Hv * Dv), z [T, Hv * Dv]
    the gates of the result, b and a [T, Hv] how strongly a token writes and lets decay. They may be columns
    of wider rows. conv_weight [C, W], decay [Hv] (below zero), dt_bias [Hv] and norm_weight [Dv] are float32,
    as are the states, tail [slots, C, W - 1] and matrix [slots, Hv, Dk, Dv]. rows int64 [T, 2] are slot and
    position of every token; one at position 0 starts from zeros, whatever the states hold. pieces int32
    [S, 2] are first token and tokens of every sequence's piece, None where each has a single token. Value
    head h reads key head h // (Hv / Hk), or h % Hk where heads are `tiled`.
    """
    _, heads, dk, dv = matrix.shape
    inputs, z = mixed.float(), z.float().reshape(-1, heads, dv)
    factors = (decay * softplus(a.float() + dt_bias)).exp()
    strengths = b.float().sigmoid()
    out = torch.empty_like(z)
    places = rows.tolist()
    for token, (slot, position) in enumerate(places):
        if position == 0:
            tail[slot], matrix[slot] = 0, 0
        history = torch.cat((tail[slot], inputs[token][:, None]), 1)
        tail[slot] = history[:, 1:]
        q, k, v = _heads(silu((history * conv_weight).sum(1)), heads, dk, dv, tiled=tiled)
        state = matrix[slot] * factors[token][:, None, None]
        change = strengths[token][:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        matrix[slot] = state + k[:, :, None] * change[:, None, :]
        out[token] = torch.einsum("hk,hkv->hv", q, matrix[slot])
    norm = torch.rsqrt(out.square().mean(-1, keepdim=True) + eps)
    return (out * norm * norm_weight * silu(z)).flatten(1)


def _heads(
    x: torch.Tensor, values: int, dk: int, dv: int, *, tiled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys [Hv, Dk] and values [Hv, Dv] of one token's channels."""
    q, k = x[: x.shape[0] - values * dv].view(2, -1, dk)
    v = x[x.shape[0] - values * dv :].view(values, dv)
    q, k = (each * torch.rsqrt(each.square().sum(1, keepdim=True) + L2_EPS) for each in (q, k))
    head, keys = torch.arange(values, device=x.device), q.shape[0]
    read = head % keys if tiled else head // (values // keys)
    return q[read] * dk**-0.5, k[read], v


def decay_of(log_rate: torch.Tensor) -> torch.Tensor:
    """Turn the logarithms of rates [Hv] that checkpoints store into `decay`, in place, and return it."""
    return log_rate.exp_().neg_()


DELTA_NET = Op(
    "delta_net",
    delta_net_ref,
    {
        "numba": "hipfire.kernels.cpu.delta_ops.delta_net",
        "triton": "hipfire.kernels.gpu.delta_net.delta_net",
    },
    writes=("tail", "matrix"),
)
