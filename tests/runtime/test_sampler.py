"""The order of the sampler's stages, its draws and its random numbers, against the slow reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from sampler_reference import (
    BORDER,
    EVERYTHING_ON,
    SIZES,
    chi_square,
    draws,
    expected_tokens,
    random_logits,
    reference,
)

from hipfire.base.sampling import SamplingParams
from hipfire.runtime.sampler import Sampler, uniform

any_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(0.05, 2),
    top_k=st.integers(-1, 14),
    top_p=st.floats(0, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
    repeat_penalty=st.floats(1, 3),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    penalty_window=st.integers(-1, 12),
    seed=st.integers(0, 2**64 - 1),
)
# few distinct values, so that ties are common
any_logits = st.lists(
    st.sampled_from([-4.0, -1.5, 0.0, 0.5, 2.0]) | st.floats(-6, 6, width=32), min_size=1, max_size=12
)


@settings(max_examples=200, deadline=None)
@given(any_logits, any_params, st.lists(st.integers(0, 11), max_size=20), st.sets(st.integers(0, 11)))
@example([1.0, 1.0, 1.0, 1.0], SamplingParams(top_k=2, seed=5), [], set())
@example([0.0, 0.0, 0.0], SamplingParams(top_p=0, seed=5), [], set())
def test_every_draw_is_the_reference_draw(
    logits: list[float], params: SamplingParams, history: list[int], blocked: set[int]
) -> None:
    size = len(logits)
    history = [token % size for token in history]
    blocked = {token for token in blocked if token < size}
    assume(len(blocked) < size)
    probabilities, margin = reference(logits, params, history, sorted(blocked))
    assume(margin > BORDER)
    sampler = Sampler(params, size, blocked_ids=blocked)
    row = torch.tensor(logits, dtype=torch.float32)
    shares = [uniform(sampler.seed, number) for number in range(4)]
    for expected in expected_tokens(probabilities, shares):
        token = sampler.sample(row, history).id
        assert token == expected or (expected is None and token in probabilities)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_p=0.9),
        SamplingParams(seed=3, top_p=0.5, temperature=2.0),
        EVERYTHING_ON,
    ],
    ids=["plain", "top_p", "flat", "all"],
)
def test_any_vocabulary_size_draws_as_the_reference(size: int, params: SamplingParams) -> None:
    row = random_logits(size, seed=size)
    history = [7 % size, 7 % size, size - 1, int(row.argmax())]
    probabilities, margin = reference(row.tolist(), params, history)
    assert margin > 1e-12
    sampler = Sampler(params, size)
    shares = [uniform(sampler.seed, number) for number in range(6)]
    for expected in expected_tokens(probabilities, shares):
        token = sampler.sample(row, history).id
        assert token == expected or (expected is None and token in probabilities)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 4.0], ids=["equal", "flat", "peaked"])
@pytest.mark.parametrize("top_p", [0.0, 0.25, 0.5, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_it_in_large_vocabularies(
    spread: float, top_p: float
) -> None:
    size = 8192
    row = random_logits(size, seed=4, scale=spread)
    params = SamplingParams(top_p=top_p, seed=0)
    probabilities, _ = reference(row.tolist(), params)
    drawn = set(draws(Sampler(params, size), row, 1000))
    assert drawn <= probabilities.keys()
    # the draws must also spread over the set and not hide in a corner of it
    assert len(drawn) >= min(len(probabilities), 1000) // 8


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=1.7),
        SamplingParams(seed=1, top_k=5),
        SamplingParams(seed=1, top_p=0.8),
        SamplingParams(seed=1, min_p=0.15),
        SamplingParams(seed=1, temperature=1.3, top_k=7, min_p=0.05, top_p=0.93),
    ],
    ids=lambda params: "-".join(f"{k}={v}" for k, v in asdict(params).items() if v not in (0, 1, None, 128)),
)
def test_frequencies_of_draws_fit_the_exact_probabilities(params: SamplingParams) -> None:
    row = torch.tensor([0.3, 2.0, -1.0, 1.4, 1.4, 0.0, -0.2, 1.9, -2.5, 0.8])
    count = 5_000
    counts = Counter(draws(Sampler(params, 10), row, count))
    probabilities, _ = reference(row.tolist(), params)
    assert counts.keys() <= probabilities.keys()
    # 33.7 is the 1e-4 tail of chi-square with 9 degrees of freedom; fewer candidates have lower tails
    assert chi_square(counts, probabilities) < 33.7
    # the same test tells a temperature apart that is only a little off
    shifted, _ = reference(row.tolist(), replace(params, temperature=params.temperature * 0.8))
    assert counts.keys() - shifted.keys() or chi_square(counts, shifted) > 33.7


# ---- the random numbers


def test_uniform_fills_the_unit_interval_evenly_over_draws_and_over_seeds() -> None:
    for numbers in ([uniform(5, draw) for draw in range(6400)], [uniform(seed, 5) for seed in range(6400)]):
        assert all(0 <= number < 1 for number in numbers)
        counts = Counter(int(number * 64) for number in numbers)
        # the 1e-4 tails of chi-square with 63 degrees of freedom, both sides: too even is not random either
        assert 28 < chi_square(counts, dict.fromkeys(range(64), 1 / 64)) < 112
        pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
        assert abs(pairs) < 0.05


def test_a_seed_gives_the_same_draws_and_another_seed_gives_others() -> None:
    row = random_logits(1000)
    first = draws(Sampler(SamplingParams(seed=9), 1000), row, 40)
    assert draws(Sampler(SamplingParams(seed=9), 1000), row, 40) == first
    assert draws(Sampler(SamplingParams(seed=10), 1000), row, 40) != first
    assert draws(Sampler(SamplingParams(seed=0), 1000), row, 40) != first


def test_the_draw_number_belongs_to_the_token_whatever_came_before() -> None:
    row = random_logits(500)
    peaked = torch.zeros(500)
    peaked[3] = 100.0
    plain, other = (Sampler(SamplingParams(seed=2), 500) for _ in range(2))
    draws(plain, row, 5)
    draws(other, peaked, 5)
    assert draws(plain, row, 10) == draws(other, row, 10)


def test_without_a_seed_every_request_differs_and_tells_its_seed() -> None:
    row = random_logits(5000)
    samplers = [Sampler(SamplingParams(), 5000) for _ in range(4)]
    texts = [draws(sampler, row, 30) for sampler in samplers]
    assert len({sampler.seed for sampler in samplers}) == 4
    assert len({tuple(text) for text in texts}) == 4
    replay = Sampler(SamplingParams(seed=samplers[2].seed), 5000)
    assert draws(replay, row, 30) == texts[2]


@pytest.mark.parametrize("neighbour_seed", [None, 77], ids=["unseeded", "seeded"])
def test_seeded_draws_do_not_depend_on_neighbours(neighbour_seed: int | None) -> None:
    row = random_logits(2000)
    alone = draws(Sampler(SamplingParams(seed=42, top_p=0.9), 2000), row, 25)
    mine = Sampler(SamplingParams(seed=42, top_p=0.9), 2000)
    neighbour = Sampler(SamplingParams(seed=neighbour_seed, top_k=9), 2000)
    together = []
    for step in range(25):
        draws(neighbour, row, step % 3)
        together.append(mine.sample(row, []).id)
    assert together == alone


# ---- top_k


@pytest.mark.parametrize("top_k", [-1, 0, 1, 30, 31, 32, 10**9])
def test_top_k_around_and_far_beyond_the_vocabulary_is_defined(top_k: int) -> None:
    row = random_logits(31, scale=0.5)
    params = SamplingParams(top_k=top_k, seed=6)
    drawn = set(draws(Sampler(params, 31), row, 1500))
    ranked = sorted(range(31), key=lambda i: -float(row[i]))
    kept = top_k if 0 < top_k < 31 else 31
    assert drawn == set(ranked[:kept])


def test_min_p_of_one_keeps_the_most_probable_tokens_and_all_their_equals() -> None:
    row = torch.tensor([1.0, 3.0, 2.999, 3.0])
    assert set(draws(Sampler(SamplingParams(min_p=1, seed=1), 4), row, 60)) == {1, 3}


def test_ties_at_the_edge_of_top_k_and_top_p_keep_the_lowest_ids() -> None:
    row = torch.tensor([1.0, 3.0, 1.0, 1.0, 3.0, 1.0])
    assert set(draws(Sampler(SamplingParams(top_k=3, seed=1), 6), row, 300)) == {0, 1, 4}
    equal = torch.zeros(3000)
    assert set(draws(Sampler(SamplingParams(top_k=2, seed=1), 3000), equal, 50)) == {0, 1}
    assert set(draws(Sampler(SamplingParams(top_p=0.001, seed=1), 3000), equal, 50)) == {0, 1, 2}
