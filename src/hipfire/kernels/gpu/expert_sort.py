"""The pairs of a token and an expert, put in order of their experts: a counting sort on the device.

A kernel counts the pairs of each expert, and a second one places them, one program for each expert in both.
Pairs of one expert keep their order, and nothing depends on the order in which programs run. This file does
not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import begin_launch

# pairs that a program looks at together
_PAIRS: Final = 4096
# numbers of a tile: its expert, its first place in the order, how many pairs it has
TILE_NUMBERS: Final = 4
SMALLEST_TILE: Final = 16


@dataclass(frozen=True, eq=False)
class SortedPairs:
    """Pairs in order of their experts, cut into tiles of one expert each.

    `order` int32 [pairs] has the numbers of the pairs; `tiles` int32 [most tiles, 4] has for each tile its
    expert, its first place in `order` and its number of pairs, which is 0 for tiles that are not there.
    """

    order: torch.Tensor
    tiles: torch.Tensor


@triton.jit
def _count(ids_ptr, counts_ptr, pairs, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    begin_launch(TARGET)
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found += (tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@triton.jit
def _place(
    ids_ptr, counts_ptr, order_ptr, tiles_ptr, pairs, experts, most_tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + other, mask=other < experts, other=0).to(tl.int64)
    before = other < expert
    own = tl.sum(tl.where(other == expert, counts, 0), axis=0)
    start = tl.sum(tl.where(before, counts, 0), axis=0)
    needed = (counts + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(before, needed, 0), axis=0)
    own_tiles = (own + TILE - 1) // TILE
    # the last expert also writes the tiles that are not there
    end = tl.where(expert == experts - 1, most_tiles - first_tile, own_tiles)
    for tile in range(0, end, EXPERTS):
        number = tile + other
        at = tiles_ptr + (first_tile + number) * 4
        mask = number < end
        tl.store(at, tl.zeros((EXPERTS,), tl.int32) + expert, mask=mask)
        tl.store(at + 1, start + number * TILE, mask=mask)
        tl.store(at + 2, tl.maximum(tl.minimum(own - number * TILE, TILE), 0), mask=mask)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order_ptr + start + rank - 1, pair, mask=mine)
        start += tl.sum(mine.to(tl.int32), axis=0)


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return how many tiles there can be: all full ones, and one that is not full for each expert."""
    return pairs // tile + min(experts, pairs)


def sort_pairs(engine: GpuEngine, ids: torch.Tensor, experts: int, tile: int) -> SortedPairs:
    """Return the pairs of ids int32 [T, places] in order; pair p is place p % places of token p // places."""
    pairs = ids.numel()
    most = most_tiles(pairs, experts, tile)
    # as many as for the smallest tiles, so that more pairs never need less memory
    room = most_tiles(pairs, experts, min(tile, SMALLEST_TILE))
    counts = engine.empty("pairs.counts", (experts,), torch.int32)
    order = engine.empty("pairs.order", (pairs,), torch.int32)
    tiles = engine.empty("pairs.tiles", (room, TILE_NUMBERS), torch.int32)[:most]
    block = min(_PAIRS, max(128, triton.next_power_of_2(pairs)))
    warps = 8 if block == _PAIRS else 4
    engine.launch(
        _count,
        (experts,),
        reads=(ids,),
        writes=(counts,),
        ids_ptr=ids,
        counts_ptr=counts,
        pairs=pairs,
        constants={"BLOCK": block, "TARGET": engine.target},
        warps=warps,
    )
    engine.launch(
        _place,
        (experts,),
        reads=(ids, counts),
        writes=(order, tiles),
        ids_ptr=ids,
        counts_ptr=counts,
        order_ptr=order,
        tiles_ptr=tiles,
        pairs=pairs,
        experts=experts,
        most_tiles=most,
        constants={
            "TILE": tile,
            "BLOCK": block,
            "EXPERTS": triton.next_power_of_2(experts),
            "TARGET": engine.target,
        },
        warps=warps,
    )
    return SortedPairs(order, tiles)


_COUNT = {"ids_ptr": "*i32", "counts_ptr": "*i32", "pairs": "i32"}
_PLACE = {**_COUNT, "order_ptr": "*i32", "tiles_ptr": "*i32", "experts": "i32", "most_tiles": "i32"}
OFFLINE: tuple[Offline, ...] = tuple(
    entry
    for block, warps in ((512, 4), (_PAIRS, 8))
    for entry in (
        Offline(_count, _COUNT, {"BLOCK": block}, warps, name=str(block)),
        Offline(
            _place, _PLACE, {"TILE": 64, "BLOCK": block, "EXPERTS": 512}, warps, name=f"{block} 512 experts"
        ),
    )
)
