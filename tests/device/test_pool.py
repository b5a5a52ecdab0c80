"""The pool: exact sizes, last in first out, owners and views, and counters that add up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hipfire.base.errors import InternalError, MemoryLimitError
from hipfire.device.pool import ALIGNMENT, MINIMUM, Block, Pool, View, device_pool


class Heap:
    """An allocator that counts what is out, and fails on request."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.failures = 0
        self.trims = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.failures:
            self.failures -= 1
            raise MemoryLimitError(nbytes, 0, what="a block")
        self.sizes.append(nbytes)
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]

    def trim(self) -> None:
        self.trims += 1


@pytest.fixture
def heap() -> Heap:
    return Heap()


@pytest.fixture
def pool(heap: Heap) -> Pool:
    return Pool(heap.allocate, heap.trim)


def address(block: Block) -> int:
    return block.memory.data_ptr()


def test_sizes_are_exact_and_at_least_the_minimum(pool: Pool, heap: Heap) -> None:
    blocks = [pool.take(nbytes) for nbytes in (1000, 7, 0, 257)]
    assert heap.sizes == [1000, MINIMUM, MINIMUM, 257]
    assert [block.nbytes for block in blocks] == [1000, 7, 0, 257]
    assert [block.memory.numel() for block in blocks] == [1000, 7, 0, 257]
    assert all(address(block) % ALIGNMENT == 0 for block in blocks if block.nbytes)
    with pytest.raises(InternalError, match="-1 bytes"):
        pool.take(-1)


def test_the_block_that_came_back_last_goes_out_first(pool: Pool) -> None:
    first, second, third = (pool.take(1000) for _ in range(3))
    places = [address(block) for block in (first, second, third)]
    for block in (second, third, first):
        block.release()
    assert [address(pool.take(1000)) for _ in range(3)] == [places[0], places[2], places[1]]


def test_a_block_too_small_for_a_request_of_its_list_is_dropped_for_good(pool: Pool, heap: Heap) -> None:
    small, large, smallest = pool.take(600), pool.take(1000), pool.take(520)
    place = address(large)
    for block in (large, small, smallest):
        block.release()
    # both small ones are popped and dropped on the way to the large one
    block = pool.take(900)
    assert (address(block), block.nbytes) == (place, 900)
    counters = pool.counters()
    assert (counters.dropped, counters.dropped_bytes) == (2, 1120)
    assert (counters.waiting, counters.waiting_bytes) == (0, 0)
    assert (counters.live, counters.live_bytes) == (1, 900)
    # a block of the next list is not looked at
    block.release()
    pool.take(1025)
    assert heap.sizes == [600, 1000, 520, 1025]


def test_a_list_holds_sizes_up_to_its_power_of_two(pool: Pool, heap: Heap) -> None:
    for nbytes in (256, 257, 512, 513, 1024):
        pool.take(nbytes).release()
        pool.take(nbytes).release()
    # 512 finds 257 too small, 1024 the 513; each other size is served by its own block the second time
    assert heap.sizes == [256, 257, 512, 513, 1024]
    assert pool.counters().dropped == 2


def test_a_block_that_is_larger_than_the_request_keeps_its_size_for_later(pool: Pool) -> None:
    pool.take(1000).release()
    pool.take(600).release()
    pool.take(1000).release()
    counters = pool.counters()
    assert (counters.fresh, counters.reused, counters.reused_bytes) == (1, 2, 2000)


def test_the_counters_add_up(pool: Pool) -> None:
    blocks = [pool.take(nbytes) for nbytes in (300, 400, 5000)]
    blocks[1].release()
    assert dataclasses.astuple(pool.counters()) == (3, 5700, 0, 0, 0, 0, 2, 5300, 1, 400)
    blocks[2].release()
    blocks[0].release()
    assert pool.drain() == 5700
    assert dataclasses.astuple(pool.counters()) == (3, 5700, 0, 0, 3, 5700, 0, 0, 0, 0)


def test_drain_leaves_live_blocks_and_trims_the_allocator(pool: Pool, heap: Heap) -> None:
    live = pool.take(300)
    live.memory.fill_(7)
    pool.take(400).release()
    assert pool.drain() == 400
    assert heap.trims == 1
    assert live.memory.eq(7).all()
    live.release()
    assert pool.counters().waiting_bytes == 300


def test_a_block_is_released_once_and_its_memory_is_not_read_after(pool: Pool) -> None:
    block = pool.take(300)
    block.release()
    assert block.released
    with pytest.raises(InternalError, match="300 bytes was released twice"):
        block.release()
    with pytest.raises(InternalError, match="used after its release"):
        _ = block.memory
    with pytest.raises(InternalError, match="used after its release"):
        block.view()
    assert pool.counters().waiting == 1


def test_an_old_handle_cannot_give_back_what_another_owner_holds(pool: Pool) -> None:
    old = pool.take(300)
    place = address(old)
    old.release()
    new = pool.take(300)
    assert address(new) == place
    with pytest.raises(InternalError, match="twice"):
        old.release()
    assert (pool.counters().live, pool.counters().waiting) == (1, 0)
    new.memory.fill_(1)


def test_views_borrow_and_cannot_give_back(pool: Pool) -> None:
    block = pool.take(300)
    view = block.view(100, 50)
    assert isinstance(view, View)
    assert not hasattr(view, "release")
    view.memory.fill_(9)
    assert view.memory.data_ptr() == address(block) + 100
    assert block.memory[100:150].eq(9).all()
    assert block.view(280).memory.numel() == 20
    for offset, nbytes in ((0, 301), (301, None), (-1, 5), (200, 101), (10, -1)):
        with pytest.raises(InternalError, match="a view of bytes"):
            block.view(offset, nbytes)


def test_the_pool_drops_what_waits_before_it_gives_up(pool: Pool, heap: Heap) -> None:
    live = pool.take(300)
    pool.take(5000).release()
    heap.failures = 1
    assert pool.take(9000).nbytes == 9000
    assert (pool.counters().waiting, heap.trims) == (0, 1)
    # with nothing to drop, and after it, the error goes through and changes nothing
    before = pool.counters()
    heap.failures = 1
    with pytest.raises(MemoryLimitError):
        pool.take(9000)
    assert pool.counters() == before
    live.release()
    heap.failures = 2
    with pytest.raises(MemoryLimitError):
        pool.take(9000)
    assert pool.counters().live == before.live - 1


def test_an_allocator_that_returns_something_else_is_found_out() -> None:
    for wrong in (
        lambda nbytes: torch.empty(nbytes + 1, dtype=torch.uint8),
        lambda nbytes: torch.empty(nbytes, dtype=torch.int8),
        lambda nbytes: Heap().allocate(nbytes + 1)[1:],
    ):
        pool = Pool(wrong)
        with pytest.raises(InternalError, match="the allocator returned"):
            pool.take(300)
        assert pool.counters().fresh == 0


def test_host_memory_that_is_not_there_is_a_typed_error_with_both_numbers() -> None:
    pool = device_pool(torch.device("cpu"))
    with pytest.raises(MemoryLimitError) as caught:
        pool.take(1 << 60)
    assert caught.value.required == 1 << 60
    assert 0 < caught.value.available < 1 << 60
    block = pool.take(1000)
    assert address(block) % ALIGNMENT == 0
    block.memory.fill_(3)
