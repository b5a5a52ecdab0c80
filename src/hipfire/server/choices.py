"""Several turns of one request at once: their events in the order in which they come.

This file knows no API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from hipfire.engine.turn import Delta, Info, TurnRequest
from hipfire.server.reply import Reply
from hipfire.server.service import Service

Happening = tuple[int, Delta | Info | None]


class Choices:
    """The turns of one request. Iterate over `events`, commit each turn, and leave the context.

    Leaving it stops and forgets every turn that was not committed. A turn that fails fails the request.
    `warnings` are told with each turn's own.
    """

    def __init__(
        self, service: Service, model: str, turns: Sequence[TurnRequest], warnings: Sequence[str] = ()
    ) -> None:
        self._service = service
        self._model = model
        self._turns = turns
        self._warnings = warnings
        self._happened: asyncio.Queue[tuple[int, Delta | Info | Exception | None]] = asyncio.Queue()
        self._replies: dict[int, Reply] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Choices:
        self._tasks = [asyncio.create_task(self._follow(index)) for index in range(len(self._turns))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # never awaits: the task that leaves may be a cancelled one
        for task in self._tasks:
            task.cancel()
        for reply in self._replies.values():
            if not reply.trace.committed:
                reply.leave()

    async def events(self) -> AsyncIterator[Happening]:
        """Yield (choice, piece of its turn), and (choice, None) where it is complete; ends with the last."""
        running = len(self._turns)
        while running:
            index, event = await self._happened.get()
            if isinstance(event, Exception):
                raise event
            running -= event is None
            yield index, event

    def __getitem__(self, index: int) -> Reply:
        """Return the turn of a choice that has had an event."""
        return self._replies[index]

    def __len__(self) -> int:
        return len(self._turns)

    async def commit(self, index: int) -> None:
        """Say that the client has everything of one turn; frees the place that it held."""
        await self._replies[index].commit()

    async def _follow(self, index: int) -> None:
        try:
            reply = await self._service.open(self._model, self._turns[index], warnings=self._warnings)
            self._replies[index] = reply
            async for event in reply:
                self._happened.put_nowait((index, event))
            self._happened.put_nowait((index, None))
        except Exception as error:
            self._happened.put_nowait((index, error))
