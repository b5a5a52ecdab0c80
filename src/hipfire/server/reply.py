"""One turn as a client's request sees it: its pieces, its result, and the commit or abort that settles it.

The turn's events are read by a task of its own, so that the engine's word on how a turn ended is always
heard, whoever has left meanwhile. This file knows no API and does not choose models.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from hipfire.base import log
from hipfire.base.errors import HipfireError, InternalError
from hipfire.engine.turn import (
    TERMINALS,
    Aborted,
    Delta,
    Done,
    Event,
    Failed,
    Info,
    Ready,
    Started,
    TurnKey,
    TurnRequest,
    TurnResult,
)
from hipfire.server.backend import Backend
from hipfire.server.errors import ReportedError

# how long the engine may take to end a turn that it was told to end, in seconds
SETTLE_SECONDS = 10.0


@dataclass(slots=True)
class TurnTrace:
    """What the server itself measured of a turn; times are of a monotonic clock, None where it never came."""

    opened: float
    first: float | None = None
    last: float | None = None
    result: TurnResult | None = None
    error: HipfireError | None = None
    committed: bool = False


class Reply:
    """A turn that runs. Iterate over its pieces, then commit; leaving it uncommitted aborts the turn.

    `model` is the name that the client asked for, `request` the turn as the engine got it, `heard` the
    clock's time of the last event. Iterating raises HipfireErrors only: ReportedError for what the engine
    reports.
    """

    def __init__(
        self,
        model: str,
        request: TurnRequest,
        backend: Backend,
        *,
        ended: Callable[[Reply, TurnTrace], None],
        clock: Callable[[], float] = time.monotonic,
        notes: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.key: TurnKey = request.key
        self.trace = TurnTrace(clock())
        self.heard = self.trace.opened
        self._notes = tuple(notes)
        self._backend = backend
        self.request = request
        self._ended = ended
        self._clock = clock
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._over = asyncio.Event()
        self._started: Started | None = None
        self._result: TurnResult | None = None
        self._reader: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()

    @property
    def started(self) -> Started:
        """Return the turn's first event."""
        if self._started is None:
            raise InternalError("the turn has not started")
        return self._started

    @property
    def settling(self) -> bool:
        """Return whether nothing but the client's commit is missing."""
        return self.trace.result is not None

    @property
    def result(self) -> TurnResult:
        """Return how the turn ended; only after the iteration has."""
        if self._result is None:
            raise InternalError("the turn has no result yet")
        return self._result

    async def begin(self) -> None:
        """Send the turn to the engine and return when its prompt is about to be read."""
        self._reader = asyncio.create_task(self._read())
        try:
            while not isinstance(event := await self._next(), Started):
                pass
        except BaseException:
            self.leave()
            raise
        self._started = event

    def __aiter__(self) -> AsyncIterator[Delta | Info]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[Delta | Info]:
        while self._result is None:
            event = await self._next()
            if isinstance(event, Delta | Info):
                yield event
            elif isinstance(event, Ready | Done):
                self._result = replace(event.result, warnings=(*self._notes, *event.result.warnings))

    async def commit(self) -> None:
        """Say that the client has everything. Call it after the last bytes were handed to the socket.

        Raises ReportedError if the engine has given the turn up before.
        """
        self.trace.committed = True
        await self._backend.commit(self.key)
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while not isinstance(await self._next(), Done):
                    pass
        except TimeoutError:
            raise ReportedError("transient", "the engine did not confirm the commit") from None

    async def cancel(self) -> None:
        """Stop the turn and wait until it has stopped, at most `SETTLE_SECONDS`."""
        self.leave()
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._over.wait()
        except TimeoutError:
            log.logger().warning(f"the engine did not end turn {self.key.id}")

    def leave(self) -> None:
        """Have the turn stopped and forgotten, without waiting; does nothing if it is over."""
        if self._over.is_set() or self._reader is None:
            return
        self._chore(self._abort())

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # never awaits: the task that leaves may be a cancelled one
        if not self.trace.committed:
            self.leave()

    async def _next(self) -> Event:
        event = await self._events.get()
        if isinstance(event, Failed):
            raise ReportedError(event.kind, event.message, hint=event.hint, retryable=event.retryable)
        if isinstance(event, Aborted):
            raise ReportedError("transient", f"the turn was given up: {event.reason}", retryable=True)
        if event is None:
            raise self.trace.error or ReportedError("transient", "the engine ended during the turn")
        return event

    async def _read(self) -> None:
        """Read the turn's events to the end, and say how it ended exactly once."""
        try:
            async with contextlib.aclosing(self._backend.generate(self.request)) as events:
                async for event in events:
                    self._observe(event)
                    self._events.put_nowait(event)
                    if isinstance(event, TERMINALS):
                        break
        except Exception as error:
            unknown = InternalError(f"the turn failed: {error!r}")
            self.trace.error = error if isinstance(error, HipfireError) else unknown
        finally:
            self._over.set()
            self._events.put_nowait(None)
            self._ended(self, self.trace)

    def _observe(self, event: Event) -> None:
        now = self.heard = self._clock()
        if isinstance(event, Delta) and self.trace.first is None:
            self.trace.first = now
        elif isinstance(event, Ready):
            self.trace.last, self.trace.result = now, event.result
        elif isinstance(event, Failed):
            self.trace.error = ReportedError(event.kind, event.message, hint=event.hint)

    async def _abort(self) -> None:
        """Tell the engine; if it does not end the turn, forget it anyway."""
        try:
            # a turn that waits or runs is cancelled, one that waits for its commit is aborted
            await self._backend.cancel(self.key)
            await self._backend.abort(self.key)
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._over.wait()
        except (TimeoutError, HipfireError):
            if self._reader is not None:
                self._reader.cancel()

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        # the loop itself keeps no strong reference to a task
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
