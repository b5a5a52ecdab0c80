"""The scratch of steps: what a rehearsal plans, and fixed memory that follows the plan."""

from __future__ import annotations

import pytest
import torch

from hipfire.base.errors import InternalError
from hipfire.device.injection import injection_table
from hipfire.device.pool import ALIGNMENT, Pool, device_pool
from hipfire.device.scratch import (
    GUARD_BYTE,
    FixedScratch,
    Plan,
    ScratchPlanner,
    Slot,
    merge,
    plan_nbytes,
)

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


@pytest.fixture
def pool() -> Pool:
    return device_pool(torch.device("cpu"))


def step(scratch: ScratchPlanner | FixedScratch, tokens: int, layers: int = 3) -> list[torch.Tensor]:
    """Take what a small model's step takes, and return all of it."""
    scratch.settle(())
    taken = [scratch.take("x", (tokens, 40), F32)]
    x = taken[0]
    for _ in range(layers):
        q = scratch.take("projection", (tokens, 24), F32)
        k = scratch.take("projection", (tokens, 8), BF16)
        x = scratch.take("x", (tokens, 40), F32)
        taken += [q, k, x]
        scratch.settle([x.view(-1)[3:]])
    taken.append(scratch.take("logits", (tokens, 101), F32))
    return taken


def planned(*tokens: int) -> Plan:
    planner = ScratchPlanner()
    for count in tokens:
        step(planner, count)
    return planner.plan()


def test_a_plan_has_one_slot_for_each_result_that_is_alive_at_a_time() -> None:
    assert planned(5) == (
        Slot("x", 0, (5, 40), F32, 800),
        Slot("projection", 0, (5, 24), F32, 480),
        Slot("projection", 1, (5, 8), BF16, 80),
        Slot("x", 1, (5, 40), F32, 800),
        Slot("logits", 0, (5, 101), F32, 2020),
    )


def test_rehearsals_merge_by_the_largest_request_of_each_slot() -> None:
    planner = ScratchPlanner()
    assert planner.take("a", (3, 4), F32).device.type == "meta"
    planner.take("b", (1,), INT8)
    planner.settle(())
    planner.take("a", (30, 1), INT8)
    planner.take("b", (2, 2), F32)
    planner.take("b", (9,), INT8)
    assert planner.plan() == (
        Slot("a", 0, (3, 4), F32, 48),
        Slot("b", 0, (2, 2), F32, 16),
        Slot("b", 1, (9,), INT8, 9),
    )
    assert planned(1, 7, 2) == merge([planned(2), planned(7)]) == planned(7)
    # an order of first use, whichever plan is larger
    one, two = (Slot("a", 0, (1,), F32, 4),), (Slot("b", 0, (1,), F32, 4), Slot("a", 0, (2,), F32, 8))
    assert [str(slot) for slot in merge([one, two])] == ["a[0]", "b[0]"]
    assert merge([one, two])[0].nbytes == 8


def test_views_keep_a_slot_of_the_plan_and_empty_or_foreign_tensors_do_not() -> None:
    planner = ScratchPlanner()
    first, second = planner.take("a", (4, 6), F32), planner.take("a", (4, 6), F32)
    planner.settle([second.view(torch.int32)[1:, 2:].transpose(0, 1), first[:0], torch.empty(3)])
    planner.take("a", (1,), F32)
    planner.take("a", (1,), F32)
    assert [str(slot) for slot in planner.plan()] == ["a[0]", "a[1]", "a[2]"]


def test_equal_steps_get_equal_addresses_that_are_those_of_the_plan(pool: Pool) -> None:
    scratch = FixedScratch(pool.take, planned(5))
    first = [(t.data_ptr(), t.shape, t.dtype, t.stride()) for t in step(scratch, 5)]
    assert [(t.data_ptr(), t.shape, t.dtype, t.stride()) for t in step(scratch, 5)] == first
    # a smaller step gets the same places, with the strides of its own shapes
    smaller = step(scratch, 2)
    assert [t.data_ptr() for t in smaller] == [place for place, *_ in first]
    assert all(t.is_contiguous() and t.shape[0] == 2 for t in smaller)
    places = {region.slot: region.view.memory.data_ptr() for region in scratch.regions()}
    assert {t.data_ptr() for t in smaller} == set(places.values())
    assert all(place % ALIGNMENT == 0 for place in places.values())
    assert pool.counters().fresh == len(scratch.plan) == 5


def test_what_is_kept_is_not_overwritten_and_the_rest_is_reused(pool: Pool) -> None:
    plan = tuple(Slot("a", k, (6,), F32, 24) for k in range(3))
    scratch = FixedScratch(pool.take, plan, guard=256)
    first, second, third = (scratch.take("a", (6,), F32).fill_(k) for k in range(3))
    scratch.settle([second[4:], torch.empty(5), third[:0]])
    scratch.take("a", (6,), F32).fill_(8)
    scratch.take("a", (6,), F32).fill_(9)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([8.0] * 6, [1.0] * 6, [9.0] * 6)
    with pytest.raises(InternalError, match=r"a\[3\] is not in the plan"):
        scratch.take("a", (6,), F32)
    # neither an empty tensor nor one right behind a slot keeps that slot
    scratch.settle([first[:0], scratch.guards()[0].view.memory[-8:]])
    assert scratch.take("a", (6,), F32).data_ptr() == first.data_ptr()
    # what was kept once is free after a settle that does not name it
    scratch.settle(())
    assert scratch.take("a", (6,), F32).data_ptr() == first.data_ptr()


