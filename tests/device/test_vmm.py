"""Arenas: memory that grows in place, faults in every call, and a release that goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from vmm_kit import UNIT, outcome

from hipfire.base.errors import InternalError, MemoryLimitError, UnsupportedError
from hipfire.device import vmm_drivers
from hipfire.device.graphs import capture
from hipfire.device.staging import Staging, release_all
from hipfire.device.vmm import Arena, MemoryDriver
from hipfire.device.vmm_drivers import memory_driver
from hipfire.device.vmm_host import HostMemory
from hipfire.device.vmm_injection import FaultyDriver, growth_table

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs the memory calls of POSIX")


@pytest.fixture
def host() -> HostMemory:
    return HostMemory(UNIT)


@pytest.fixture
def driver(host: HostMemory) -> FaultyDriver:
    return FaultyDriver(host)


def rights(address: int) -> str:
    """Return what the system says of a page: such as rw-p, ---p, or "" if nothing is there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, kind, *_ = line.split()
        start, end = (int(text, 16) for text in first.split("-"))
        if start <= address < end:
            return kind
    return ""


def fill(arena: Arena, nbytes: int, seed: int, lane: int = 0) -> torch.Tensor:
    """Write random bytes into the start of a lane and return what was written."""
    values = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    arena.view(nbytes, lane).copy_(values)
    return values


def test_an_arena_grows_in_place_and_keeps_what_is_in_it(driver: FaultyDriver) -> None:
    arena = Arena(driver, 5 * UNIT - 7)
    base = arena.base
    assert (arena.reserved, arena.lane_stride, arena.mapped(), arena.nbytes) == (5 * UNIT, 5 * UNIT, 0, 0)
    assert arena.grow(1) == UNIT
    written = fill(arena, UNIT, 1)
    whole = arena.whole()
    assert arena.grow(2 * UNIT) == 3 * UNIT == arena.mapped() == arena.nbytes
    assert (arena.base, whole.data_ptr(), arena.view(3 * UNIT).data_ptr()) == (base, base, base)
    # a tensor from before the growth sees what is written behind it
    arena.view(3 * UNIT)[2 * UNIT :].fill_(77)
    assert whole.shape == (1, 5 * UNIT)
    assert whole[0, 2 * UNIT : 3 * UNIT].eq(77).all()
    assert torch.equal(whole[0, :UNIT], written)
    arena.release()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_only_what_is_mapped_can_be_touched_and_a_release_leaves_nothing(driver: FaultyDriver) -> None:
    arena = Arena(driver, 4 * UNIT, lanes=2)
    base = arena.base
    pages = [base + index * UNIT for index in range(8)]
    assert {rights(page) for page in pages} == {"---p"}
    arena.grow(2 * UNIT, lane=1)
    assert [rights(page) for page in pages] == ["---p"] * 4 + ["rw-p"] * 2 + ["---p"] * 2
    arena.release()
    assert {rights(page) for page in pages}.isdisjoint({"rw-p"})


def test_lanes_grow_each_from_its_own_start(driver: FaultyDriver) -> None:
    arena = Arena(driver, 3 * UNIT, lanes=3)
    assert (arena.lane_stride, arena.reserved) == (3 * UNIT, 9 * UNIT)
    written = {}
    for turn, lane in enumerate((0, 2, 2, 0, 2)):
        arena.grow(UNIT, lane)
        written[lane] = fill(arena, arena.mapped(lane), turn, lane)
    assert [arena.mapped(lane) for lane in range(3)] == [2 * UNIT, 0, 3 * UNIT]
    whole = arena.whole()
    assert torch.equal(whole[0, : 2 * UNIT], written[0])
    assert torch.equal(whole[2], written[2])
    # access is given to a lane's whole prefix, from its start
    third = arena.base + 6 * UNIT
    assert [call[1:] for call in driver.calls if call[0] == "allow" and call[1] >= third] == [
        (third, UNIT),
        (third, 2 * UNIT),
        (third, 3 * UNIT),
    ]
    arena.release()


