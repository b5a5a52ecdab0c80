"""What tests of the daemon's client and keeper share."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hipfire.engine.client import Daemon
from hipfire.engine.keeper import DaemonKeeper, RestartPolicy
from hipfire.engine.turn import Event, Ready, TurnKey, TurnRequest

COMMAND = (sys.executable, str(Path(__file__).with_name("scripted_core.py")))
QUICK = RestartPolicy(first_wait=0.01, longest_wait=0.02)
# a turn that still runs when the test is done with it
LONG = "say:x " + "sleep:0.01 " * 2000


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HIPFIRE_HOME": str(home)}


@asynccontextmanager
async def a_daemon(home: Path, model: str | None = "m") -> AsyncIterator[Daemon]:
    daemon = await Daemon.start(COMMAND, environment(home), home / "daemon.log")
    try:
        if model is not None:
            await daemon.request("load", model=model)
        yield daemon
    finally:
        await daemon.close()


@asynccontextmanager
async def a_keeper(home: Path, **options: Any) -> AsyncIterator[DaemonKeeper]:
    keeper = DaemonKeeper(
        COMMAND, env=environment(home), log_path=home / "daemon.log", **{"policy": QUICK, **options}
    )
    try:
        await keeper.start()
        yield keeper
    finally:
        await keeper.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body; one that hangs has failed."""
    asyncio.run(asyncio.wait_for(work(), 60))


def turn(name: str, prompt: str = "say:hello", attempt: int = 1) -> TurnRequest:
    return TurnRequest(TurnKey(name, attempt), prompt=prompt)


async def follow(source: Daemon | DaemonKeeper, request: TurnRequest) -> list[Event]:
    """Return all events of a turn, which is committed when it is ready."""
    events = []
    async for event in source.generate(request):
        events.append(event)
        if isinstance(event, Ready):
            source.commit(request.key)
    return events


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def turns_of(source: Daemon | DaemonKeeper) -> int:
    return int((await source.request("diag"))["turns"])
