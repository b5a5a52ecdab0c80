"""Many clients at once against one server, whose engine is killed now and then.

This file knows how a load is run, not which ends are good.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hipfire.validate.harness_client import Address, get_json
from hipfire.validate.load_client import Outcome, perform
from hipfire.validate.load_processes import kill_engine, wait_for_engine
from hipfire.validate.load_requests import Request

Say = Callable[[str], None]
# kills come while this part of the requests is under way, so that work lies before and after each
KILL_FROM: Final = 0.1
KILL_TO: Final = 0.75
LONGEST_PAUSE_S: Final = 0.5
RETRY_PAUSE_S: Final = 1.0
ENGINE_TIMEOUT_S: Final = 60.0
ASK_TIMEOUT_S: Final = 5.0
SAY_EVERY: Final = 50


@dataclass(frozen=True, slots=True)
class Kill:
    """An engine that was killed: its process, how many requests had ended, how many turns ran by /stats."""

    pid: int
    after_requests: int
    running: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is loaded: its address, its home and its process."""

    address: Address
    home: Path
    pid: int


@dataclass(slots=True)
class Progress:
    """How many requests have ended, for those that wait for it."""

    total: int
    ended: int = 0
    stopped: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self) -> int:
        """Count one more, and return how many there are."""
        with self.changed:
            self.ended += 1
            self.changed.notify_all()
            return self.ended

    def stop(self) -> None:
        """Say that no more will end."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def wait_for(self, count: int) -> bool:
        """Wait until so many have ended; False if no more will."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.ended >= count)
            return not self.stopped and self.ended < self.total


def together(address: Address, requests: Sequence[Request], timeout_s: float) -> list[Outcome]:
    """Send all requests at the same time and return how each ended."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: perform(address, request, timeout_s), requests))


def storm(
    target: Target,
    requests: Sequence[Request],
    *,
    clients: int,
    kills: int,
    seed: int,
    timeout_s: float,
    say: Say,
) -> tuple[list[Outcome], list[Kill]]:
    """Have `clients` send the requests, each the next one that nobody has sent; kill the engine meanwhile.

    Returns the outcomes in the order of the requests, and the kills, of which there are fewer than asked for
    if no engine came up in time or the requests ended first.
    """
    progress = Progress(len(requests))
    killed: list[Kill] = []
    killer = threading.Thread(target=_kill, args=(target, progress, kills, seed, killed, say))

    def one(request: Request) -> Outcome:
        try:
            outcome = perform(target.address, request, timeout_s)
            if outcome.retry_after:
                # as the server asks; clients that rush on would find nothing but a full queue
                time.sleep(RETRY_PAUSE_S)
            return outcome
        finally:
            ended = progress.note()
            if ended % SAY_EVERY == 0 or ended == progress.total:
                say(f"{ended} of {progress.total} requests have ended")

    killer.start()
    try:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(one, requests)), killed
    finally:
        progress.stop()
        killer.join()


def kill_points(total: int, kills: int, seed: int) -> list[tuple[int, float]]:
    """Return after how many requests, and after which pause in seconds, each kill comes."""
    rng = random.Random(seed)
    points = sorted(rng.uniform(KILL_FROM, KILL_TO) for _ in range(kills))
    return [(int(total * point), rng.uniform(0, LONGEST_PAUSE_S)) for point in points]


def _kill(target: Target, progress: Progress, kills: int, seed: int, killed: list[Kill], say: Say) -> None:
    last = None
    for count, pause in kill_points(progress.total, kills, seed):
        if not progress.wait_for(count):
            return
        time.sleep(pause)
        pid = wait_for_engine(target.home, target.pid, other_than=last, timeout_s=ENGINE_TIMEOUT_S)
        if pid is None:
            return
        stats = get_json(target.address, "/stats", ASK_TIMEOUT_S)
        running = stats.get("running") if isinstance(stats, dict) else None
        if kill_engine(pid, target.home, target.pid):
            killed.append(Kill(pid, progress.ended, running))
            say(f"killed the engine, process {pid}, after {progress.ended} requests")
            last = pid
