"""Biases on tokens and masks of allowed ones, beside all other stages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sampler_reference import random_logits

from hipfire.base.errors import InternalError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.runtime.sampler import Sampler


def mask(size: int, *allowed: int) -> Any:
    made = np.zeros(size, np.bool_)
    made[list(allowed)] = True
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_is_added_to_the_logit(temperature: float) -> None:
    row = random_logits(50, 1)
    shifted = row.clone()
    shifted[[3, 9]] += torch.tensor([4.5, -2.0])
    bias = {9: -2.0, 3: 4.5}
    biased = Sampler(SamplingParams(temperature=temperature, seed=1, logit_bias=bias), 50)  # type: ignore[arg-type]
    plain = Sampler(SamplingParams(temperature=temperature, seed=1), 50)
    for _ in range(60):
        assert biased.sample(row, []).id == plain.sample(shifted, []).id


def test_a_bias_of_a_hundred_decides_and_of_minus_a_hundred_excludes() -> None:
    row = random_logits(20, 2)
    best = int(row.argmax())
    for greedy in (0.0, 1.0):
        wanted = Sampler(SamplingParams(temperature=greedy, logit_bias=((7, 100.0),)), 20)
        unwanted = Sampler(SamplingParams(temperature=greedy, logit_bias=((best, -100.0),)), 20)
        assert {wanted.sample(row, []).id for _ in range(20)} == {7}
        assert best not in {unwanted.sample(row, []).id for _ in range(20)}


def test_probabilities_are_those_before_the_bias() -> None:
    row = random_logits(20, 3)
    params = SamplingParams(temperature=0, logit_bias=((7, 100.0),))
    token, logprob = Sampler(params, 20, generation=GenerationParams(top_logprobs=0)).sample(row, [])
    assert token == 7
    assert logprob == pytest.approx(float(torch.log_softmax(row.double(), -1)[7]))


def test_a_bias_cannot_bring_back_what_is_blocked() -> None:
    params = SamplingParams(temperature=0, logit_bias=((2, 100.0),))
    row = torch.tensor([1.0, 2.0, 3.0])
    assert Sampler(params, 3, blocked_ids=[2]).sample(row, []).id == 1
    early = Sampler(params, 3, end_ids=[2], generation=GenerationParams(min_tokens=1))
    assert [early.sample(row, []).id for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("token", [5, 10**6])
def test_a_bias_on_a_token_that_does_not_exist_is_refused(token: int) -> None:
    params = SamplingParams(logit_bias=((token, 1.0),))
    # six rows of which five stand for tokens
    with pytest.raises(ValidationError, match=f"logit_bias holds {token}"):
        Sampler(params, 6, 5)


@pytest.mark.parametrize(
    "bias",
    ["5", 5, [5], [[1, 2, 3]], {"5": 1.0}, {True: 1.0}, {-1: 1.0}, {1: "x"}, {1: 101}, {1: float("nan")}],
)
def test_biases_that_make_no_sense_are_refused(bias: Any) -> None:
    with pytest.raises(ValidationError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_biases_are_kept_in_one_form() -> None:
    forms: list[Any] = [{9: 1, 3: -2.5}, ((9, 1), (3, -2.5)), [[3, -2.5], [9, 1.0]]]
    made = {SamplingParams(logit_bias=form) for form in forms}
    assert [params.logit_bias for params in made] == [((3, -2.5), (9, 1.0))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    row = random_logits(300, 4)
    order = row.argsort(descending=True).tolist()
    allowed = mask(300, *order[100:103])
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=50, seed=2), 300)
    drawn = Counter(sampler.sample(row, [], allowed).id for _ in range(200))
    assert set(drawn) == ({order[100]} if temperature == 0 else set(order[100:103]))


def test_a_mask_that_allows_all_changes_nothing() -> None:
    row = random_logits(300, 5)
    one, two = (Sampler(SamplingParams(top_p=0.9, seed=2), 300) for _ in range(2))
    for _ in range(30):
        assert one.sample(row, [], np.ones(300, np.bool_)) == two.sample(row, [])


def test_a_mask_that_leaves_nothing_is_an_error_and_draws_nothing() -> None:
    sampler = Sampler(SamplingParams(), 5, blocked_ids=[2])
    with pytest.raises(InternalError, match="no token is left"):
        sampler.sample(torch.zeros(5), [], mask(5, 2))
    assert sampler.generated == 0
