"""The prefix planner as a truth table, and its promises for any residents."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.cache.prefix import Plan, Resident, common_prefix, plan_prefix, plan_start, reusable

A, B = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9]


def held(slot: int, tokens: list[int], **rest: object) -> Resident:
    return Resident(slot, tokens, **rest)  # type: ignore[arg-type]


# prompt, what the only slot holds, where the prompt is computed from
ONE_SLOT = [
    ("nothing is held", A, [], None, 0),
    ("nothing in common", A, B, None, 0),
    ("all of the held is a beginning of the prompt", A, A[:5], None, 5),
    ("the prompt equals what is held: its last token is computed for the logits", A, A, None, 7),
    ("the prompt is a beginning of what is held", A[:4], A, None, 3),
    ("the prompt is one token shorter than what is held", A[:7], A, None, 6),
    ("one token in common", [1, 5], A, None, 1),
    ("a prompt of one token", [1], A, None, 0),
    ("they part in the middle", [1, 2, 3, 0, 0], A, None, 3),
    ("a running state at its live end", A, A[:5], (2, 5), 5),
    ("a running state cannot go back past its checkpoints", [1, 2, 3, 0], A, (2, 8), 2),
    ("a running state of an equal prompt goes to the checkpoint before its end", A, A, (4, 8), 4),
    ("a running state without a checkpoint that early", [1, 2, 3, 0], A, (8,), 0),
    ("a running state without checkpoints", A, A[:5], (), 0),
]


@pytest.mark.parametrize(("prompt", "tokens", "points", "start"), [row[1:] for row in ONE_SLOT])
def test_where_a_prompt_begins_on_one_slot(
    prompt: list[int], tokens: list[int], points: tuple[int, ...] | None, start: int
) -> None:
    assert plan_prefix(prompt, [held(0, tokens, checkpoints=points)]) == Plan(0, start, None)


SEVERAL = [
    ("an empty slot before a used one", A, [held(0, B), held(1, [])], Plan(1, 0)),
    ("the slot unused for longest", A, [held(0, B, used=5), held(1, [7], used=2)], Plan(1, 0)),
    ("the longest common beginning", A, [held(0, A[:2], used=9), held(1, A[:6])], Plan(1, 6)),
    (
        "a short common beginning is copied, and the other conversation stays",
        [1, 2, 0, 0, 0, 0, 0],
        [held(0, A, used=1), held(1, [], used=0)],
        Plan(1, 2, 0),
    ),
    (
        "it is copied over the slot unused for longest, not over its own source",
        [1, 2, 0, 0],
        [held(0, A, used=1), held(1, B, used=2), held(2, B, used=3)],
        Plan(1, 2, 0),
    ),
    (
        "the same conversation with its last turn edited stays in its slot",
        [1, 2, 3, 4, 5, 0],
        [held(0, A, used=1), held(1, [])],
        Plan(0, 5),
    ),
    ("rows of a busy slot are copied", A, [held(0, A, busy=True), held(1, [])], Plan(1, 7, 0)),
    (
        "an idle slot with as many rows needs no copy",
        A,
        [held(0, A[:4], busy=True, used=9), held(1, A[:4])],
        Plan(1, 4),
    ),
    (
        "a busy slot with more rows than an idle one",
        A,
        [held(0, A[:6], busy=True), held(1, A[:3])],
        Plan(1, 6, 0),
    ),
    ("all are busy", A, [held(0, A, busy=True), held(1, [], busy=True)], None),
    ("the only idle slot is its own source", [1, 0], [held(0, A), held(1, B, busy=True)], Plan(0, 1)),
]


@pytest.mark.parametrize(("prompt", "residents", "plan"), [row[1:] for row in SEVERAL])
def test_which_slot_a_prompt_goes_to(prompt: list[int], residents: list[Resident], plan: Plan | None) -> None:
    assert plan_prefix(prompt, residents) == plan


def test_a_prompt_that_has_its_slot_takes_what_others_have_computed_since() -> None:
    residents = [held(0, A, busy=True), held(1, A[:2], busy=True)]
    assert plan_start(A, residents, 1) == Plan(1, 7, 0)
    assert plan_start(A, [held(0, A[:1]), residents[1]], 1) == Plan(1, 2)


TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.tuples(TOKENS, st.booleans()), min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_never_reuses_a_row_of_other_tokens(
    prompt: list[int], slots: list[tuple[list[int], bool]]
) -> None:
    residents = [held(n, tokens, busy=busy, used=n) for n, (tokens, busy) in enumerate(slots)]
    plan = plan_prefix(prompt, residents)
    if plan is None:
        assert all(busy for _, busy in slots)
        return
    source = residents[plan.slot if plan.copy_from is None else plan.copy_from]
    assert not residents[plan.slot].busy
    assert plan.start < len(prompt)
    assert list(source.tokens[: plan.start]) == prompt[: plan.start]
    # nobody holds more
    assert plan.start == max(reusable(prompt, resident) for resident in residents)


@given(TOKENS, TOKENS)
def test_the_common_prefix_is_exact(a: list[int], b: list[int]) -> None:
    shared = common_prefix(tuple(a), b)
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]


def test_equal_hashes_are_no_equal_prefix() -> None:
    # hash(-1) == hash(-2) in CPython: the tokens themselves decide
    assert hash(-1) == hash(-2)
    assert plan_prefix([-1, 5, 6], [held(0, [-2, 5, 6])]) == Plan(0, 0)


@pytest.mark.parametrize(
    "module", ["hipfire.cache.prefix", "hipfire.engine.scheduler", "hipfire.engine.turn"]
)
def test_planner_and_scheduler_need_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
