"""The daemon's client: whoever waits is answered, also when the process is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from client_kit import (
    COMMAND,
    LONG,
    a_daemon,
    environment,
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
    UnsupportedError,
    ValidationError,
)
from hipfire.engine.client import Daemon, DaemonDiedError
from hipfire.engine.turn import TERMINALS, Delta, Failed, TurnKey
from hipfire.engine.wire import MAX_LINE


def test_a_turn_from_start_to_commit(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            events = await follow(daemon, turn("a", "think:hm say:yes info:note"))
            assert names(events) == ["Started", "Delta", "Delta", "Info", "Ready", "Done"]
            assert [(e.channel, e.text) for e in events if isinstance(e, Delta)] == [
                ("reasoning", "hm"),
                ("answer", "yes"),
            ]
            assert await turns_of(daemon) == 0

    run(work)


def test_events_go_to_their_own_turn(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            replies = await asyncio.gather(
                *(follow(daemon, turn(str(n), f"say:{n} wait say:{n}")) for n in range(8))
            )
            for number, events in enumerate(replies):
                assert [e.text for e in events if isinstance(e, Delta)] == [str(number)] * 2
                assert {event.key for event in events} == {TurnKey(str(number), 1)}

    run(work)


def test_errors_arrive_as_the_errors_they_were(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            with pytest.raises(MemoryLimitError) as refused:
                await daemon.request("load", model="refused")
            assert (refused.value.required, refused.value.available) == (2**31, 2**30)
            assert daemon.model_loaded
            with pytest.raises(ArtifactError, match="a tensor is damaged"):
                await daemon.request("load", model="broken")
            assert not daemon.model_loaded
            with pytest.raises(UnsupportedError, match="there is no message"):
                await daemon.request("dance")
            with pytest.raises(ValidationError, match="slots"):
                await daemon.request("load", model="m", params={"slots": -1})
            (failure,) = await follow(daemon, turn("a"))
            assert isinstance(failure, Failed)
            assert (failure.kind, failure.retryable) == ("transient", True)

    run(work)


def test_progress_of_a_load_is_told_before_its_reply(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path, None) as daemon:
            notes: list[Any] = []
            reply = await daemon.request("load", model="m", progress=notes.append)
            assert [(note["done"], note["total"]) for note in notes] == [(0, 2), (2, 2)]
            assert (reply["type"], reply["model"]) == ("loaded", "m")

    run(work)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_turn_that_its_reader_leaves_is_aborted(tmp_path: Path, after: int) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            async with aclosing(daemon.generate(turn("a", LONG))) as events:
                for _ in range(after):
                    await anext(events)
            assert await turns_of(daemon) == 0
            # the same key can be used for the next attempt at once
            assert names(await follow(daemon, turn("a")))[-1] == "Done"

    run(work)


def test_a_reader_that_is_cancelled_frees_its_turn(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            reading = asyncio.create_task(follow(daemon, turn("a", LONG)))
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait({reading})
            assert await turns_of(daemon) == 0

    run(work)


def test_cancel_ends_a_turn_with_its_terminal(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            events = []
            async for event in daemon.generate(turn("a", LONG)):
                events.append(event)
                if isinstance(event, Delta):
                    daemon.cancel(event.key)
            assert names(events) == ["Started", "Delta", "Aborted"]

    run(work)


def test_a_key_in_use_and_a_line_too_long_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            async with aclosing(daemon.generate(turn("a", LONG))) as events:
                await anext(events)
                with pytest.raises(ValidationError, match="running already"):
                    await follow(daemon, turn("a"))
                with pytest.raises(ValidationError, match=f"the engine takes {MAX_LINE}"):
                    await follow(daemon, turn("b", "x" * MAX_LINE))
                assert await turns_of(daemon) == 1
            assert names(await follow(daemon, turn("b")))[-1] == "Done"

    run(work)


def test_what_the_daemon_could_not_read_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            with pytest.raises(ValidationError, match="half of a surrogate pair"):
                await asyncio.wait_for(daemon.request("load", model="a\ud800"), 10)
            with pytest.raises(ValidationError, match="half of a surrogate pair"):
                await asyncio.wait_for(follow(daemon, turn("a", "say:\udc80")), 10)
            # whole characters beyond the first plane travel as two halves
            assert names(await follow(daemon, turn("a", "say:\U0001f600")))[-1] == "Done"

    run(work)


def test_names_that_are_no_text_do_not_end_the_daemon(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            with pytest.raises(ArtifactError, match="the tensor 'a\ufffd' is damaged"):
                await daemon.request("load", model="misnamed")
            assert daemon.alive
            assert names(await follow(daemon, turn("a", "say:x misname")))[-1] == "Failed"
            assert names(await follow(daemon, turn("b")))[-1] == "Done"

    run(work)


def test_a_request_that_the_daemon_cannot_place_still_ends(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            # without an id the daemon cannot say whose failure it is, except by the request's number
            (failure,) = await follow(daemon, turn(""))
            assert isinstance(failure, Failed)
            assert failure.kind == "validation"

    run(work)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_waits_for_a_daemon_that_ends(tmp_path: Path, number: int) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            told: list[str] = []
            daemon.when_dead(lambda: told.append("dead"))
            readers = [asyncio.create_task(follow(daemon, turn(str(n), LONG))) for n in range(4)]
            await asyncio.sleep(0.05)
            loading = asyncio.create_task(
                daemon.request("load", model="slow", force=number == signal.SIGTERM)
            )
            waiting = asyncio.create_task(daemon.request("load", model="slow"))
            os.kill(daemon.pid, number)
            for events in await asyncio.gather(*readers):
                assert isinstance(events[-1], TERMINALS)
                assert names(events)[-1] in ("Failed", "Aborted")
                assert len([event for event in events if isinstance(event, TERMINALS)]) == 1
            results = await asyncio.gather(loading, waiting, return_exceptions=True)
            assert all(isinstance(result, Exception) for result in results)
            await until(lambda: bool(told))
            assert not daemon.alive
            daemon.when_dead(lambda: told.append("late"))
            assert told == ["dead", "late"]
            # asking the dead is answered at once
            with pytest.raises(DaemonDiedError):
                await daemon.request("ping")
            (failure,) = await follow(daemon, turn("z"))
            assert isinstance(failure, Failed)
            assert (failure.kind, failure.retryable) == ("transient", True)
            daemon.commit(TurnKey("z", 1))

    run(work)


def test_death_is_told_with_its_signal_and_the_last_line_of_the_log(tmp_path: Path) -> None:
    async def work() -> None:
        log = tmp_path / "daemon.log"
        log.write_text("the last line of an earlier daemon\n")
        async with a_daemon(tmp_path) as daemon:
            os.kill(daemon.pid, signal.SIGKILL)
            with pytest.raises(DaemonDiedError, match=r"signal 9.*a library prints this"):
                await daemon.request("ping")
        async with a_daemon(tmp_path) as daemon:
            events = await follow(daemon, turn("a", "boom"))
            assert isinstance(events[-1], Failed)
            assert "the scripted core broke" in events[-1].message

    run(work)


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(TransportError, match="cannot be started"):
            await Daemon.start([str(tmp_path / "nothing")])
        async with a_daemon(tmp_path) as first:
            with pytest.raises(TransportError, match=rf"exit code 1.*process {first.pid} holds"):
                await Daemon.start(COMMAND, environment(tmp_path), tmp_path / "second.log")
        silent = [sys.executable, "-c", "import time; time.sleep(60)"]
        with pytest.raises(TransportError, match="did not answer within"):
            await Daemon.start(silent, ready_seconds=0.2)

    run(work)


@pytest.mark.parametrize(
    "line", ["no JSON", '{"type": "token", "id": "a"}', '{"type": 5, "id": "a", "attempt_id": 1}']
)
def test_a_process_that_does_not_speak_the_protocol_is_ended(line: str) -> None:
    async def work() -> None:
        talker = [sys.executable, "-c", f"print({line!r}, flush=True); input(); input()"]
        with pytest.raises(DaemonDiedError, match="signal 9"):
            await Daemon.start(talker)

    run(work)


def test_closing_ends_the_process_and_its_turns(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            reading = asyncio.create_task(follow(daemon, turn("a", LONG)))
            await asyncio.sleep(0.05)
            await daemon.close()
            assert names(await reading)[-1] == "Aborted"
            assert not daemon.alive
            assert not Path(f"/proc/{daemon.pid}").exists()

    run(work)


def test_a_daemon_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_daemon(tmp_path) as daemon:
            os.kill(daemon.pid, signal.SIGSTOP)
            await daemon.close(seconds=0.1)
            assert not daemon.alive

    run(work)