def test_ensure_grows_only_what_is_missing(driver: FaultyDriver) -> None:
    arena = Arena(driver, 8 * UNIT)
    assert [arena.ensure(size) for size in (1, UNIT, UNIT + 1, 100, 5 * UNIT)] == [
        UNIT, UNIT, 2 * UNIT, 2 * UNIT, 5 * UNIT,
    ]  # fmt: skip
    assert [call[1] for call in driver.calls if call[0] == "create"] == [UNIT, UNIT, 3 * UNIT]
    arena.release()


def test_what_does_not_fit_is_refused_before_anything_happens(driver: FaultyDriver) -> None:
    arena = Arena(driver, 2 * UNIT, lanes=2)
    with pytest.raises(InternalError, match="before its first lane has grown"):
        arena.whole()
    arena.grow(UNIT)
    done = list(driver.calls)
    for nbytes, lane in ((UNIT + 1, 0), (2 * UNIT + 1, 1), (0, 0), (-5, 0), (1, 2), (1, -1)):
        with pytest.raises(InternalError):
            arena.grow(nbytes, lane)
    for nbytes, lane in ((UNIT + 1, 0), (1, 1), (0, 0), (1, -1)):
        with pytest.raises(InternalError):
            arena.view(nbytes, lane)
    for lane_bytes, lanes in ((0, 1), (-1, 1), (UNIT, 0)):
        with pytest.raises(InternalError, match="was asked for"):
            Arena(driver, lane_bytes, lanes)
    assert driver.calls == done
    arena.release()


@pytest.mark.parametrize("call", ["create", "map", "allow"])
@pytest.mark.parametrize("turn", [1, 2, 3, 4])
def test_each_step_of_each_growth_may_fail_and_a_retry_goes_on(
    driver: FaultyDriver, host: HostMemory, call: str, turn: int
) -> None:
    arena = Arena(driver, 8 * UNIT)
    driver.fail(call, turn)
    written = torch.empty(0, dtype=torch.uint8)
    for number in range(1, 5):
        if number == turn:
            before = (host.live, arena.mapped(), arena.nbytes)
            with pytest.raises(MemoryLimitError if call == "create" else InternalError, match="injected"):
                arena.grow(2 * UNIT)
            assert (host.live, arena.mapped(), arena.nbytes) == before
            if written.numel():
                assert torch.equal(arena.view(written.numel()), written)
        assert arena.grow(2 * UNIT) == 2 * UNIT * number
        written = fill(arena, arena.mapped(), number)
    assert host.live == (4, 4)
    arena.release()
    assert host.live == (0, 0)


def test_the_calls_of_a_failed_growth_are_undone_in_order(driver: FaultyDriver) -> None:
    arena = Arena(driver, 4 * UNIT)
    driver.fail("map", 1)
    assert outcome(lambda: arena.grow(UNIT)) is not None
    assert [call[0] for call in driver.calls] == ["reserve", "create", "map", "release"]
    driver.calls.clear()
    driver.fail("allow", 1)
    assert outcome(lambda: arena.grow(UNIT)) is not None
    assert [call[0] for call in driver.calls] == ["create", "map", "allow", "unmap", "release"]
    arena.release()


