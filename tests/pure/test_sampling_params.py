"""Sampling and generation parameters: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipfire.base.errors import ValidationError
from hipfire.base.sampling import GREEDY_TEMPERATURE, GenerationParams, SamplingParams

# field: (lowest, highest, a value below, a value above)
NUMBERS: dict[str, tuple[float, float, float, float]] = {
    "temperature": (0.0, 2.0, -0.001, 2.001),
    "top_p": (0.0, 1.0, -0.001, 1.001),
    "min_p": (0.0, 1.0, -0.001, 1.001),
    "repeat_penalty": (1.0, 3.0, 0.999, 3.001),
    "presence_penalty": (-2.0, 2.0, -2.001, 2.001),
    "frequency_penalty": (-2.0, 2.0, -2.001, 2.001),
}


def test_defaults_switch_every_stage_off() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "penalty_window": 128,
        "seed": None,
        "logit_bias": (),
    }
    assert not params.greedy
    assert not params.penalizes


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "penalty_window",
        "seed",
    ],
)
def test_explicit_zero_is_accepted_and_kept(name: str) -> None:
    value = getattr(SamplingParams(**{name: 0}), name)
    assert value == 0
    assert value is not None
    assert type(value) is (int if name in ("top_k", "penalty_window", "seed") else float)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_accepted_up_to_their_limits(name: str) -> None:
    low, high, below, above = NUMBERS[name]
    for value in (low, high):
        inside: dict[str, Any] = {name: value}
        assert getattr(SamplingParams(**inside), name) == value
    for value in (below, above):
        outside: dict[str, Any] = {name: value}
        with pytest.raises(ValidationError) as caught:
            SamplingParams(**outside)
        assert f"{name} is {value} but must be a number from {low:g} to {high:g}" in str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, False, "1", None, [1.0], 10**400])
def test_numbers_refuse_what_is_no_finite_number(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"^{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["top_k", "penalty_window", "seed"])
@pytest.mark.parametrize("value", [True, 1.0, "7", math.nan, [1]])
def test_integers_refuse_other_types(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"^{name} is "):
        SamplingParams(**{name: value})


def test_repeat_penalty_of_zero_says_how_to_switch_it_off() -> None:
    with pytest.raises(ValidationError, match="1 switches it off"):
        SamplingParams(repeat_penalty=0)


@pytest.mark.parametrize("top_k", [-1, 0, 1, 151669, 10**9])
def test_top_k_has_no_upper_limit(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k


@pytest.mark.parametrize(("name", "value"), [("top_k", -2), ("penalty_window", -2)])
def test_less_than_minus_one_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValidationError, match=f"{name} is -2 but must be an integer of at least -1"):
        SamplingParams(**{name: value})


def test_seed_covers_u64_and_nothing_else() -> None:
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    for seed in (-1, 2**64):
        with pytest.raises(ValidationError, match=f"seed is {seed} but must be an integer from 0 to"):
            SamplingParams(seed=seed)


@pytest.mark.parametrize(
    ("temperature", "greedy"),
    [(0, True), (5e-324, True), (1e-9, True), (1e-5, True), (2e-5, False), (0.7, False)],
)
def test_greedy_covers_zero_and_temperatures_too_small_to_divide_by(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
    assert SamplingParams(temperature=GREEDY_TEMPERATURE).greedy


@pytest.mark.parametrize(
    ("fields", "penalizes"),
    [
        ({"repeat_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5, "penalty_window": -1}, True),
        ({"repeat_penalty": 1.1, "presence_penalty": 1, "penalty_window": 0}, False),
        ({"repeat_penalty": 1}, False),
    ],
)
def test_penalizes_tells_whether_a_logit_can_change(fields: dict[str, Any], penalizes: bool) -> None:
    assert SamplingParams(**fields).penalizes is penalizes


def test_refusals_are_one_short_line() -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(temperature="x\n" * 5000)  # type: ignore[arg-type]
    assert "\n" not in caught.value.line()
    assert len(caught.value.line()) < 200


def test_parameters_can_not_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 3.0  # type: ignore[misc]


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(-1, 2**40),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        repeat_penalty=st.floats(1, 3),
        seed=st.none() | st.integers(0, 2**64 - 1),
    )
)
def test_everything_in_range_is_kept_as_given(params: SamplingParams) -> None:
    assert SamplingParams(**dataclasses.asdict(params)) == params


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 393216])
def test_max_tokens_absent_zero_and_positive_are_accepted(max_tokens: int | None) -> None:
    assert GenerationParams(max_tokens=max_tokens).max_tokens == max_tokens


@pytest.mark.parametrize("max_tokens", [-1, True, 1.5, "16"])
def test_other_max_tokens_are_refused(max_tokens: Any) -> None:
    with pytest.raises(ValidationError, match=r"^max_tokens is .*leave it out"):
        GenerationParams(max_tokens=max_tokens)


def test_stop_takes_a_list_and_keeps_order() -> None:
    stop: Any = ["b", "a", "\n"]
    assert GenerationParams(stop=stop).stop == ("b", "a", "\n")
    assert GenerationParams(stop=()).stop == ()


@pytest.mark.parametrize("stop", ["END", None, {"a"}, 3])
def test_stop_refuses_what_is_no_list(stop: Any) -> None:
    with pytest.raises(ValidationError, match=r"^stop is .*put a single stop string into a list"):
        GenerationParams(stop=stop)


@pytest.mark.parametrize("bad", ["", 7, None, b"x"])
def test_stop_names_the_entry_it_refuses(bad: Any) -> None:
    with pytest.raises(ValidationError, match=r"^stop\[1\] is .* at least one character"):
        GenerationParams(stop=("ok", bad))


def test_min_tokens_must_fit_max_tokens() -> None:
    assert GenerationParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert GenerationParams(min_tokens=5).max_tokens is None
    with pytest.raises(ValidationError, match="min_tokens is 6 but must be at most max_tokens, which is 5"):
        GenerationParams(min_tokens=6, max_tokens=5)
    with pytest.raises(ValidationError, match="min_tokens is -1"):
        GenerationParams(min_tokens=-1)


@pytest.mark.parametrize("ignore_eos", [0, 1, "true", None])
def test_ignore_eos_must_be_a_bool(ignore_eos: Any) -> None:
    with pytest.raises(ValidationError, match=r"ignore_eos is .* true or false"):
        GenerationParams(ignore_eos=ignore_eos)


def test_top_logprobs_absent_zero_and_twenty_differ() -> None:
    assert [GenerationParams(top_logprobs=k).top_logprobs for k in (None, 0, 20)] == [None, 0, 20]
    for bad in (-1, 21, True):
        with pytest.raises(ValidationError, match=f"top_logprobs is {bad}"):
            GenerationParams(top_logprobs=bad)


def test_parameters_load_without_torch_or_numpy() -> None:
    code = "import sys, hipfire.base.sampling; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
