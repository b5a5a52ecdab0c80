"""What a construction does when one of its allocations fails: each of them in turn, and a retry after each.

A construction that rolls back fully leaves the live bytes where they were, and its retry finds every block of
the first, warm construction again. This file does not know what is constructed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from hipfire.base.errors import MemoryLimitError
from hipfire.device.pool import Block, Pool
from hipfire.device.staging import Owner

Take = Callable[[int], Block]


@dataclass(frozen=True, slots=True)
class InjectionRow:
    """What came of failing allocation `failed_at` of the `sites` that a construction has.

    `live_*` are bytes with owners before the construction and after its failure; `new_*` count allocations
    from the device before the failure and after the retry. `error_kept` says that the injected error was the
    one that came out.
    """

    constructor: str
    sites: int
    failed_at: int
    live_before: int
    live_after: int
    new_before: int
    new_after_retry: int
    release_order_ok: bool
    published_once: bool
    error_kept: bool

    @property
    def passed(self) -> bool:
        """Tell whether nothing was lost, nothing newly allocated, and all given back in order."""
        return (
            self.live_before == self.live_after
            and self.new_before == self.new_after_retry
            and self.release_order_ok
            and self.published_once
            and self.error_kept
        )

    def as_json(self) -> dict[str, object]:
        """Return the row for a report, with the verdict under `pass`."""
        return {**dataclasses.asdict(self), "pass": self.passed}


class _Watch:
    """Takes blocks from a pool, fails one allocation, and notes in which order blocks come back."""

    def __init__(self, pool: Pool, fail_at: int = 0) -> None:
        self._pool = pool
        self._fail_at = fail_at
        self.error: MemoryLimitError | None = None
        self.taken = 0
        self.returned: list[int] = []

    def take(self, nbytes: int) -> Block:
        site = self.taken + 1
        if site == self._fail_at:
            self.error = MemoryLimitError(nbytes, 0, what=f"injected allocation {site}")
            raise self.error
        block = self._pool.take(nbytes)
        self.taken = site

        def give_back(_: Block) -> None:
            self.returned.append(site)
            block.release()

        return Block(block.memory, give_back)

    @property
    def in_reverse(self) -> bool:
        """Tell whether all blocks came back, last one first."""
        return self.returned == list(range(self.taken, 0, -1))


def injection_table(constructor: str, pool: Pool, build: Callable[[Take], Owner]) -> list[InjectionRow]:
    """Fail each allocation of a construction in turn, and return what came of each.

    `build` constructs with the blocks of a `take` and returns the owner of it all; it must take equal sizes
    each time. It runs once in advance, so that the pool is warm and the number of allocations is known.
    """
    warm = _Watch(pool)
    build(warm.take).release()
    sites = warm.taken
    return [_row(constructor, pool, build, sites, failed_at) for failed_at in range(1, sites + 1)]


def _row(
    constructor: str, pool: Pool, build: Callable[[Take], Owner], sites: int, failed_at: int
) -> InjectionRow:
    before = pool.counters()
    failing = _Watch(pool, failed_at)
    error_kept = False
    try:
        build(failing.take).release()
    except Exception as error:
        # any error may come out of a construction that handles failures wrongly, and the row tells it
        error_kept = error is failing.error
    live_after = pool.counters().live_bytes
    retry = _Watch(pool)
    owner = build(retry.take)
    all_held = not retry.returned
    owner.release()
    return InjectionRow(
        constructor=constructor,
        sites=sites,
        failed_at=failed_at,
        live_before=before.live_bytes,
        live_after=live_after,
        new_before=before.fresh,
        new_after_retry=pool.counters().fresh,
        release_order_ok=failing.in_reverse and retry.in_reverse,
        published_once=all_held and sorted(retry.returned) == list(range(1, sites + 1)),
        error_kept=error_kept,
    )
