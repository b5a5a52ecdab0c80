"""Faults in the calls of a memory driver, on the CPU's driver or on a real GPU's, and what comes of them.

This file does not know what grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from hipfire.base.errors import HipfireError, InternalError, MemoryLimitError
from hipfire.device.injection import InjectionRow
from hipfire.device.staging import Owner
from hipfire.device.vmm import MemoryDriver

# the calls of a growth; the others are made to undo it
GROWTH = ("reserve", "create", "map", "allow")


class FaultyDriver:
    """A `MemoryDriver` that passes calls on, notes them, and fails those that it was told to.

    `calls` holds a tuple of name and arguments for each call, the failed ones too, and `placements` the name
    and the address of each `map` and `unmap` that succeeded. An injected failure does not reach the driver.
    """

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._counts: Counter[str] = Counter()
        self._faults: dict[str, set[int]] = {}
        self._ranges: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self.placements: list[tuple[str, int]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.error: HipfireError | None = None

    @property
    def granularity(self) -> int:
        """The driver's."""
        return self._driver.granularity

    @property
    def handles(self) -> int:
        """How many pieces of physical memory are out."""
        return len(self._handles)

    @property
    def live_bytes(self) -> int:
        """The bytes of reserved addresses, of physical memory and of what is mapped, together."""
        return sum(sum(held.values()) for held in (self._ranges, self._handles, self._mapped))

    def fail(self, name: str, *numbers: int) -> None:
        """Fail the calls of that name with these numbers from now on: 1 is the next one."""
        self._faults[name] = {self._counts[name] + number for number in numbers}

    def reserve(self, nbytes: int) -> int:
        """Reserve a range."""
        self._note("reserve", nbytes)
        address = self._driver.reserve(nbytes)
        self._ranges[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back."""
        self._note("free", address, nbytes)
        self._driver.free(address, nbytes)
        del self._ranges[address]

    def create(self, nbytes: int) -> int:
        """Take physical memory."""
        self._note("create", nbytes)
        handle = self._driver.create(nbytes)
        self._handles[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        """Give physical memory back."""
        self._note("release", handle)
        self._driver.release(handle)
        del self._handles[handle]

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Place memory at an address."""
        self._note("map", address, nbytes, handle)
        self._driver.map(address, nbytes, handle)
        self._mapped[address] = nbytes
        self.placements.append(("map", address))

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a `map`."""
        self._note("unmap", address, nbytes)
        self._driver.unmap(address, nbytes)
        del self._mapped[address]
        self.placements.append(("unmap", address))

    def allow(self, address: int, nbytes: int) -> None:
        """Let a range be used."""
        self._note("allow", address, nbytes)
        self._driver.allow(address, nbytes)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._note("synchronize")
        self._driver.synchronize()

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a range as uint8 [nbytes]."""
        return self._driver.tensor(address, nbytes)

    def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        self._counts[name] += 1
        if self._counts[name] in self._faults.get(name, ()):
            if name == "create":
                self.error = MemoryLimitError(arguments[0], 0, what="an injected allocation")
            else:
                self.error = InternalError(f"injected into {name} {self._counts[name]}")
            raise self.error


def growth_table(
    constructor: str, driver: MemoryDriver, build: Callable[[MemoryDriver], Owner]
) -> list[InjectionRow]:
    """Fail each call by which a construction takes addresses and memory in turn; return what came of each.

    `build` constructs on the driver that it is given, with the same calls each time, and returns the owner of
    it all. In the rows, `live_*` count addresses, memory and mappings, and `new_*` the pieces of memory that
    the construction holds, the first time and after the retry.
    """
    warm = FaultyDriver(driver)
    owner = build(warm)
    handles, sites = warm.handles, [call[0] for call in warm.calls if call[0] in GROWTH]
    owner.release()
    return [
        _row(constructor, driver, build, (handles, sites, failed_at))
        for failed_at in range(1, len(sites) + 1)
    ]


def _row(
    constructor: str,
    driver: MemoryDriver,
    build: Callable[[MemoryDriver], Owner],
    site: tuple[int, list[str], int],
) -> InjectionRow:
    handles, sites, failed_at = site
    watched = FaultyDriver(driver)
    name = sites[failed_at - 1]
    watched.fail(name, sites[:failed_at].count(name))
    error_kept = False
    try:
        build(watched).release()
    except Exception as error:
        # any error may come out of a construction that handles failures wrongly, and the row tells it
        error_kept = error is watched.error
    live_after = watched.live_bytes
    watched.calls.clear()
    owner = build(watched)
    built = [call[0] for call in watched.calls]
    new_after_retry = watched.handles
    owner.release()
    return InjectionRow(
        constructor=constructor,
        sites=len(sites),
        failed_at=failed_at,
        live_before=0,
        live_after=live_after,
        new_before=handles,
        new_after_retry=new_after_retry,
        release_order_ok=_in_reverse(watched.placements),
        published_once=watched.live_bytes == 0 and built == sites,
        error_kept=error_kept,
    )


def _in_reverse(placements: list[tuple[str, int]]) -> bool:
    """Tell whether what was unmapped was what had been mapped last, each time."""
    placed: list[int] = []
    for name, address in placements:
        if name == "map":
            placed.append(address)
        elif not placed or placed.pop() != address:
            return False
    return True