@pytest.mark.parametrize("stuck", ["unmap", "release"])
def test_a_growth_that_cannot_be_undone_leaves_an_arena_that_can_only_be_released(
    driver: FaultyDriver, host: HostMemory, stuck: str
) -> None:
    arena = Arena(driver, 4 * UNIT)
    arena.grow(UNIT)
    driver.fail("allow", 1)
    driver.fail(stuck, 1)
    with pytest.raises(InternalError, match="injected into allow"):
        arena.grow(UNIT)
    for action in (lambda: arena.grow(UNIT), lambda: arena.view(5), arena.whole):
        with pytest.raises(InternalError, match="can only be released"):
            action()
    assert host.live != (1, 1)
    arena.release()
    assert host.live == (0, 0)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("synchronize", 1),
        *((call, number) for call in ("unmap", "release") for number in (1, 2, 3)),
        ("free", 1),
    ],
)
def test_a_release_goes_on_past_a_fault_and_can_be_repeated(
    driver: FaultyDriver, host: HostMemory, call: str, number: int
) -> None:
    arena = Arena(driver, 4 * UNIT, lanes=2)
    for lane in (0, 1, 1):
        arena.grow(UNIT, lane)
    driver.calls.clear()
    driver.fail(call, number)
    with pytest.raises(InternalError, match=f"injected into {call} {number}"):
        arena.release()
    names = [name for name, *_ in driver.calls]
    # everything else was tried all the same; the range stays while something is mapped in it
    assert (names.count("unmap"), names.count("release")) == (3, 3)
    left = {"synchronize": (0, 0), "unmap": (0, 1), "release": (1, 0), "free": (0, 0)}[call]
    assert host.live == left
    if call == "synchronize":
        assert names[-1] == "free"
    else:
        driver.calls.clear()
        arena.release()
        retried = {"unmap": ["unmap", "free"], "release": ["release", "free"], "free": ["free"]}[call]
        assert [name for name, *_ in driver.calls] == ["synchronize", *retried]
    assert host.live == (0, 0)
    with pytest.raises(InternalError, match="used after its release"):
        arena.release()


def test_the_first_of_several_faults_is_raised(driver: FaultyDriver, host: HostMemory) -> None:
    arena = Arena(driver, 4 * UNIT)
    for _ in range(3):
        arena.grow(UNIT)
    driver.fail("unmap", 2, 3)
    driver.fail("release", 1)
    with pytest.raises(InternalError, match="injected into release 1"):
        arena.release()
    with pytest.raises(InternalError, match="can only be released"):
        arena.grow(UNIT)
    arena.release()
    assert host.live == (0, 0)
    assert outcome(lambda: arena.view(1)) is not None


def test_many_cycles_leave_nothing(driver: FaultyDriver, host: HostMemory) -> None:
    for _ in range(20):
        arena = Arena(driver, 3 * UNIT, lanes=2)
        arena.ensure(2 * UNIT + 1)
        arena.ensure(5, lane=1)
        fill(arena, 3 * UNIT, 3)
        arena.release()
        assert host.live == (0, 0)


class Caches:
    """The caches of a load: arenas that have grown a bit."""

    def __init__(self, arenas: tuple[Arena, ...]) -> None:
        self.arenas = arenas

    def release(self) -> None:
        release_all(self.arenas)


def load(driver: MemoryDriver) -> Caches:
    def cache(units: int) -> Arena:
        with Staging(lambda nbytes: Arena(driver, nbytes, lanes=2)) as staging:
            arena = staging.take("cache", 4 * units * UNIT)
            arena.grow(units * UNIT, lane=1)
            arena.grow(UNIT)
            staging.publish()
        return arena

    with Staging(cache) as staging:
        for index in range(3):
            staging.take(f"cache {index}", index + 1)
        return Caches(staging.publish())


def forgetful(driver: MemoryDriver) -> Caches:
    """Load without rolling back what was built before a fault."""
    arenas = [Arena(driver, 4 * UNIT) for _ in range(3)]
    for arena in arenas:
        arena.grow(UNIT)
    return Caches(tuple(arenas))


def first_in_first_out(driver: MemoryDriver) -> Caches:
    """Load, and release the first arena first."""
    return Caches(load(driver).arenas[::-1])


def test_each_call_of_a_load_may_fail_and_nothing_is_lost(host: HostMemory) -> None:
    rows = growth_table("caches", host, load)
    # for each of three caches: its addresses, and twice memory, place and access
    assert [row.failed_at for row in rows] == list(range(1, 22))
    for row in rows:
        assert row.passed, row
        assert (row.sites, row.live_after, row.new_before, row.new_after_retry) == (21, 0, 6, 6)
    assert host.live == (0, 0)


def test_a_load_that_loses_something_is_caught(host: HostMemory) -> None:
    rows = growth_table("caches", host, forgetful)
    # the very first call has nothing to lose
    assert [row.failed_at for row in rows if row.passed] == [1]
    assert all(row.live_after > 0 for row in rows[1:])
    assert all(row.new_after_retry > row.new_before for row in rows[6:])
    unordered = growth_table("caches", host, first_in_first_out)
    assert not any(row.release_order_ok or row.passed for row in unordered)


