"""Products with the experts that each token has chosen, by their numbers on the device.

A few tokens are multiplied in int8 pair by pair, at memory speed. More are put in order of their experts, and
tiles of tokens of one expert are multiplied on matrix units. Grids are as large as the worst distribution
needs; the host never learns which experts run. This file starts kernels and has none.
"""

from __future__ import annotations

from typing import Final

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.experts import Experts, PackedExperts
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.expert_groups import multiply_tiles, sum_places, tile_tokens
from hipfire.kernels.gpu.expert_pairs import gate_pairs, sum_pairs
from hipfire.kernels.gpu.expert_sort import sort_pairs
from hipfire.kernels.gpu.rotate import fwht, fwht_int8
from hipfire.kernels.gpu.rowwise import product_type
from hipfire.kernels.packed import Activation

# the most tokens that are multiplied pair by pair; also one of the numbers that scratch is planned for
PAIR_TOKENS: Final = 8


def expert_gated(
    engine: GpuEngine,
    x: torch.Tensor,
    ids: torch.Tensor,
    stack: Experts,
    activation: Activation,
    *,
    rotated: bool = False,
) -> torch.Tensor:
    """Run `expert_gated_ref`; results of long steps are bfloat16, as those of `products.packed_gated`."""
    tokens, places = ids.shape
    experts = _packed(stack)
    few = tokens <= PAIR_TOKENS and not engine.exact
    kind = torch.float32 if few else product_type(engine, tokens)
    out = engine.empty("experts.gated", (tokens * places, experts.rows // 2), kind)
    if few:
        gate_pairs(engine, x, ids, experts, out, activation)
        return fwht_int8(engine, out) if rotated else out
    tile = tile_tokens(ids.numel(), experts.experts, exact=engine.exact)
    pairs = sort_pairs(engine, ids, experts.experts, tile)
    engine.prepare("pairs", ids, (tile, pairs))
    multiply_tiles(engine, x, pairs, experts, out, places, tile, activation)
    return fwht(engine, out) if rotated else out


def expert_down(
    engine: GpuEngine, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts
) -> torch.Tensor:
    """Run `expert_down_ref`; places are added up by halves for few tokens, one after the other for many."""
    tokens, places = ids.shape
    experts = _packed(stack)
    out = engine.empty("experts.down", (tokens, experts.rows))
    if tokens <= PAIR_TOKENS and not engine.exact:
        sum_pairs(engine, hidden, ids, weights, experts, out)
        return out
    tile = tile_tokens(ids.numel(), experts.experts, exact=engine.exact)
    known = engine.prepared("pairs", ids)
    same = known is not None and known[0] == tile
    pairs = known[1] if same else sort_pairs(engine, ids, experts.experts, tile)
    kind = product_type(engine, tokens)
    products = engine.empty("experts.products", (tokens * places, experts.rows), kind)
    multiply_tiles(engine, hidden, pairs, experts, products, 1, tile, None)
    sum_places(engine, products, weights, out)
    return out


def _packed(stack: Experts) -> PackedExperts:
    if not isinstance(stack, PackedExperts):
        raise InternalError("experts are not packed for a GPU")
    return stack
