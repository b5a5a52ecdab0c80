"""How turns end: committed, left, failed, or with the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_backend import MODEL, Fail, Say, Script, ScriptedBackend, Wait
from server_kit import OTHER, make_library
from service_kit import finish, run, settle, turn

from hipfire.engine.turn import TurnRequest
from hipfire.server.errors import ReportedError
from hipfire.server.options import ServeOptions
from hipfire.server.service import Service


def test_turn_that_is_left_uncommitted_is_aborted(tmp_path: Path) -> None:
    async def test(service: Service, backend: ScriptedBackend) -> None:
        async with await service.open(MODEL, turn("read")) as reply:
            async for _ in reply:
                pass
        async with await service.open(MODEL, turn("unread")):
            pass
        cancelled = await service.open(MODEL, turn("cancelled"))
        await cancelled.cancel()
        await settle()
        assert {key.id: end for key, end in backend.ended.items()} == {
            "read": "aborted",
            "unread": "aborted",
            "cancelled": "aborted",
        }
        assert service.metrics.counters["hipfire_requests_aborted_total"] == 3
        assert not backend.commits

    run(test, tmp_path)


def test_turn_that_fails_frees_its_place(tmp_path: Path) -> None:
    scripts: list[Script] = [
        [Fail("internal", "broken", before_start=True)],
        [Say("One"), Fail("transient", "the engine ended")],
        [Say("fine")],
    ]

    async def test(service: Service, backend: ScriptedBackend) -> None:
        with pytest.raises(ReportedError, match="broken"):
            await service.open(MODEL, turn("a"))
        with pytest.raises(ReportedError, match="the engine ended"):
            await finish(await service.open(MODEL, turn("b")))
        assert await finish(await service.open(MODEL, turn("c"))) == "fine"
        await settle()
        assert service.metrics.counters["hipfire_requests_failed_total"] == 2
        assert service.gauges()["hipfire_turns_running"] == 0

    run(test, tmp_path, *scripts)


def test_engine_that_ends_without_a_word_is_an_error(tmp_path: Path) -> None:
    class Mute(ScriptedBackend):
        async def generate(self, request: TurnRequest) -> Any:
            for event in ():
                yield event

    async def main() -> None:
        service = Service(ServeOptions(idle_timeout_s=0), Mute(), make_library(tmp_path))
        with pytest.raises(ReportedError, match="the engine ended"):
            await service.open(MODEL, turn("a"))
        await settle()
        assert service.gauges()["hipfire_turns_running"] == 0

    asyncio.run(main())


def test_engine_that_gives_a_turn_up_before_the_commit_is_heard(tmp_path: Path) -> None:
    async def test(service: Service, backend: ScriptedBackend) -> None:
        reply = await service.open(MODEL, turn("a"))
        async with reply:
            async for _ in reply:
                pass
            await backend.abort(reply.key)
            await settle()
            with pytest.raises(ReportedError, match="given up"):
                await reply.commit()

    run(test, tmp_path)


def test_closing_ends_waiting_and_running_turns(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedBackend([[Wait(30), Say("x")]])
        service = Service(ServeOptions(idle_timeout_s=0), backend, make_library(tmp_path))
        reply = await service.open(MODEL, turn("a"))
        waiting = asyncio.create_task(service.open(OTHER, turn("b")))
        await settle()
        await service.close()
        assert backend.closed
        with pytest.raises(ReportedError):
            await finish(reply)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(main())