def test_the_hosts_driver_refuses_misuse() -> None:
    host = HostMemory(UNIT)
    base = host.reserve(4 * UNIT)
    handle = host.create(UNIT)
    with pytest.raises(InternalError, match="cannot be mapped"):
        host.map(base, 2 * UNIT, handle)
    host.map(base, UNIT, handle)
    for action in (
        lambda: host.map(base, UNIT, handle),
        lambda: host.allow(base, 2 * UNIT),
        lambda: host.allow(base + UNIT, UNIT),
        lambda: host.unmap(base, 2 * UNIT),
        lambda: host.free(base, 4 * UNIT),
    ):
        with pytest.raises(InternalError):
            action()
    host.unmap(base, UNIT)
    host.release(handle)
    with pytest.raises(InternalError, match="released twice"):
        host.release(handle)
    host.free(base, 4 * UNIT)
    with pytest.raises(InternalError, match="no multiple of a page"):
        HostMemory(UNIT + 1)


def test_addresses_that_are_not_there_are_a_typed_error() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        Arena(HostMemory(), 1 << 60)
    assert caught.value.required == 1 << 60


def test_the_driver_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CudaMemory", "HipMemory"):
        monkeypatch.setattr(vmm_drivers, name, lambda index, name=name: (name, index))
    assert isinstance(memory_driver(torch.device("cpu")), HostMemory)
    monkeypatch.setattr(torch.version, "hip", None)
    assert memory_driver(torch.device("cuda", 2)) == ("CudaMemory", 2)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert memory_driver(torch.device("cuda", 1)) == ("HipMemory", 1)
    with pytest.raises(UnsupportedError, match="meta"):
        memory_driver(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_memory_of_a_gpu_grows_under_a_captured_graph(index: int) -> None:
    if torch.cuda.device_count() <= index:
        pytest.skip(f"needs a GPU {index}")
    device = torch.device("cuda", index)
    step = torch.ones(1, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    driver = memory_driver(device)
    unit = driver.granularity
    arena = Arena(driver, 64 * unit, lanes=3)
    arena.grow(unit)
    arena.grow(unit, lane=2)
    whole = arena.whole()
    assert whole.device == device
    first, third = whole[0, :unit], whole[2, :unit]
    first.zero_()
    third.zero_()

    def run() -> None:
        whole[0, :unit].add_(step)
        whole[2, :unit].add_(step)

    run()
    graph = capture(run, device)
    for turn in range(2, 12):
        arena.grow(3 * unit, lane=2)
        assert arena.base == whole.data_ptr()
        graph.replay()
        assert first.eq(turn).all()
        assert third.eq(turn).all()
        # the new part can be used at once, through the tensor from before
        end = arena.mapped(2)
        whole[2, end - 3 * unit : end].fill_(turn)
        assert arena.view(end, 2)[-1].item() == turn
    assert arena.nbytes == 32 * unit
    graph.release()
    grown = torch.cuda.mem_get_info(device)[0]
    arena.release()
    assert torch.cuda.mem_get_info(device)[0] >= grown + 30 * unit


@pytest.mark.gpu
def test_faults_on_a_gpu_lose_nothing_and_missing_memory_is_told() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    driver = memory_driver(torch.device("cuda", 0))

    def build(faulty: MemoryDriver) -> Arena:
        with Staging(lambda nbytes: Arena(faulty, nbytes)) as staging:
            arena = staging.take("cache", 8 * faulty.granularity)
            arena.grow(1)
            arena.grow(2 * faulty.granularity)
            staging.publish()
        return arena

    rows = growth_table("cache", driver, build)
    assert len(rows) == 7
    assert all(row.passed for row in rows), rows
    more = 2 * torch.cuda.get_device_properties(0).total_memory
    arena = Arena(driver, more)
    with pytest.raises(MemoryLimitError) as caught:
        arena.grow(more)
    assert caught.value.required >= more > caught.value.available
    assert arena.nbytes == 0
    arena.release()
