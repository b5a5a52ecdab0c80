"""Broken logits, the caller's data, and log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sampler_reference import (
    EVERYTHING_ON,
    SIZES,
    draws,
    random_logits,
)

from hipfire.base.errors import InternalError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.runtime.sampler import Sampler

# ---- broken logits


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 37, 99])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(seed=1), replace(EVERYTHING_ON, top_k=1)],
    ids=["greedy", "plain", "all"],
)
def test_one_bad_logit_ends_that_request_and_no_other(params: SamplingParams, place: int, bad: float) -> None:
    good = random_logits(100)
    broken = good.clone()
    broken[place] = bad
    victim, neighbour, control = (Sampler(params, 100, blocked_ids=[37]) for _ in range(3))
    for sampler in (victim, neighbour, control):
        sampler.sample(good, [])
    with pytest.raises(InternalError, match="unusable logits: the largest is"):
        victim.sample(broken, [])
    expected = draws(control, good, 10)
    assert draws(neighbour, good, 10) == expected
    # the failed call did not use up a draw
    assert victim.generated == 1
    assert draws(victim, good, 10) == expected


@pytest.mark.parametrize("fill", [math.nan, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("blocked", [[], [2]], ids=["direct", "masked"])
def test_rows_without_any_finite_logit_are_refused(
    fill: float, temperature: float, blocked: list[int]
) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 64, blocked_ids=blocked)
    with pytest.raises(InternalError, match="unusable logits"):
        sampler.sample(torch.full((64,), fill), [])


def test_blocking_every_candidate_is_an_error_and_not_a_draw() -> None:
    row = torch.tensor([1.0, -math.inf, 2.0])
    for temperature in (0.0, 1.0):
        with pytest.raises(InternalError, match="every candidate is blocked"):
            Sampler(SamplingParams(temperature=temperature), 3, blocked_ids=[0, 2]).sample(row, [])


def test_minus_infinity_from_the_model_is_never_drawn() -> None:
    row = torch.full((2000,), -math.inf)
    row[[3, 1900]] = torch.tensor([0.0, 0.1])
    for params in (
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=50),
        SamplingParams(seed=1, top_p=0.99),
    ):
        assert set(draws(Sampler(params, 2000), row, 100)) == {3, 1900}


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(9), torch.zeros(1, 10), torch.zeros(10, dtype=torch.bfloat16), torch.zeros(10).double()],
)
def test_logits_of_another_shape_or_type_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(InternalError, match=r"must be torch.float32 \[10\]"):
        Sampler(SamplingParams(), 10).sample(logits, [])


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=1), EVERYTHING_ON])
def test_the_callers_logits_are_not_changed(params: SamplingParams) -> None:
    row = random_logits(400)
    row.requires_grad_()
    before = row.detach().clone()
    sampler = Sampler(params, 400, 390, generation=GenerationParams(top_logprobs=3), blocked_ids=[4])
    for _ in range(3):
        sampler.sample(row, [1, 2, 2])
        sampler.top_logprobs(row, 5)
    assert torch.equal(row.detach(), before)


def test_rows_of_a_batch_and_strided_views_are_read_correctly() -> None:
    block = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    columns = block.T.contiguous().T
    for params in (SamplingParams(temperature=0), SamplingParams(seed=4)):
        for index in range(6):
            expected = Sampler(params, 50).sample(block[index].clone(), [])
            assert Sampler(params, 50).sample(columns[index], []) == expected


# ---- log-probabilities


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), EVERYTHING_ON], ids=["greedy", "all"])
def test_logprobs_are_those_of_the_unmodified_distribution(size: int, params: SamplingParams) -> None:
    row = random_logits(size, seed=1)
    exact = torch.log_softmax(row.double(), dim=0)
    sampler = Sampler(params, size, generation=GenerationParams(top_logprobs=0))
    for _ in range(3):
        token, logprob = sampler.sample(row, [0, 0])
        assert logprob == pytest.approx(float(exact[token]), abs=1e-11)


def test_logprob_is_absent_unless_asked_for() -> None:
    row = random_logits(20)
    assert Sampler(SamplingParams(temperature=0), 20).sample(row, []).logprob is None


@pytest.mark.parametrize("size", SIZES)
def test_top_logprobs_agree_with_a_stable_sort_and_do_not_depend_on_k(size: int) -> None:
    row = (random_logits(size, seed=2) * 4).round() / 4
    exact = torch.log_softmax(row.double(), dim=0)
    order = torch.sort(row, descending=True, stable=True).indices[:21].tolist()
    sampler = Sampler(SamplingParams(), size, blocked_ids=[order[0]])
    longest = sampler.top_logprobs(row, 20)
    assert [token for token, _ in longest] == order[:20]
    assert [value for _, value in longest] == pytest.approx(exact[order[:20]].tolist(), abs=1e-11)
    for k in (0, 1, 7):
        assert sampler.top_logprobs(row, k) == longest[:k]


def test_top_logprobs_stop_at_the_vocabulary_and_at_probability_zero() -> None:
    row = torch.tensor([0.0, -math.inf, 0.0, 30.0])
    sampler = Sampler(SamplingParams(), 4, 3)
    assert sampler.top_logprobs(row, 50) == [(0, -math.log(2)), (2, -math.log(2))]
    with pytest.raises(ValidationError, match="top_logprobs is -1"):
        sampler.top_logprobs(row, -1)
    with pytest.raises(InternalError, match="unusable logits"):
        sampler.top_logprobs(torch.full((4,), math.nan), 2)
