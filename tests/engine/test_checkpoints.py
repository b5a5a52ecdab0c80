"""Where turns of models with a running state begin: at checkpoints, and never at a state of other tokens."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_kit import EACH, TokenRunner

from hipfire.engine.slots import SlotTable

BIG = 100 * EACH


class Table:
    """Slots over a runner without a model, and turns on them."""

    def __init__(self, slots: int = 1, budget: int = BIG, interval: int = 0) -> None:
        self.runner = TokenRunner(slots)
        self.budget = budget
        self.slots = SlotTable(cast(Any, self.runner), budget, interval)

    def begin(self, prompt: list[int], *borders: int) -> tuple[int, int]:
        """Start a turn; returns its slot and where it starts."""
        number, planned = self.slots.claim(prompt)
        start = self.slots.begin(number, list(prompt), borders)
        assert start == planned
        self.check(number, prompt, start)
        return number, start

    def check(self, number: int, prompt: list[int], start: int) -> None:
        assert self.runner.rows[number][:start] == prompt[:start]
        assert start == 0 or list(self.runner.state[number]) == prompt[:start]

    def read(self, number: int, prompt: list[int], start: int, chunk: int = 7) -> None:
        """Compute a prompt in chunks, as the core does."""
        while start < len(prompt):
            count = self.slots.room(number, min(chunk, len(prompt) - start))
            assert count > 0
            self.runner.feed(number, start, prompt[start : start + count])
            start += count
            self.slots.computed(number, start)

    def reply(self, number: int, prompt: list[int], tokens: list[int]) -> list[int]:
        """Decode; returns the whole sequence."""
        whole = list(prompt)
        history = self.slots._slots[number].tokens
        for token in tokens:
            self.runner.feed(number, len(whole), [token])
            whole.append(token)
            history.append(token)
            self.slots.computed(number, len(whole))
        return whole

    def turn(self, prompt: list[int], reply: list[int], *borders: int, keep: bool = True) -> int:
        """Run a whole turn; returns where it started."""
        number, start = self.begin(prompt, *borders)
        self.read(number, prompt, start)
        self.reply(number, prompt, reply)
        self.slots.release(number, keep=keep)
        self.slots.check()
        return start


A = list(range(100, 120))
R = [1, 2, 3]


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    table = Table()
    assert table.turn(A, R) == 0
    assert table.turn([*A, *R, 4, 5], R) == len(A) + 3
    # nothing was copied back and forth but the end, which the second turn moved away from
    assert (table.runner.snapshots, table.slots.checkpoints) == (1, {"count": 1, "bytes": EACH, "hits": 1})


def test_an_edited_turn_resumes_at_the_nearest_earlier_checkpoint() -> None:
    table = Table()
    table.turn(A, R)
    end = len(A) + len(R)
    table.turn([*A, *R, 4, 5, 6], R, end + 1)
    # the same again, one that was edited behind the border, before it, and in what was said first
    assert table.turn([*A, *R, 4, 5, 6], R) == end + 1
    assert table.turn([*A, *R, 4, 9, 9], R) == end + 1
    assert table.turn([*A, *R, 8, 8], R) == end
    assert table.turn([*A[:5], 7], R) == 0


def test_an_answer_that_is_written_differently_is_computed_from_the_border_on() -> None:
    table = Table()
    # the prompt ends in what opens a thought, and the next one lacks both
    table.turn([*A, 50, 51], [52, 53], len(A))
    assert table.turn([*A, 53, 60, 61], R, len(A) + 2) == len(A)
    assert table.turn([*A, 53, 60, *R, 62], R) == len(A) + 2


def test_a_border_that_was_never_reached_is_no_checkpoint() -> None:
    table = Table()
    number, start = table.begin(A, 15)
    table.runner.feed(number, start, A[:10])
    table.slots.computed(number, 10)
    table.slots.release(number, keep=True)
    assert table.slots.checkpoints["count"] == 0
    # it goes on at the end of what it has
    assert table.turn(A, R) == 10


@pytest.mark.parametrize("border", [(), (17,)])
def test_an_aborted_turn_leaves_the_state_ahead_of_its_rows(border: tuple[int, ...]) -> None:
    table = Table()
    table.turn(A[:10], R)
    kept = [*A[:10], *R]
    prompt = [*kept, *A[10:]]
    table.turn(prompt, [9, 9], *border, keep=False)
    assert table.slots.cached_tokens == len(kept)
    # the state has read the aborted turn; the checkpoint of the last turn's end is what is left
    assert table.slots.checkpoints["count"] == 1
    assert table.turn([*kept, 77], R) == len(kept)


def test_a_failed_turn_leaves_nothing() -> None:
    table = Table()
    table.turn(A, R, 10)
    number, _ = table.begin([*A, *R, 4])
    table.slots.drop(number)
    assert table.slots.checkpoints == {"count": 0, "bytes": 0, "hits": 1}
    assert table.turn(A, R) == 0


def test_another_slot_begins_with_copied_rows_and_a_copied_state() -> None:
    table = Table(slots=3)
    number, _ = table.begin(A, 12)
    table.read(number, A, 0)
    table.reply(number, A, R)
    # while the first one runs, its border serves a second one, whose own end then serves a third
    other, start = table.begin([*A[:16], 1, 2])
    assert (other, start) == (1, 12)
    table.read(other, [*A[:16], 1, 2], start)
    third, start = table.begin([*A[:12], 5])
    assert start == 12
    assert table.slots.checkpoints["count"] == 1
    table.slots.release(number, keep=True)
    table.slots.release(other, keep=True)
    table.slots.drop(third)
    # the end of an idle slot serves, too: another conversation's rows are not worth as much
    assert table.slots.checkpoints["count"] == 1
    table.slots.drop(number)
    assert table.turn([*A[:12], 6], R) == 12


def test_a_short_common_beginning_is_copied_from_an_idle_end() -> None:
    table = Table(slots=2, budget=0)
    table.turn(A, R)
    first, _ = table.begin([*A, *R, 4])
    # without a budget the end of a turn still can be gone on from, and copied before it is left
    assert first == 0
    table.slots.drop(first)
    table.turn(A, R)
    number = table.slots.claim([*A, *R, 4]).slot
    other = table.slots.claim([*A, *R, 5]).slot
    assert table.slots.begin(other, [*A, *R, 5]) == len(A) + 3
    assert table.slots.begin(number, [*A, *R, 4]) == len(A) + 3
    table.check(other, [*A, *R, 5], len(A) + 3)
    assert table.slots.checkpoints["count"] == 0


def test_what_was_used_longest_ago_goes_first() -> None:
    table = Table(slots=3, budget=2 * EACH)
    table.turn(A, R, 8, 12)
    # 8 was taken first, but is used again: a border of a third conversation takes the place of 12
    assert table.turn([*A[:8], 1], R) == 8
    table.turn([3] * 9, R, 5)
    assert table.slots.checkpoints["bytes"] == 2 * EACH
    assert table.slots.reusable(0, [*A[:15], 2]) == 8
    assert table.slots.reusable(2, [*[3] * 6, 4]) == 5


def test_checkpoints_at_intervals_and_not_behind_the_prompt() -> None:
    table = Table(interval=6)
    table.turn(A, [1] * 10, 13)
    assert table.slots._states is not None
    assert sorted(table.slots._states.positions(0)) == [6, 12, 13, 18]
    assert table.turn([*A[:17], 5], R) == 13


def test_a_prompt_is_promised_what_will_have_a_checkpoint() -> None:
    table = Table(slots=2)
    number, start = table.begin(A, 12)
    assert table.slots.promised([*A[:15], 1], []) == 12
    assert table.slots.promised([*A[:11], 1], [number]) == 0
    # what is there already is no promise
    table.read(number, A, start)
    assert table.slots.promised([*A[:15], 1], [number]) == 0


def test_a_state_that_cannot_be_kept_costs_no_turn(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()

    def full(slot: int) -> Any:
        raise MemoryError("the device is full")

    table.runner.snapshot = full  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="hipfire"):
        table.turn(A, R, 12)
    assert table.slots.checkpoints["count"] == 0
    assert "the state at token 12 is not kept: the device is full" in caplog.text


class Person:
    """A conversation that grows, is edited, or begins anew, by numbers from a strategy."""

    def __init__(self) -> None:
        self.said = [[7, 7, 7, 7]]

    def prompt(self, number: int) -> list[int]:
        base = self.said[number % len(self.said)]
        cut = number // 7 % (len(base) + 1)
        return [*base[: max(1, len(base) - cut)], *([number % 5] * (1 + number % 4))]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from([0, 4, 9]),
    st.lists(st.integers(0, 9999), max_size=25),
)
def test_no_turn_ever_starts_from_another_sequence(
    slots: int, budget: int, interval: int, numbers: list[int]
) -> None:
    table, person = Table(slots, budget * EACH, interval), Person()
    running: list[tuple[int, list[int]]] = []
    for number in numbers:
        prompt = person.prompt(number)
        if len(running) < slots:
            # the runner itself refuses a state of other tokens
            slot, start = table.begin(prompt, len(prompt) - 1, len(prompt) // 2)
            table.read(slot, prompt, start, 1 + number % 6)
            running.append((slot, table.reply(slot, prompt, [number % 3] * (number % 5))))
        if number % 2 or len(running) == slots:
            slot, whole = running.pop(number % len(running))
            if number % 11 == 0:
                table.slots.drop(slot)
            else:
                table.slots.release(slot, keep=number % 3 > 0)
                person.said.append(whole)
        table.slots.check()
        states = table.slots._states
        assert states is not None
        kept = {held for places in states._places for held in places.values()}
        assert kept == set(states._held)
        assert states.count <= budget
