"""Attention over caches that are kept in blocks of positions, as GPUs keep them, and how they are written.

Keys and values of a layer are two caches [slots, NB, BLOCK, R]: position p of a slot is row
[slot, p // BLOCK, p % BLOCK], and the last two dimensions are contiguous. A row holds the KV * D elements of
one position; in q8, KV * D signed codes and then KV * D / 32 IEEE half scales, one for 32 codes of a head.
This file does not know where the memory comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hipfire.kernels.attention import attention_ref
from hipfire.kernels.attention_input import enter_ref
from hipfire.kernels.kv_cache import Q8_BYTES, Q8_ELEMENTS, q8_encode, runs
from hipfire.kernels.launch import Op

# positions in a block
BLOCK = 256
# tokens of one sequence that prefill attends together, at most
TILE = 64

Rows = Callable[[torch.Tensor], torch.Tensor]


def q8_row_nbytes(elements: int) -> int:
    """Return the bytes of a q8 row of so many elements, a multiple of 32."""
    return elements // Q8_ELEMENTS * Q8_BYTES


def attention_tiles(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut runs of tokens into tiles: (first token, number of tokens <= TILE) of each.

    `lengths` are the numbers of tokens that sequences have in a step, one sequence after the other.
    """
    tiles = []
    first = 0
    for length in lengths:
        end = first + length
        tiles += [(token, min(TILE, end - token)) for token in range(first, end, TILE)]
        first = end
    return tiles


def q8_row_encode(x: torch.Tensor) -> torch.Tensor:
    """Return the q8 rows uint8 [T, KV * D * 34 / 32] of x [T, KV, D], 32 | D."""
    blocks = q8_encode(x).view(x.shape[0], -1, Q8_BYTES)
    return torch.cat((blocks[:, :, 2:].flatten(1), blocks[:, :, :2].flatten(1)), dim=1)


def q8_row_decode(data: torch.Tensor) -> torch.Tensor:
    """Return float32 [S, KV * D] for q8 rows uint8 [S, KV * D * 34 / 32]."""
    elements = data.shape[1] // Q8_BYTES * Q8_ELEMENTS
    codes = data[:, :elements].contiguous().view(torch.int8).float()
    scales = data[:, elements:].contiguous().view(torch.float16).float()
    return codes * scales.repeat_interleave(Q8_ELEMENTS, dim=1)


def block_input_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Write keys and values into their caches and return the queries, [T, H, D], ready for attention.

    q [T, H, D], k and v [T, KV, D] may be strided in their first dimension. Where there are weights [D],
    queries and keys are RMS-normalized per head first; then both are rotated by cos, sin [T, R/2], float32.
    `rows` int64 [T, 2] holds the slot and position of every token; `keys` and `values` are blocked caches of
    float32 or bfloat16. Queries are float32; kernels may return bfloat16 in prefill steps.
    """
    return enter_ref(_write, q, k, v, rows, cos, sin, keys, values, q_weight, k_weight, eps, offset)


def block_input_q8_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Do the same for blocked caches in q8, uint8; 32 | D."""
    return enter_ref(_write_q8, q, k, v, rows, cos, sin, keys, values, q_weight, k_weight, eps, offset)


def _write(cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    _store(cache, rows, x.flatten(1))


def _write_q8(cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    _store(cache, rows, q8_row_encode(x))


def _store(cache: torch.Tensor, rows: torch.Tensor, stored: torch.Tensor) -> None:
    slots, positions = rows[:, 0], rows[:, 1]
    cache[slots, positions // BLOCK, positions % BLOCK] = stored.to(cache.dtype)


def block_attention_ref(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what every token sees in blocked caches of float32 or bfloat16, [T, H, D].

    `rows` int64 [T, 2] holds the slot and position of each query in q [T, H, D]; its own key and those before
    it are in place. With a window, it sees the positions (p - window, p]. Without `tiles` every token is its
    sequence's only one; `tiles` int32 [n, 2] cuts the tokens into (first token, number of tokens <= TILE),
    consecutive positions of one sequence; it changes no result. Float32; kernels may return bfloat16 in
    prefill steps.
    """
    return _attend(_rows_as_they_are, q, keys, values, rows, scale, window)


def block_attention_q8_ref(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the same for blocked caches in q8, uint8."""
    return _attend(q8_row_decode, q, keys, values, rows, scale, window)


def _rows_as_they_are(data: torch.Tensor) -> torch.Tensor:
    return data.float()


def _attend(
    read: Rows,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for part, slot, start in runs(rows):
        seen = start + part.stop - part.start
        blocks = -(-seen // BLOCK)
        k, v = (read(cache[slot, :blocks].flatten(0, 1)[:seen]) for cache in (keys, values))
        heads = (seen, -1, q.shape[2])
        out[part] = attention_ref(q[part], k.view(heads), v.view(heads), scale, window)
    return out


BLOCK_INPUT = Op(
    "block_input",
    block_input_ref,
    {"triton": "hipfire.kernels.gpu.attention_input.block_input"},
    writes=("keys", "values"),
)
BLOCK_INPUT_Q8 = Op(
    "block_input_q8",
    block_input_q8_ref,
    {"triton": "hipfire.kernels.gpu.attention_input.block_input_q8"},
    writes=("keys", "values"),
)
BLOCK_ATTENTION = Op(
    "block_attention",
    block_attention_ref,
    {"triton": "hipfire.kernels.gpu.attention.block_attention"},
)
BLOCK_ATTENTION_Q8 = Op(
    "block_attention_q8",
    block_attention_q8_ref,
    {"triton": "hipfire.kernels.gpu.attention.block_attention_q8"},
)
