"""Experts on a GPU: their choice, products with the chosen ones by both ways, and the order of pairs."""

from __future__ import annotations

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms
from matrix_kit import as_multiplied, random_matrix, random_rows

from hipfire.base.errors import InternalError
from hipfire.kernels.experts import (
    FloatExperts,
    PackedExperts,
    add_gated_ref,
    expert_down_ref,
    expert_gated_ref,
    route_packed_ref,
    route_ref,
)
from hipfire.kernels.gpu.engine import Arithmetic
from hipfire.kernels.gpu.expert_groups import multiply_tiles, sum_places
from hipfire.kernels.gpu.expert_sort import sort_pairs
from hipfire.kernels.gpu.experts import PAIR_TOKENS, expert_down, expert_gated
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.route import add_gated, route
from hipfire.kernels.gpu.route_packed import route_packed
from hipfire.kernels.packed import PACKED_LAYOUTS

LAYOUTS = list(PACKED_LAYOUTS.values())
# rounding activations to int8 or bfloat16, as in tests of single matrices
BOUNDS = {"int8": 3e-2, "float": 3e-6}
MANY = PAIR_TOKENS + 3


def random_logits(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def random_ids(tokens: int, places: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Different experts for every token; some experts have many tokens, some none."""
    logits = random_logits(tokens, experts, seed)
    logits[:, 0] += 2.0
    logits[:, experts // 2] = -9.0
    return logits.topk(places, dim=1).indices.int()


def stack(name: str, experts: int, rows: int, cols: int, seed: int = 0) -> PackedExperts:
    return PackedExperts(random_matrix(PACKED_LAYOUTS[name], experts * rows, cols, seed), experts)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(8, 2), (5, 5), (64, 8), (33, 3)])
def test_chosen_experts_are_those_of_the_reference(experts: int, count: int, normalize: bool) -> None:
    scratch, logits = Poisoned(), random_logits(7, experts) * 4
    ids, weights = route(engine(scratch=scratch), logits, count, normalize)
    want_ids, want = route_ref(logits, count, normalize)
    assert torch.equal(ids.long(), want_ids.long())
    assert relative_rms(weights, want) < 1e-6
    scratch.check_guards()


def test_equal_logits_go_to_the_lowest_numbers() -> None:
    logits = torch.zeros(4, 12, device=DEVICE)
    logits[1, 5:] = 1.0
    logits[2] = -torch.arange(12.0)
    logits[2, 3] = logits[2, 1]
    # zeros of either sign are equal
    logits[3, 2::2] = -0.0
    ids, weights = route(engine(), logits, 4, normalize=True)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [0, 1, 3, 2], [0, 1, 2, 3]]
    assert torch.equal(weights[0], torch.full((4,), 0.25, device=DEVICE))
    assert torch.equal(ids, route_ref(logits, 4, True)[0])


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((3, 6), float("nan"), device=DEVICE)
    logits[1, 4] = -torch.inf
    logits[2, 3:] = torch.tensor([1.0, 5.0, -2.0], device=DEVICE)
    ids, weights = route(engine(), logits, 4, normalize=True)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 3, 5, 0]]
    assert torch.equal(ids, route_ref(logits, 4, True)[0])
    assert not torch.isfinite(weights).any()


def test_a_shared_expert_takes_the_last_place_and_its_own_weight() -> None:
    # the router and the gate are columns of one product
    both = random_logits(5, 17)
    logits, gate = both[:, :16], both[:, 16:]
    ids, weights = route(engine(), logits, 4, True, gate)
    want_ids, want = route_ref(logits, 4, True, gate)
    assert torch.equal(ids, want_ids)
    assert ids[:, 4].tolist() == [16] * 5
    assert relative_rms(weights, want) < 1e-6


def test_more_experts_than_a_warp_holds_are_refused() -> None:
    with pytest.raises(InternalError, match="cannot be chosen"):
        route(engine(), random_logits(1, 2048), 8, True)


@pytest.mark.parametrize("tokens", [1, 3, MANY])
@pytest.mark.parametrize("name", ["i8g32", "u4g256"])
@pytest.mark.parametrize("shared", [0, 1])
def test_a_packed_router_makes_logits_and_chooses(name: str, tokens: int, shared: int) -> None:
    matrix, scratch = random_matrix(PACKED_LAYOUTS[name], 21 + shared, 360), Poisoned()
    x = random_rows(tokens, 400)[:, 40:] * 1e-3
    # of few tokens nothing is rounded
    exact = name == "i8g32" and tokens <= PAIR_TOKENS
    ids, weights = route_packed(engine("int8" if exact else "float", scratch), x, matrix, 21, 4, True)
    want_ids, want = route_packed_ref(x, matrix, 21, 4, True)
    assert torch.equal(ids, want_ids)
    assert ids.shape[1] == 4 + shared
    assert relative_rms(weights, want) < 1e-5
    scratch.check_guards()


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize(("tokens", "places", "experts"), [(1, 1, 1), (9, 3, 5), (150, 3, 7), (40, 2, 64)])
def test_pairs_are_in_order_of_their_experts(tokens: int, places: int, experts: int, tile: int) -> None:
    ids, scratch = random_ids(tokens, places, experts), Poisoned()
    pairs = sort_pairs(engine(scratch=scratch), ids, experts, tile)
    chosen = ids.flatten().cpu()
    assert torch.equal(pairs.order.cpu().long(), torch.sort(chosen, stable=True).indices)
    wanted = []
    for expert in range(experts):
        first, count = int((chosen < expert).sum()), int((chosen == expert).sum())
        wanted += [[expert, first + at, min(tile, count - at)] for at in range(0, count, tile)]
    rows = pairs.tiles.cpu()[:, :3].tolist()
    assert rows[: len(wanted)] == wanted
    assert all(count == 0 for _, _, count in rows[len(wanted) :])
    scratch.check_guards()


def test_pairs_of_several_rounds_of_a_program() -> None:
    ids = random_ids(1500, 3, 6)
    pairs = sort_pairs(engine(), ids, 6, 64)
    assert torch.equal(pairs.order.cpu().long(), torch.sort(ids.flatten().cpu(), stable=True).indices)


@pytest.mark.parametrize("arithmetic", ["int8", "float"])
@pytest.mark.parametrize("tokens", [1, 3, MANY])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_products_match_the_reference(layout, tokens: int, arithmetic: Arithmetic) -> None:
    # rows that fill no program, and columns that end inside a group and inside a unit
    first, second = stack(layout.name, 6, 26, 360), stack(layout.name, 6, 19, 360, seed=2)
    ids, scratch = random_ids(tokens, 3, 6), Poisoned()
    used = engine(arithmetic, scratch)
    x = random_rows(tokens, 360) * 0.02
    got = expert_gated(used, x, ids, first, "silu")
    assert relative_rms(got, expert_gated_ref(x, ids, first, "silu")) < BOUNDS[arithmetic]
    hidden, weights = random_rows(tokens * 3, 360, seed=4), random_logits(tokens, 3).abs()
    out = expert_down(used, hidden, ids, weights, second)
    assert relative_rms(out, expert_down_ref(hidden, ids, weights, second)) < BOUNDS[arithmetic]
    scratch.check_guards()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nothing_but_activations_is_rounded(layout) -> None:
    experts, down = stack(layout.name, 5, 24, 360), stack(layout.name, 5, 13, 360, seed=1)
    ids, weights, used = random_ids(2, 2, 5), random_logits(2, 2), engine()
    x, hidden = random_rows(2, 360) * 0.02, random_rows(4, 360, seed=4)
    seen = as_multiplied(prepare(used, x, "int8"), 360).float()
    got = expert_gated(used, x, ids, experts, "gelu_pytorch_tanh")
    assert relative_rms(got, expert_gated_ref(seen, ids, experts, "gelu_pytorch_tanh")) < 3e-6
    seen = as_multiplied(prepare(used, hidden, "int8"), 360).float()
    got = expert_down(used, hidden, ids, weights, down)
    assert relative_rms(got, expert_down_ref(seen, ids, weights, down)) < 3e-6


@pytest.mark.parametrize("name", ["u4g128", "u4g256", "u4g128h"])
def test_codes_of_large_groups_are_exact_on_matrix_units(name: str) -> None:
    experts, ids = stack(name, 5, 26, 512), random_ids(MANY, 2, 5)
    x, used = random_rows(MANY, 512) * 0.02, engine()
    seen = as_multiplied(prepare(used, x, "bf16"), 512).float()
    got = expert_gated(used, x, ids, experts, "silu")
    assert relative_rms(got, expert_gated_ref(seen, ids, experts, "silu")) < 1e-5


@pytest.mark.parametrize("cols", [32, 64, 704, 2112])
@pytest.mark.parametrize("name", ["u4g128", "o6g16", "i8g32"])
def test_single_tokens_of_many_widths(name: str, cols: int) -> None:
    experts, ids, scratch = stack(name, 4, 10, cols), random_ids(1, 3, 4), Poisoned()
    used, hidden, weights = engine(scratch=scratch), random_rows(3, cols), random_logits(1, 3)
    out = expert_down(used, hidden, ids, weights, experts)
    assert relative_rms(out, expert_down_ref(hidden, ids, weights, experts)) < BOUNDS["int8"]
    x = random_rows(1, cols) * 0.02
    got = expert_gated(used, x, ids, experts, "silu")
    # two rounded products are multiplied
    assert relative_rms(got, expert_gated_ref(x, ids, experts, "silu")) < 2 * BOUNDS["int8"]
    scratch.check_guards()


@pytest.mark.parametrize("tokens", [2, MANY])
def test_hidden_columns_are_rotated_where_the_next_weights_are(tokens: int) -> None:
    experts, ids = stack("u4g256", 3, 512, 256), random_ids(tokens, 2, 3)
    x, used = random_rows(tokens, 256) * 0.02, engine()
    got = expert_gated(used, x, ids, experts, "silu", rotated=True)
    assert relative_rms(got, expert_gated_ref(x, ids, experts, "silu", rotated=True)) < BOUNDS["int8"]
    assert (used.prepared("int8", got) is not None) == (tokens <= PAIR_TOKENS)


def test_a_token_is_what_it_would_be_alone_in_the_same_kernels() -> None:
    experts, down = stack("u4g128", 6, 32, 128), stack("u4g128", 6, 16, 128, seed=3)
    for tokens in (4, 2 * MANY):
        ids, weights = random_ids(tokens, 2, 6), random_logits(tokens, 2)
        x, hidden = random_rows(tokens, 128), random_rows(2 * tokens, 128, seed=5)
        gated = expert_gated(engine(), x, ids, experts, "silu")
        out = expert_down(engine(), hidden, ids, weights, down)
        first, some = tokens // 2, slice(tokens // 2 * 2, None)
        part = expert_gated(engine(), x[first:], ids[first:].contiguous(), experts, "silu")
        assert torch.equal(part, gated[some])
        part = expert_down(engine(), hidden[some], ids[first:].contiguous(), weights[first:], down)
        assert torch.equal(part, out[first:])


def test_long_steps_give_bfloat16_to_products_and_float_to_the_sum() -> None:
    experts, ids, used = stack("i8g32", 2, 16, 32), random_ids(300, 1, 2), engine()
    hidden = expert_gated(used, random_rows(300, 32) * 0.05, ids, experts, "silu")
    assert hidden.dtype == torch.bfloat16
    down = stack("i8g32", 2, 16, 8, seed=6)
    weights = random_logits(300, 1)
    out = expert_down(used, hidden, ids, weights, down)
    assert out.dtype == torch.float32
    assert relative_rms(out, expert_down_ref(hidden, ids, weights, down)) < 1e-2


def test_places_are_added_up_in_their_order() -> None:
    down, ids, used = stack("u4g128", 4, 16, 128), random_ids(MANY, 3, 4), engine()
    hidden, weights = random_rows(3 * MANY, 128), random_logits(MANY, 3)
    products = used.empty("test", (3 * MANY, 16))
    multiply_tiles(used, hidden, sort_pairs(used, ids, 4, 16), down, products, 1, 16, None)
    out = used.empty("test", (MANY, 16))
    sum_places(used, products, weights, out)
    terms = products.view(MANY, 3, 16) * weights[:, :, None]
    # a GPU may round a product and a sum together
    assert relative_rms(out, (terms[:, 0] + terms[:, 1]) + terms[:, 2]) < 2e-7
    assert torch.equal(out, expert_down(engine(), hidden, ids, weights, down))


def test_shared_results_are_gated_token_by_token() -> None:
    x, wide = random_rows(5, 40), random_rows(5, 61)
    y, gate = wide[:, :40], wide[:, 50:51]
    scratch = Poisoned()
    out = add_gated(engine(scratch=scratch), x, y, gate)
    assert relative_rms(out, add_gated_ref(x, y, gate)) < 1e-6
    scratch.check_guards()


def test_only_packed_experts_have_kernels() -> None:
    floats = FloatExperts(torch.zeros(2, 4, 32))
    with pytest.raises(InternalError, match="not packed"):
        expert_gated(engine(), random_rows(1, 32), random_ids(1, 1, 2), floats, "silu")
