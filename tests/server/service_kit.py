"""A service in a loop of its own, around a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from scripted_backend import Say, Script, ScriptedBackend
from server_kit import make_library

from hipfire.engine.turn import Delta, TurnKey, TurnRequest
from hipfire.server.options import ServeOptions
from hipfire.server.service import Reply, Service

HELLO: tuple[Any, ...] = ({"role": "user", "content": "Hello"},)


def turn(name: str, **fields: Any) -> TurnRequest:
    return TurnRequest(TurnKey(name, 1), **{"messages": HELLO, **fields})


def run(
    test: Callable[[Service, ScriptedBackend], Awaitable[None]],
    folder: Path,
    *scripts: Script,
    **options: Any,
) -> None:
    """Run a test in a loop of its own around a service."""

    async def main() -> None:
        backend = ScriptedBackend(list(scripts) or [[Say("Hello!")]])
        chosen = ServeOptions(**{"idle_timeout_s": 0, **options})
        service = Service(chosen, backend, make_library(folder))
        await service.start()
        try:
            await asyncio.wait_for(test(service, backend), 20)
        finally:
            await service.close()
        assert not backend.running, "a turn was left running"

    asyncio.run(main())


async def finish(reply: Reply) -> str:
    async with reply:
        text = "".join([event.text async for event in reply if isinstance(event, Delta)])
        await reply.commit()
    return text


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
