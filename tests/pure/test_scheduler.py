"""The scheduler with a clock of its own: order, fairness, bounds, deadlines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.base.errors import InternalError, ValidationError
from hipfire.engine.scheduler import MOST_PASSES, Phase, QueueFullError, Scheduler
from hipfire.engine.turn import TurnKey


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str, attempt: int = 1) -> TurnKey:
    return TurnKey(name, attempt)


def made(slots: int = 2, clock: Clock | None = None, **change: Any) -> Scheduler:
    settings_ = {"chunk": 100, "max_queue": 2, "queue_timeout_s": 60.0, "commit_timeout_s": 30.0, **change}
    return Scheduler(slots, clock=clock or Clock(), **settings_)


def reading(scheduler: Scheduler, prompts: dict[str, int]) -> None:
    """Let these turns arrive and start at once, with so many tokens to compute."""
    for slot, (name, tokens) in enumerate(prompts.items()):
        scheduler.enqueue(key(name))
        scheduler.start(key(name), slot, tokens)


def run_chunks(scheduler: Scheduler, most: int) -> list[str]:
    """Run chunks; returns whose they were."""
    order = []
    for _ in range(most):
        chosen = scheduler.next_readers()
        if not chosen:
            break
        order.append(" ".join(key.id for key in chosen))
        for each in chosen:
            scheduler.advance(each, scheduler.chunk_of(each))
    return order


def test_slots_are_given_in_the_order_of_arrival() -> None:
    scheduler = made(slots=1, max_queue=5)
    for name in "abc":
        scheduler.enqueue(key(name))
    order = []
    for _ in range(3):
        chosen = scheduler.startable()
        assert chosen is not None
        order.append(chosen.id)
        scheduler.start(chosen, 0, 1)
        assert scheduler.startable() is None
        scheduler.release(chosen)
    assert order == ["a", "b", "c"]


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    scheduler = made(slots=1, max_queue=2)
    for name in "abc":
        scheduler.enqueue(key(name))
    before = scheduler.counts()
    with pytest.raises(QueueFullError, match="3 requests are already waiting") as caught:
        scheduler.enqueue(key("d"))
    assert caught.value.kind == "transient"
    assert scheduler.counts() == before
    # a slot that is taken makes room in the queue
    scheduler.start(key("a"), 0, 5)
    with pytest.raises(QueueFullError):
        scheduler.enqueue(key("d"))
    scheduler.release(key("b"))
    scheduler.enqueue(key("d"))


def test_without_a_queue_free_slots_still_take_turns() -> None:
    scheduler = made(slots=2, max_queue=0)
    scheduler.enqueue(key("a"))
    scheduler.enqueue(key("b"))
    with pytest.raises(QueueFullError):
        scheduler.enqueue(key("c"))


def test_a_live_key_is_refused_and_another_attempt_is_not() -> None:
    scheduler = made()
    scheduler.enqueue(key("a"))
    with pytest.raises(ValidationError, match="already running"):
        scheduler.enqueue(key("a"))
    scheduler.enqueue(key("a", attempt=2))
    scheduler.release(key("a"))
    scheduler.enqueue(key("a"))


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = made(slots=2)
    reading(scheduler, {"long": 3000})
    assert run_chunks(scheduler, 2) == ["long", "long"]
    scheduler.enqueue(key("short"))
    scheduler.start(key("short"), 1, 30)
    assert run_chunks(scheduler, 2) == ["short", "long"]
    assert scheduler.decoding() == (key("short"),)


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    scheduler = made(slots=2, max_queue=100)
    reading(scheduler, {"long": 1000})
    order = []
    for number in range(60):
        short = key(f"short{number}")
        scheduler.enqueue(short)
        scheduler.start(short, 1, 50)
        # a short prompt takes one chunk, so the long one had its turn when the short one is still there
        chosen = run_chunks(scheduler, 1)
        order.append(chosen == ["long"])
        scheduler.release(short)
        if scheduler.phase(key("long")) is Phase.DECODE:
            break
    assert order.count(True) == 10
    turns = [at for at, mine in enumerate(order) if mine]
    assert turns[0] == MOST_PASSES
    assert {later - earlier for earlier, later in itertools.pairwise(turns)} == {MOST_PASSES + 1}


def test_equal_prompts_are_read_in_the_order_of_arrival_one_after_the_other() -> None:
    scheduler = made(slots=3)
    reading(scheduler, {"a": 150, "b": 150, "c": 150})
    assert run_chunks(scheduler, 9) == ["a", "a", "b", "b", "c", "c"]


def test_short_prompts_share_a_step_and_no_part_of_a_long_one_joins_them() -> None:
    scheduler = made(slots=4)
    reading(scheduler, {"long": 190, "a": 30, "b": 40, "c": 31})
    # 30 + 31 + 40 would be more than a chunk, and 39 tokens of the long one would only cost time
    assert run_chunks(scheduler, 9) == ["a c", "b", "long", "long"]


def test_a_chunk_is_never_larger_than_allowed_or_left() -> None:
    scheduler = made()
    reading(scheduler, {"a": 250})
    sizes = []
    while scheduler.next_readers():
        sizes.append(scheduler.chunk_of(key("a")))
        scheduler.advance(key("a"), sizes[-1])
    assert sizes == [100, 100, 50]
    scheduler.release(key("a"))
    reading(scheduler, {"b": 250})
    scheduler.shorten(key("b"), 3)
    assert scheduler.chunk_of(key("b")) == 3


def test_decoding_turns_go_by_slot_and_leave_when_ready() -> None:
    scheduler = made(slots=3)
    reading(scheduler, {"a": 1, "b": 2, "c": 3})
    run_chunks(scheduler, 1)
    assert scheduler.decoding() == (key("a"), key("b"), key("c"))
    scheduler.ready(key("b"))
    assert scheduler.decoding() == (key("a"), key("c"))
    # a turn that waits for its commit keeps its slot
    assert scheduler.free_slots == 0
    scheduler.release(key("b"))
    assert scheduler.free_slots == 1


def test_what_expires_and_when() -> None:
    clock = Clock()
    scheduler = made(slots=1, clock=clock, max_queue=9)
    assert scheduler.next_expiry() is None
    scheduler.enqueue(key("runs"), 500.0)
    scheduler.start(key("runs"), 0, 1)
    scheduler.enqueue(key("waits"))
    scheduler.enqueue(key("hurries"), 10.0)
    assert scheduler.next_expiry() == 110.0
    clock.now = 109.9
    assert scheduler.expired() == []
    clock.now = 110.0
    assert scheduler.expired() == [(key("hurries"), Phase.QUEUED, True)]
    scheduler.release(key("hurries"))
    clock.now = 160.0
    assert scheduler.expired() == [(key("waits"), Phase.QUEUED, False)]
    scheduler.release(key("waits"))
    # a running turn has no limit but its own deadline, until it is ready
    scheduler.advance(key("runs"), 1)
    assert scheduler.next_expiry() == 600.0
    scheduler.ready(key("runs"))
    assert scheduler.next_expiry() == 190.0
    clock.now = 190.0
    assert scheduler.expired() == [(key("runs"), Phase.READY, False)]


def test_steps_out_of_order_are_refused() -> None:
    scheduler = made()
    scheduler.enqueue(key("a"))
    with pytest.raises(InternalError, match="queued, not decode"):
        scheduler.ready(key("a"))
    scheduler.start(key("a"), 0, 5)
    scheduler.enqueue(key("b"))
    with pytest.raises(InternalError, match="slot 0 is given away twice"):
        scheduler.start(key("b"), 0, 5)
    with pytest.raises(InternalError, match="6 tokens were computed of 5"):
        scheduler.advance(key("a"), 6)
    assert scheduler.phase(key("nobody")) is None


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_every_prompt_is_read_to_its_end_in_bounded_time(prompts: list[int], slots: int, chunk: int) -> None:
    scheduler = made(slots=slots, chunk=chunk, max_queue=99)
    for number, tokens in enumerate(prompts):
        scheduler.enqueue(key(str(number)))
        assert tokens > 0
    left, free, steps = dict(enumerate(prompts)), set(range(slots)), 0
    while left:
        while (waiting := scheduler.startable()) is not None:
            scheduler.start(waiting, free.pop(), left[int(waiting.id)])
        chosen, tokens = scheduler.next_readers(), 0
        assert chosen
        steps += 1
        for each in chosen:
            part = scheduler.chunk_of(each)
            tokens += part
            if scheduler.advance(each, part):
                free.add(scheduler.slot(each) or 0)
                scheduler.release(each)
                del left[int(each.id)]
            else:
                # what is not completed stands alone
                assert chosen == (each,)
        assert 0 < tokens <= chunk
    assert steps <= sum(-(-tokens // chunk) for tokens in prompts)
    assert scheduler.counts() == {"queued": 0, "prefill": 0, "decode": 0, "ready": 0}
