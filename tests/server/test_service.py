"""Which turns run and which wait, whatever API they came by."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted_backend import MODEL, Hold, Say, ScriptedBackend
from server_kit import OTHER, make_library
from service_kit import finish, run, settle, turn

from hipfire.base.errors import MemoryLimitError
from hipfire.server.errors import OverloadedError, status_of
from hipfire.server.options import ServeOptions
from hipfire.server.service import Service


def test_turns_of_one_model_run_at_once_and_another_model_waits(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def test(service: Service, backend: ScriptedBackend) -> None:
        first = await service.open(MODEL, turn("a"))
        second = await service.open(MODEL, turn("b"))
        assert backend.running == 2
        other = asyncio.create_task(service.open(OTHER, turn("c")))
        await settle()
        # first come, first served: a later turn of the resident model does not overtake
        late = asyncio.create_task(service.open(MODEL, turn("d")))
        await settle()
        assert [path.stem for path, _ in backend.loads] == [MODEL]
        assert service.gauges()["hipfire_queue_depth"] == 2
        gate.set()
        assert await finish(first) + await finish(second) == "yesyes"
        assert await finish(await other) == "yes"
        assert await finish(await late) == "yes"
        assert [path.stem for path, _ in backend.loads] == [MODEL, OTHER, MODEL]

    run(test, tmp_path, [Hold(gate), Say("yes")])


def test_full_queue_refuses_and_has_room_again(tmp_path: Path) -> None:
    async def test(service: Service, backend: ScriptedBackend) -> None:
        replies = [await service.open(MODEL, turn(str(number))) for number in range(3)]
        with pytest.raises(OverloadedError, match="queue is full"):
            await service.open(MODEL, turn("more"))
        assert service.metrics.counters["hipfire_admission_rejected_total"] == 1
        await finish(replies[0])
        await settle()
        assert await finish(await service.open(MODEL, turn("later"))) == "Hello!"
        for reply in replies[1:]:
            await finish(reply)
        assert "more" not in [request.key.id for request in backend.seen]

    run(test, tmp_path, slots=2, max_queue=1)


def test_queue_without_limit_takes_all(tmp_path: Path) -> None:
    async def test(service: Service, backend: ScriptedBackend) -> None:
        replies = [await service.open(MODEL, turn(str(number))) for number in range(100)]
        assert {await finish(reply) for reply in replies} == {"Hello!"}

    run(test, tmp_path, slots=1, max_queue=0)


def test_wait_for_a_busy_model_ends(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def test(service: Service, backend: ScriptedBackend) -> None:
        first = await service.open(MODEL, turn("a"))
        with pytest.raises(OverloadedError, match="was not free"):
            await service.open(OTHER, turn("b"))
        gate.set()
        await finish(first)
        assert service.gauges()["hipfire_queue_depth"] == 0
        assert [path.stem for path, _ in backend.loads] == [MODEL]

    run(test, tmp_path, [Hold(gate)], queue_timeout_s=0.05)


def test_abandoned_waits_cost_nothing(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def test(service: Service, backend: ScriptedBackend) -> None:
        first = await service.open(MODEL, turn("a"))
        waiting = [asyncio.create_task(service.open(OTHER, turn(f"b{n}"))) for n in range(20)]
        late = asyncio.create_task(service.open(MODEL, turn("late")))
        await settle()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        # nobody stands in its way any more
        await settle()
        assert late.done()
        gate.set()
        await finish(first)
        await finish(late.result())
        assert [request.key.id for request in backend.seen] == ["a", "late"]
        assert len(backend.loads) == 1
        counts = service.metrics.counters
        # each turn that was asked for has one end in the books
        assert (counts["hipfire_requests_total"], counts["hipfire_requests_aborted_total"]) == (22, 20)
        assert (service.metrics.served, counts["hipfire_requests_failed_total"]) == (2, 0)

    run(test, tmp_path, [Hold(gate)])


def test_failed_load_is_told_to_all_who_wait_and_the_next_try_may_work(tmp_path: Path) -> None:
    async def test(service: Service, backend: ScriptedBackend) -> None:
        backend.load_error, backend.load_seconds = MemoryLimitError(2**30, 2**20, what="the model"), 0.02
        tasks = [asyncio.create_task(service.open(MODEL, turn(str(number)))) for number in range(3)]
        await asyncio.sleep(0.01)
        assert service.loading == MODEL
        assert service.health()[1]["loading_model"] == MODEL
        assert service.health()[1]["ready"] is False
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [status_of(each) for each in results if isinstance(each, Exception)] == [503] * 3
        assert len(backend.loads) == 1
        backend.load_error = None
        assert await finish(await service.open(MODEL, turn("again"))) == "Hello!"
        assert service.health()[1]["ready"] is True

    run(test, tmp_path)


def test_idle_model_is_unloaded_and_comes_back_but_never_under_a_turn(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def test(service: Service, backend: ScriptedBackend) -> None:
        reply = await service.open(MODEL, turn("a"))
        await asyncio.sleep(0.15)
        assert backend.unloads == 0
        gate.set()
        await finish(reply)
        await settle()
        assert service.resident == MODEL
        await asyncio.sleep(0.15)
        assert (backend.unloads, service.resident) == (1, None)
        assert await finish(await service.open(MODEL, turn("b"))) == "yes"
        assert len(backend.loads) == 2

    run(test, tmp_path, [Hold(gate), Say("yes")], idle_timeout_s=0.05)


def test_own_model_is_loaded_ahead_unless_told_not_to(tmp_path: Path) -> None:
    for prewarm in (True, False):

        async def test(service: Service, backend: ScriptedBackend, prewarm: bool = prewarm) -> None:
            for _ in range(20):
                # the load is nobody's request
                assert (service.stats()["running"], service.stats()["queue_depth"]) == (0, 0)
                await asyncio.sleep(0)
            assert [path.stem for path, _ in backend.loads] == ([MODEL] if prewarm else [])
            assert await finish(await service.open(MODEL, turn("a"))) == "Hello!"

        run(test, tmp_path, model=str(tmp_path / f"{MODEL}.hf4"), prewarm=prewarm)


def test_health_tells_the_engine_from_the_server(tmp_path: Path) -> None:
    async def test(service: Service, backend: ScriptedBackend) -> None:
        assert service.health()[0] == 200
        backend.status = "restarting"
        assert service.health()[0] == 503
        assert service.health()[1]["status"] == "restarting"
        backend.status = "unhealthy"
        assert service.health()[1]["status"] == "unhealthy"
        with pytest.raises(OverloadedError, match="does not stay up"):
            await service.open(MODEL, turn("a"))
        backend.status = "ok"
        service.closing = True
        with pytest.raises(OverloadedError, match="stopping"):
            await service.open(MODEL, turn("b"))
        assert not backend.seen

    run(test, tmp_path)


def test_stuck_engine_is_not_ready(tmp_path: Path) -> None:
    now = [0.0]
    gate = asyncio.Event()

    async def main() -> None:
        backend = ScriptedBackend([[Hold(gate), Say("x")]])
        options = ServeOptions(idle_timeout_s=0)
        service = Service(options, backend, make_library(tmp_path), clock=lambda: now[0])
        reply = await service.open(MODEL, turn("a"))
        now[0] = 599.0
        assert service.health()[1]["ready"] is True
        now[0] = 601.0
        assert service.health()[1] | {"ready": False, "stalled": True} == service.health()[1]
        assert service.health()[0] == 200
        gate.set()
        await finish(reply)
        assert service.health()[1]["ready"] is True

    asyncio.run(main())
