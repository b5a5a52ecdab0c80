"""The daemon's keeper: a daemon that dies comes back, and one that keeps dying is given up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from client_kit import (
    LONG,
    a_keeper,
    follow,
    names,
    run,
    turn,
    turns_of,
    until,
)

from hipfire.base.errors import (
    ArtifactError,
    MemoryLimitError,
    TransportError,
)
from hipfire.engine.client import DaemonDiedError
from hipfire.engine.keeper import RestartPolicy
from hipfire.engine.turn import TERMINALS, Delta, Event, Failed, TurnKey
from hipfire.engine.wire_messages import LoadParams, ProcessConfig


def test_a_killed_daemon_comes_back_with_its_model(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_keeper(tmp_path, config=ProcessConfig(threads=3)) as keeper:
            assert keeper.state == "ok"
            loaded = await keeper.load("m", LoadParams(max_seq=77))
            assert (loaded["model"], loaded["max_seq"]) == ("m", 77)
            before = keeper.pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            await until(lambda: keeper.state == "restarting")
            # asked meanwhile, and at once by many: one load serves them all
            replies = await asyncio.gather(*(follow(keeper, turn(str(n))) for n in range(4)))
            assert [names(events)[-1] for events in replies] == ["Done"] * 4
            assert keeper.state == "ok"
            assert keeper.pid not in (None, before)
            answer = await keeper.request("diag")
            assert (answer["model"], answer["threads"]) == ("m", 3)
            assert keeper.loaded is not None
            assert keeper.loaded["max_seq"] == 77
            assert (tmp_path / "daemon.log").read_text().count("a library prints this") == 2

    run(work)


def test_a_turn_under_way_is_not_repeated_by_the_next_daemon(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_keeper(tmp_path) as keeper:
            await keeper.load("m", LoadParams())
            events = []
            async for event in keeper.generate(turn("a", LONG)):
                events.append(event)
                if isinstance(event, Delta):
                    os.kill(keeper.pid or 0, signal.SIGKILL)
            assert names(events) == ["Started", "Delta", "Failed"]
            assert await turns_of(keeper) == 0

    run(work)


def test_a_turn_that_waits_for_the_next_daemon_can_be_cancelled(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_keeper(tmp_path) as keeper:
            await keeper.load("m", LoadParams())
            os.kill(keeper.pid or 0, signal.SIGKILL)
            await until(lambda: keeper.state == "restarting")
            readers = [asyncio.create_task(follow(keeper, turn(str(n), LONG))) for n in range(2)]
            await asyncio.sleep(0)
            keeper.cancel(TurnKey("0", 1))
            keeper.abort(TurnKey("1", 1))
            assert [names(events) for events in await asyncio.gather(*readers)] == [["Aborted"]] * 2
            assert await turns_of(keeper) == 0

    run(work)


def test_kills_at_any_moment_leave_nobody_waiting(tmp_path: Path) -> None:
    async def work() -> None:
        patient = RestartPolicy(first_wait=0.01, longest_wait=0.02, most_deaths=99)
        async with a_keeper(tmp_path, policy=patient) as keeper:
            await keeper.load("m", LoadParams())
            ended: list[list[Event]] = []

            async def client(number: int) -> None:
                for attempt in range(12):
                    ended.append(await follow(keeper, turn(str(number), "say:a wait say:b", attempt)))
                    await asyncio.sleep(0.02)

            clients = [asyncio.create_task(client(number)) for number in range(6)]
            for wait in (0.03, 0.2, 0.25):
                await asyncio.sleep(wait)
                await until(lambda: keeper.pid is not None)
                os.kill(keeper.pid or 0, signal.SIGKILL)
            await asyncio.gather(*clients)
            assert len(ended) == 72
            for events in ended:
                assert names(events)[-1] in ("Done", "Failed")
                assert all(not isinstance(event, TERMINALS) for event in events[:-1])
            assert names(await follow(keeper, turn("last")))[-1] == "Done"
            assert await turns_of(keeper) == 0

    run(work)


def test_a_daemon_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_keeper(tmp_path) as keeper:
            for _ in range(5):
                with pytest.raises(DaemonDiedError):
                    await keeper.load("deadly", LoadParams())
            with pytest.raises(TransportError, match="the engine does not run"):
                await keeper.load("m", LoadParams())
            assert keeper.state == "unhealthy"
            assert keeper.pid is None
            (failure,) = await follow(keeper, turn("a"))
            assert isinstance(failure, Failed)
            assert failure.kind == "transport"

    run(work)


def test_a_daemon_that_hangs_is_killed_and_its_turns_are_answered(tmp_path: Path) -> None:
    async def work() -> None:
        policy = RestartPolicy(first_wait=0.01, check_every=0.02, stall=1.0)
        async with a_keeper(tmp_path, policy=policy) as keeper:
            await keeper.load("m", LoadParams())
            before = keeper.pid
            # steps that take their time are no hanging
            assert names(await follow(keeper, turn("a", "sleep:0.1 " * 5)))[-1] == "Done"
            assert keeper.pid == before
            reading = asyncio.create_task(follow(keeper, turn("b", LONG)))
            await asyncio.sleep(0.05)
            os.kill(before or 0, signal.SIGSTOP)
            (*_, failure) = await reading
            assert isinstance(failure, Failed)
            assert (failure.kind, failure.retryable) == ("transient", True)
            assert names(await follow(keeper, turn("c")))[-1] == "Done"

    run(work)


def test_deaths_of_long_ago_do_not_count(tmp_path: Path) -> None:
    now = 0.0

    async def work() -> None:
        nonlocal now
        async with a_keeper(tmp_path, clock=lambda: now) as keeper:
            for _ in range(6):
                os.kill(keeper.pid or 0, signal.SIGKILL)
                await until(lambda: keeper.state != "ok")
                await until(lambda: keeper.state != "restarting")
                assert keeper.state == "ok"
                now += 16

    run(work)


def test_a_model_that_cannot_be_loaded_is_not_loaded_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_keeper(tmp_path) as keeper:
            await keeper.load("m", LoadParams())
            with pytest.raises(MemoryLimitError):
                await keeper.load("refused", LoadParams())
            assert keeper.loaded is not None
            assert keeper.loaded["model"] == "m"
            with pytest.raises(ArtifactError):
                await keeper.load("broken", LoadParams())
            assert keeper.loaded is None
            (failure,) = await follow(keeper, turn("a"))
            assert isinstance(failure, Failed)
            assert "no model is loaded" in failure.message
            await keeper.load("m", LoadParams())
            await keeper.unload()
            os.kill(keeper.pid or 0, signal.SIGKILL)
            await until(lambda: keeper.state != "ok")
            assert (await keeper.request("diag"))["model_loaded"] is False

    run(work)


def test_closing_a_keeper_while_it_restarts_leaves_no_process(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_keeper(tmp_path, policy=RestartPolicy(first_wait=30)) as keeper:
            os.kill(keeper.pid or 0, signal.SIGKILL)
            await until(lambda: keeper.state == "restarting")
        assert keeper.pid is None
        with pytest.raises(TransportError):
            await keeper.request("ping")

    run(work)
