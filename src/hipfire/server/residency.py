"""Which model is in memory: turns of one model share it, turns of another wait until it is idle.

Strictly first come, first served, so that a stream of turns of one model cannot keep another from its turn.
This file does not run turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire.base import log
from hipfire.base.errors import HipfireError, InternalError
from hipfire.server.backend import Backend, LoadedInfo
from hipfire.server.errors import OverloadedError


@dataclass(eq=False, slots=True)
class _Ticket:
    """A turn that waits for its model."""

    name: str
    path: Path
    params: Mapping[str, Any]
    granted: asyncio.Future[LoadedInfo]


class Residency:
    """The one model that the engine holds, and who may use it.

    `idle_s` seconds after the last turn the model is unloaded; 0 is never.
    """

    def __init__(self, backend: Backend, *, idle_s: float) -> None:
        self._backend = backend
        self._idle_s = idle_s
        self._waiting: deque[_Ticket] = deque()
        self._running = 0
        self._busy: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self.loading: str | None = None
        self.name: str | None = None
        self.progress: tuple[float, float, str] | None = None

    @property
    def waiting(self) -> int:
        """Return how many turns wait for their model."""
        return len(self._waiting)

    def resident(self) -> str | None:
        """Return the name by which the loaded model was asked for, None if there is none."""
        return self.name if self._backend.loaded() is not None else None

    async def acquire(
        self, name: str, path: Path, params: Mapping[str, Any], *, timeout_s: float
    ) -> LoadedInfo:
        """Wait until the model at `path` is loaded and may be used; give it back with `release`.

        `timeout_s` bounds the wait for other models' turns and for the load, 0 does not. Raises
        OverloadedError after it, and what a failed load raises.
        """
        ticket = _Ticket(name, path, params, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._pump()
        try:
            async with asyncio.timeout(timeout_s or None):
                return await asyncio.shield(ticket.granted)
        except TimeoutError:
            self._withdraw(ticket)
            raise OverloadedError(
                f"the model {name} was not free within {timeout_s:g} s", hint="try again later"
            ) from None
        except asyncio.CancelledError:
            self._withdraw(ticket)
            raise

    def release(self) -> None:
        """Say that a turn is over."""
        self._running -= 1
        self._pump()

    async def close(self) -> None:
        """Stop timers and a load under way."""
        self._stop_idle_timer()
        if self._busy is not None:
            self._busy.cancel()
            await asyncio.wait({self._busy})

    def _withdraw(self, ticket: _Ticket) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            ticket.granted.cancel()
            # those behind it may be turns of the resident model
            self._pump()
        elif ticket.granted.done() and not ticket.granted.cancelled() and not ticket.granted.exception():
            self.release()

    def _pump(self) -> None:
        """Grant what can be granted, or start what has to happen before."""
        self._stop_idle_timer()
        while self._waiting and self._busy is None:
            ticket, info = self._waiting[0], self._backend.loaded()
            if info is not None and info.path == ticket.path:
                self._waiting.popleft()
                self._running += 1
                self.name = ticket.name
                ticket.granted.set_result(info)
            elif self._running == 0:
                self._start(self._load(ticket))
            else:
                return
        idle = not self._waiting and not self._running and self._busy is None
        if idle and self._idle_s and self._backend.loaded() is not None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._idle_s, lambda: self._start(self._unload()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._busy = asyncio.create_task(work)
        self._busy.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._busy = None
        if not task.cancelled():
            self._pump()

    async def _load(self, ticket: _Ticket) -> None:
        self.loading = ticket.name
        try:
            await self._backend.load(ticket.path, ticket.params, self._note)
            if (info := self._backend.loaded()) is None or info.path != ticket.path:
                raise OverloadedError(f"the engine ended while it loaded {ticket.name}", hint="try again")
            log.logger().info(f"loaded {ticket.name} from {info.path}, context {info.max_seq} tokens")
        except Exception as error:
            known = error if isinstance(error, HipfireError) else InternalError(f"loading failed: {error!r}")
            log.logger().warning(f"{ticket.name} could not be loaded: {known.line()}")
            self._fail(ticket.path, known)
        finally:
            self.loading = self.progress = None

    async def _unload(self) -> None:
        try:
            await self._backend.unload()
            log.logger().info(f"unloaded {self.name} after {self._idle_s:g} s without a request")
        except HipfireError as error:
            log.logger().warning(f"the idle model could not be unloaded: {error.line()}")

    def _note(self, done: float, total: float, what: str) -> None:
        self.progress = (done, total, what)

    def _fail(self, path: Path, error: HipfireError) -> None:
        """Tell an error to all who wait for the same model."""
        mine = [ticket for ticket in self._waiting if ticket.path == path]
        self._waiting = deque(ticket for ticket in self._waiting if ticket.path != path)
        for ticket in mine:
            ticket.granted.set_exception(error)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
