"""Constructions that come about as a whole or not at all, with every allocation failing in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from hipfire.base.errors import InternalError, MemoryLimitError
from hipfire.device.injection import Take, injection_table
from hipfire.device.pool import Block, Pool, device_pool
from hipfire.device.staging import Owner, Staging, release_all

# the number of buffers in the construction whose rollback once lost all but one of them
SITES = 54


class Part:
    """An owner that notes its release, and may fail at it."""

    def __init__(self, log: list[int], number: int, fault: Exception | None = None) -> None:
        self.log = log
        self.number = number
        self.fault = fault

    def release(self) -> None:
        self.log.append(self.number)
        if self.fault is not None:
            raise self.fault


class Built:
    """A construction's result: all of its blocks."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks

    def release(self) -> None:
        release_all(self.blocks)


def sizes() -> list[int]:
    """Return sizes that share lists of the pool, so that the order of release matters."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(300, 5000, (SITES,), generator=generator).tolist()


def construct(take: Take) -> Built:
    with Staging(take) as staging:
        for index, nbytes in enumerate(sizes()):
            staging.take(f"part {index}", nbytes)
        return Built(staging.publish())


def forgetful(take: Take) -> Built:
    """Construct without any rollback."""
    return Built(tuple(take(nbytes) for nbytes in sizes()))


def in_order(take: Take) -> Built:
    """Construct with a rollback that releases the first part first."""
    blocks: list[Block] = []
    try:
        for nbytes in sizes():
            blocks.append(take(nbytes))
    except MemoryLimitError:
        for block in blocks:
            block.release()
        raise
    return Built(tuple(blocks))


def hiding(take: Take) -> Built:
    """Construct, and replace the error that ended it."""
    try:
        return construct(take)
    except MemoryLimitError as error:
        raise InternalError("something went wrong") from error


def half_released(take: Take) -> Built:
    """Construct, and give one part back before its owner does."""
    built = construct(take)
    built.blocks[3].release()
    return Built((*built.blocks[:3], *built.blocks[4:]))


@pytest.fixture
def pool() -> Pool:
    return device_pool(torch.device("cpu"))


def test_every_allocation_may_fail_and_nothing_is_lost(pool: Pool) -> None:
    rows = injection_table("parts", pool, construct)
    assert [row.failed_at for row in rows] == list(range(1, SITES + 1))
    for row in rows:
        assert row.passed, row
        assert (row.sites, row.live_before, row.live_after) == (SITES, 0, 0)
        assert (row.new_before, row.new_after_retry) == (SITES, SITES)
    assert pool.counters().fresh == SITES
    assert rows[0].as_json()["pass"] is True


def test_a_construction_beside_live_blocks_keeps_them(pool: Pool) -> None:
    held = pool.take(777)
    rows = injection_table("parts", pool, construct)
    assert all(row.passed and row.live_before == row.live_after == 777 for row in rows)
    held.release()


def test_a_construction_that_forgets_to_roll_back_is_caught(pool: Pool) -> None:
    last = injection_table("parts", pool, forgetful)[-1]
    assert not last.passed
    assert last.live_after > last.live_before
    assert last.new_after_retry >= last.new_before + SITES - 1


@pytest.mark.parametrize(
    ("build", "field"),
    [(in_order, "release_order_ok"), (hiding, "error_kept"), (half_released, "published_once")],
)
def test_each_other_fault_is_caught_by_its_own_field(pool: Pool, build: object, field: str) -> None:
    rows = injection_table("parts", pool, build)  # type: ignore[arg-type]
    assert not any(row.passed for row in rows[2:])
    assert not any(getattr(row, field) for row in rows[2:])


def fail(parts: Sequence[Part], error: BaseException | None) -> None:
    """Stage parts and end the construction with an error, or by forgetting to publish."""
    with Staging(unused) as staging:
        for part in parts:
            staging.stage(f"part {part.number}", partial(itself, part))
        if error is not None:
            raise error


def itself(part: Part) -> Part:
    return part


def unused(nbytes: int) -> Part:
    raise AssertionError("nothing is allocated here")


@pytest.mark.parametrize("original", [MemoryLimitError(5, 3, what="a part"), KeyboardInterrupt()])
def test_parts_are_released_last_first_and_the_original_error_goes_on(original: BaseException) -> None:
    log: list[int] = []
    with pytest.raises(type(original)) as caught:
        fail([Part(log, number) for number in range(4)], original)
    assert caught.value is original
    assert log == [3, 2, 1, 0]


def test_a_fault_in_a_release_stops_neither_the_others_nor_the_original_error() -> None:
    log: list[int] = []
    original = ValueError("original")
    second, third = (Part(log, number, OSError(f"{number} is stuck")) for number in (2, 3))
    with pytest.raises(ValueError, match="original") as caught:
        fail([Part(log, 1), second, third], original)
    assert caught.value is original
    assert log == [3, 2, 1]
    assert caught.value.__notes__ == ["while what had been built was released: 3 is stuck"]


def test_a_construction_that_ends_without_publishing_is_released_and_told() -> None:
    log: list[int] = []
    with pytest.raises(InternalError, match="without publishing: part 1, part 2"):
        fail([Part(log, 1), Part(log, 2)], None)
    assert log == [2, 1]


def test_owners_are_published_once_in_order_and_stay_alive() -> None:
    log: list[int] = []
    with Staging(lambda size: Part(log, size)) as staging:
        parts = [staging.take("part", number) for number in range(3)]
        assert staging.publish() == tuple(parts)
        with pytest.raises(InternalError, match="published twice"):
            staging.publish()
        with pytest.raises(InternalError, match="late is staged after"):
            staging.take("late", 9)
    assert log == []
    with pytest.raises(InternalError, match="published twice, or after it ended"):
        staging.publish()


def test_release_all_goes_on_and_raises_the_first_error() -> None:
    log: list[int] = []
    owners: list[Owner] = [Part(log, 1, OSError("one")), Part(log, 2), Part(log, 3, OSError("three"))]
    with pytest.raises(OSError, match="three"):
        release_all(owners)
    assert log == [3, 2, 1]
