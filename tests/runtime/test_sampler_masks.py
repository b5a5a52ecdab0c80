"""Greedy choice, penalties, blocked ids and end tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampler_reference import (
    EVERYTHING_ON,
    draws,
    penalized,
    random_logits,
)

from hipfire.base.errors import InternalError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.runtime.sampler import Sampler

# ---- greedy


@pytest.mark.parametrize("temperature", [0, 1e-5, 1e-9, 1e-40, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_tiny_temperatures_equal_argmax_with_every_other_stage_on(temperature: float, scale: float) -> None:
    params = replace(EVERYTHING_ON, temperature=temperature)
    for seed in range(5):
        row = random_logits(300, seed, scale)
        history = [int(row.argmax()), 4, 4, 9]
        values = penalized(row.tolist(), params, history)
        sampler = Sampler(params, 300, generation=GenerationParams(top_logprobs=0))
        token, logprob = sampler.sample(row, history)
        assert token == values.index(max(values))
        assert logprob is not None
        assert logprob <= 0
        bare = Sampler(SamplingParams(temperature=temperature), 300)
        assert bare.sample(row, history).id == int(row.argmax())


@pytest.mark.parametrize("blocked", [(), (0,)], ids=["direct", "masked"])
def test_greedy_ties_go_to_the_lowest_index(blocked: tuple[int, ...]) -> None:
    row = torch.zeros(100_003)
    for places in ([99_990, 64, 65], [100_002, 50_000], [7, 8, 9]):
        row.zero_()
        row[places] = 2.5
        assert Sampler(SamplingParams(temperature=0), 100_003, blocked_ids=blocked).sample(row, []).id == min(
            places
        )


# ---- penalties


def test_penalties_count_only_the_trailing_window() -> None:
    row = torch.tensor([2.0, 1.9, 0.0])
    params = SamplingParams(temperature=0, presence_penalty=1.0, penalty_window=2)
    assert Sampler(params, 3).sample(row, [0, 1, 2]).id == 0
    assert Sampler(params, 3).sample(row, [1, 0, 2]).id == 1
    assert Sampler(replace(params, penalty_window=-1), 3).sample(row, [1] + [0] * 500 + [2] * 500).id == 0
    assert Sampler(replace(params, penalty_window=-1), 3).sample(row, [0] + [2] * 1000).id == 1
    assert Sampler(replace(params, penalty_window=0), 3).sample(row, [0, 0, 0]).id == 0


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    params = SamplingParams(temperature=0, repeat_penalty=2.0)
    assert Sampler(params, 2).sample(torch.tensor([3.0, 1.6]), [0]).id == 1
    assert Sampler(params, 2).sample(torch.tensor([3.0, 1.4]), [0]).id == 0
    assert Sampler(params, 2).sample(torch.tensor([3.0, 1.4]), [0] * 50).id == 0
    assert Sampler(params, 2).sample(torch.tensor([-1.0, -1.9]), [0]).id == 1
    assert Sampler(params, 2).sample(torch.tensor([-1.0, -2.1]), [0]).id == 0


def test_presence_counts_once_and_frequency_every_time() -> None:
    row = torch.tensor([5.0, 3.9])
    presence = SamplingParams(temperature=0, presence_penalty=1.0)
    frequency = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert Sampler(presence, 2).sample(row, [0] * 9).id == 0
    assert Sampler(frequency, 2).sample(row, [0]).id == 0
    assert Sampler(frequency, 2).sample(row, [0, 0]).id == 1


def test_prompt_and_reply_tokens_are_counted_alike_so_a_warm_prompt_changes_nothing() -> None:
    params = replace(EVERYTHING_ON, penalty_window=40)
    row = random_logits(200, scale=0.7)
    prompt, reply = row.topk(30).indices.tolist(), [5, 6, 5]
    cold, warm = Sampler(params, 200), Sampler(params, 200)
    warm_history = tuple(prompt) + tuple(reply)
    assert draws(cold, row, 20, prompt + reply) == draws(warm, row, 20, warm_history)
    # a prompt that went uncounted would draw differently
    assert draws(Sampler(params, 200), row, 20, reply) != draws(Sampler(params, 200), row, 20, warm_history)


@pytest.mark.parametrize("token", [-1, 12])
def test_a_history_id_outside_the_vocabulary_is_refused(token: int) -> None:
    sampler = Sampler(SamplingParams(repeat_penalty=1.1), 12)
    with pytest.raises(InternalError, match=r"history holds a token id outside 0\.\.11"):
        sampler.sample(torch.zeros(12), [3, token])


# ---- blocks and end tokens


def test_surplus_rows_are_never_drawn_and_history_may_name_them() -> None:
    row = torch.zeros(40)
    row[32:] = 50.0
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1), replace(EVERYTHING_ON, top_k=0)):
        assert max(draws(Sampler(params, 40, 32), row, 60, [35, 3])) < 32


def test_surplus_rows_may_hold_anything() -> None:
    row = torch.zeros(40)
    row[32:] = math.nan
    row[5] = 1.0
    sampler = Sampler(SamplingParams(temperature=0), 40, 32, generation=GenerationParams(top_logprobs=1))
    token, logprob = sampler.sample(row, [])
    assert token == 5
    assert logprob == pytest.approx(1 - math.log(31 + math.e), abs=1e-12)


def test_blocked_ids_are_never_drawn() -> None:
    row = torch.tensor([5.0, 1.0, 5.0, 0.5])
    assert set(draws(Sampler(SamplingParams(seed=1), 4, blocked_ids=[0, 2]), row, 200)) == {1, 3}
    assert Sampler(SamplingParams(temperature=0), 4, blocked_ids=[0, 2]).sample(row, []).id == 1


def test_ignoring_end_tokens_blocks_these_ids_and_not_the_last_row() -> None:
    row = torch.zeros(50)
    row[49], row[7], row[9] = 8.0, 9.0, 9.5
    sampler = Sampler(
        SamplingParams(temperature=0), 50, generation=GenerationParams(ignore_eos=True), end_ids={7, 9}
    )
    assert draws(sampler, row, 3) == [49, 49, 49]


def test_min_tokens_counts_generated_tokens_and_not_the_prompt() -> None:
    row = torch.tensor([0.0, 1.0, 9.0, 8.0])
    generation = GenerationParams(min_tokens=3)
    sampler = Sampler(SamplingParams(temperature=0), 4, generation=generation, end_ids=[2, 3])
    assert draws(sampler, row, 5, history=[0] * 100) == [1, 1, 1, 2, 2]
    assert sampler.generated == 5


def test_an_end_token_without_a_row_is_harmless() -> None:
    sampler = Sampler(
        SamplingParams(temperature=0), 6, 4, generation=GenerationParams(ignore_eos=True), end_ids=[5, 99]
    )
    assert sampler.sample(torch.tensor([0.0, 0.0, 0.0, 1.0, 9.0, 9.0]), []).id == 3


@pytest.mark.parametrize("bad", [-1, 8, 9, 10, True, "3"])
def test_blocked_ids_outside_the_real_vocabulary_are_refused(bad: Any) -> None:
    with pytest.raises(ValidationError, match=r"blocked_ids holds .* but token ids go from 0 to 7"):
        Sampler(SamplingParams(), 10, 8, blocked_ids=[1, bad])


def test_a_negative_end_id_is_refused() -> None:
    with pytest.raises(ValidationError, match="end_ids holds -1"):
        Sampler(SamplingParams(), 10, end_ids=[-1])


@pytest.mark.parametrize(("vocab", "real"), [(0, None), (10, 0), (10, 11)])
def test_impossible_vocabulary_sizes_are_refused(vocab: int, real: int | None) -> None:
    with pytest.raises(ValidationError, match="do not fit a vocabulary"):
        Sampler(SamplingParams(), vocab, real)