def test_results_do_not_overlap(pool: Pool) -> None:
    scratch = FixedScratch(pool.take, planned(5), guard=16)
    alive = [scratch.take(slot.name, slot.shape, slot.dtype) for slot in scratch.plan]
    for number, tensor in enumerate(alive):
        tensor.fill_(number)
    assert [set(tensor.flatten().tolist()) for tensor in alive] == [{float(n)} for n in range(5)]
    scratch.check_guards()


def test_a_slot_is_read_as_whatever_type_is_asked_for(pool: Pool) -> None:
    scratch = FixedScratch(pool.take, (Slot("a", 0, (3,), INT8, 3),))
    assert scratch.take("a", (1, 3), INT8).shape == (1, 3)
    scratch.settle(())
    assert scratch.take("a", (1,), BF16).dtype == BF16
    scratch.settle(())
    assert scratch.take("a", (0, 7), F32).shape == (0, 7)


def test_shapes_without_end_are_served(pool: Pool) -> None:
    scratch = FixedScratch(pool.take, (Slot("a", 0, (300,), INT8, 300),))
    for count in [*range(300), 5, 299, 5]:
        scratch.settle(())
        tensor = scratch.take("a", (count, 1), INT8).fill_(count % 100)
        assert tensor.shape == (count, 1)
        assert scratch.regions()[0].view.memory[:count].eq(count % 100).all()


def test_a_missing_or_small_slot_is_named(pool: Pool) -> None:
    scratch = FixedScratch(pool.take, (Slot("a", 0, (5,), F32, 20),))
    with pytest.raises(InternalError, match=r"scratch b\[0\] is not in the plan"):
        scratch.take("b", (1,), F32)
    with pytest.raises(InternalError, match=r"scratch a\[0\] has 20 bytes, but 24 are needed"):
        scratch.take("a", (6,), F32)
    # a refused request takes nothing
    assert scratch.take("a", (5,), F32).numel() == 5


@pytest.mark.parametrize("guard", [1, 256, 300])
def test_a_byte_written_behind_a_slot_is_found_and_the_slot_named(pool: Pool, guard: int) -> None:
    plan = (Slot("a", 0, (5,), F32, 20), Slot("b", 0, (64,), F32, 256))
    scratch = FixedScratch(pool.take, plan, guard=guard)
    assert pool.counters().live_bytes == plan_nbytes(plan, guard)
    assert [region.view.memory.numel() for region in scratch.regions()] == [20, 256]
    for region in scratch.guards():
        assert region.view.memory.numel() >= guard
        assert region.view.memory.eq(GUARD_BYTE).all()
    for tensor in (scratch.take("a", (5,), F32), scratch.take("b", (64,), F32)):
        tensor.fill_(1.0)
    scratch.check_guards()
    # the first byte behind a result, and the last one of a guard
    for index in (0, -1):
        for number, name in ((0, "a"), (1, "b")):
            memory = scratch.guards()[number].view.memory
            memory[index] = 0
            with pytest.raises(InternalError, match=rf"behind scratch {name}\[0\]"):
                scratch.check_guards()
            memory[index] = GUARD_BYTE
    scratch.check_guards()


def test_without_guards_there_are_none(pool: Pool) -> None:
    plan = planned(5)
    scratch = FixedScratch(pool.take, plan)
    assert scratch.guards() == ()
    scratch.check_guards()
    assert pool.counters().live_bytes == plan_nbytes(plan)
    assert plan_nbytes(plan) == 1024 + 512 + 256 + 1024 + 2048


def test_a_plan_with_a_gap_is_refused_before_anything_is_taken(pool: Pool) -> None:
    with pytest.raises(InternalError, match=r"a\[1\] stands in the plan where a\[0\] belongs"):
        FixedScratch(pool.take, (Slot("b", 0, (1,), F32, 4), Slot("a", 1, (1,), F32, 4)))
    assert pool.counters().fresh == 0


def test_closing_gives_everything_back_in_reverse_order_and_happens_once(pool: Pool) -> None:
    plan = planned(5)
    scratch = FixedScratch(pool.take, plan)
    places = [t.data_ptr() for t in step(scratch, 5)]
    scratch.close()
    assert (pool.counters().live, pool.counters().waiting) == (0, 5)
    with pytest.raises(InternalError):
        scratch.take("x", (1,), F32)
    with pytest.raises(InternalError, match="released twice"):
        scratch.close()
    # reverse order: an equal scratch lies where this one lay
    assert [t.data_ptr() for t in step(FixedScratch(pool.take, plan), 5)] == places
    assert pool.counters().fresh == 5


@pytest.mark.parametrize("guard", [0, 64])
def test_each_slot_may_fail_and_nothing_is_lost(pool: Pool, guard: int) -> None:
    plan = planned(9)
    rows = injection_table("scratch", pool, lambda take: FixedScratch(take, plan, guard))
    assert [row.failed_at for row in rows] == [1, 2, 3, 4, 5]
    assert all(row.passed for row in rows), rows
    assert pool.counters().fresh == 5
