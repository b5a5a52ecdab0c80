"""What is measured: defaults that fit, refusals with both numbers, warnings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hipfire.base.errors import ContextLengthError, ValidationError
from hipfire.bench.plan import BenchOptions, DecodePoint, plan_bench


def test_the_defaults_of_a_roomy_context() -> None:
    plan = plan_bench(BenchOptions(), 100, 32768)
    assert plan.prefill == (128, 512, 1024)
    assert plan.decode == (DecodePoint(batch=1, ctx=0),)
    assert (plan.tg, plan.max_tokens, plan.runs, plan.warmups) == (128, 128, 5, 2)
    assert plan.warnings == ()


def test_the_matrix_has_more_defaults() -> None:
    plan = plan_bench(BenchOptions(matrix=True), 100, 32768)
    assert plan.prefill == (128, 512, 2048, 4096, 8192, 20000)
    assert [point.ctx for point in plan.decode] == [128, 512, 2048, 4096, 8192, 20000]


def test_default_lengths_that_do_not_fit_are_left_out_with_a_warning() -> None:
    plan = plan_bench(BenchOptions(matrix=True), 100, 2048)
    # a prefill may fill the context, a decode needs room for its steps
    assert plan.prefill == (128, 512, 2048)
    assert [point.ctx for point in plan.decode] == [128, 512]
    assert plan.warnings == (
        "pp 4096, 8192, 20000 left out: the context holds 2048 tokens",
        "ctx 2048, 4096, 8192, 20000 left out: the context holds 2048 tokens",
    )


def test_every_batch_is_combined_with_every_context() -> None:
    options = BenchOptions(ctx=(0, 16), batch=(1, 4))
    plan = plan_bench(options, 100, 512)
    assert [(point.ctx, point.batch) for point in plan.decode] == [(0, 1), (0, 4), (16, 1), (16, 4)]
    assert options.slots == 4


def test_repeats_in_a_list_are_measured_once() -> None:
    assert BenchOptions(pp=(64, 8, 64)).pp == (64, 8)


@pytest.mark.parametrize(
    ("changes", "prompt", "numbers", "part"),
    [
        ({"pp": (64, 257)}, 100, (257, 256), "pp 257"),
        ({"pp": (64,), "ctx": (129,)}, 100, (257, 256), "ctx 129 with tg 128"),
        ({"pp": (64,), "tg": 257}, 100, (257, 256), "ctx 0 with tg 257"),
        ({"pp": (64,)}, 129, (257, 256), "the prompt has 129"),
        ({"pp": (64,), "max_tokens": 157}, 100, (257, 256), "lower max_tokens"),
        ({"tg": 8, "max_tokens": 8}, 100, (128, 127), "pp 128"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(
    changes: dict[str, Any], prompt: int, numbers: tuple[int, int], part: str
) -> None:
    with pytest.raises(ContextLengthError, match=part) as caught:
        plan_bench(BenchOptions(**changes), prompt, numbers[1])
    assert (caught.value.requested, caught.value.limit) == numbers
    # with one more token in the context it is only just accepted
    assert plan_bench(BenchOptions(**changes), prompt, numbers[1] + 1).prefill


@pytest.mark.parametrize(("tokens", "warned"), [(63, True), (64, False)])
def test_a_short_prompt_is_warned_about(tokens: int, warned: bool) -> None:
    warnings = plan_bench(BenchOptions(), tokens, 4096).warnings
    assert [("launch overhead" in line, str(tokens) in line) for line in warnings] == [(True, True)] * warned


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp", (0,)), ("pp", (8, -1)), ("pp", ()), ("ctx", (-1,)), ("batch", (0,)), ("batch", ()),
        ("tg", 0), ("max_tokens", 1), ("runs", 0), ("warmups", -1), ("runs", None), ("runs", True),
        ("pp", (1.5,)), ("tg", "9"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        BenchOptions(**{name: value})  # type: ignore[arg-type]


def test_no_warm_up_and_an_empty_context_are_possible() -> None:
    plan = plan_bench(BenchOptions(warmups=0, ctx=(0,), runs=1), 100, 4096)
    assert (plan.warmups, plan.runs, plan.decode) == (0, 1, (DecodePoint(1, 0),))


def test_planning_and_statistics_need_no_torch() -> None:
    code = (
        "import sys, hipfire.bench.plan, hipfire.bench.results, hipfire.cli.bench;"
        "print('torch' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
