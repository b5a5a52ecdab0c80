"""Writing and reading cached keys and values: plain floating types, and q8 (34 bytes for 32 elements).

A cache row is one position: [KV, D] elements, or [KV, D / 32 * 34] bytes in q8. A q8 block is an IEEE half
scale (round to nearest even) and 32 signed codes; unlike the codes of Q8 weights they stay within
-127..127.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hipfire.kernels.launch import Op

Q8_ELEMENTS = 32
Q8_BYTES = 34


def q8_encode(x: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., D / 32 * 34] for x [..., D], 32 | D."""
    blocks = x.float().reshape(*x.shape[:-1], -1, Q8_ELEMENTS)
    peak = blocks.abs().amax(-1, keepdim=True)
    # below this the half-precision scale is zero whatever the codes are, and 127 / peak could overflow
    inverse = torch.where(peak > 1e-30, 127.0 / peak, torch.zeros_like(peak))
    codes = torch.round(blocks * inverse).clamp_(-127, 127).to(torch.int8)
    scale = (peak / 127.0).to(torch.float16)
    packed = torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), dim=-1)
    return packed.flatten(-2)


def q8_decode(data: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., D] for the bytes that `q8_encode` made."""
    blocks = data.reshape(*data.shape[:-1], -1, Q8_BYTES)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    codes = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (codes * scale).flatten(-2)


def runs(rows: torch.Tensor) -> Iterator[tuple[slice, int, int]]:
    """Cut `rows` [T, 2] of (slot, position) into runs of one sequence: which rows, slot, first position."""
    pairs = rows.tolist()
    first = 0
    for index in range(1, len(pairs) + 1):
        slot, position = pairs[index - 1]
        if index == len(pairs) or pairs[index] != [slot, position + 1]:
            yield slice(first, index), *pairs[first]
            first = index


def kv_write_ref(cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    """Store x [T, KV, D] in `cache` [slots, S, KV, D], rounded to its type.

    `rows` int64 [T, 2] holds the slot and the position of every token; both exist in the cache.
    """
    cache[rows[:, 0], rows[:, 1]] = x.to(cache.dtype)


def kv_write_q8_ref(cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    """Store x [T, KV, D] in the q8 `cache` [slots, S, KV, D / 32 * 34] as `kv_write_ref` does."""
    cache[rows[:, 0], rows[:, 1]] = q8_encode(x)


KV_WRITE = Op("kv_write", kv_write_ref, {"numba": "hipfire.kernels.cpu.ops.kv_write"}, writes=("cache",))
KV_WRITE_Q8 = Op(
    "kv_write_q8", kv_write_q8_ref, {"numba": "hipfire.kernels.cpu.ops.kv_write"}, writes=("cache",)
)
