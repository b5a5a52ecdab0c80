"""Keeping a daemon alive: one that dies is started again, and gets its model back when a turn needs it.

One that keeps dying is given up, so that a broken machine is not busy with restarts for ever. This file knows
no HTTP and no wire.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hipfire.base import log
from hipfire.base.errors import HipfireError, TransportError
from hipfire.engine.client import Daemon, DaemonDiedError, Progress
from hipfire.engine.turn import Aborted, Event, TurnKey, TurnRequest
from hipfire.engine.wire_errors import failed
from hipfire.engine.wire_messages import LoadParams, ProcessConfig

KeeperState = Literal["ok", "restarting", "unhealthy"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to start a daemon again; times in seconds.

    The wait before a start doubles from `first_wait` with every recent death. `most_deaths` within `window`
    are the end. Who needs the daemon meanwhile waits for `patience` at most. The daemon is asked for a sign
    of life every `check_every`; one that gives none for `stall` is killed.
    """

    first_wait: float = 0.1
    longest_wait: float = 5.0
    most_deaths: int = 5
    window: float = 60.0
    patience: float = 60.0
    check_every: float = 10.0
    stall: float = 300.0


class DaemonKeeper:
    """A daemon that is started again when it dies.

    Turns and requests that were under way when it died end with a transient error; later ones wait for the
    next daemon.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        config: ProcessConfig | None = None,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = tuple(command)
        self._env = env
        self._log_path = log_path
        self._config = config or ProcessConfig()
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._daemon: Daemon | None = None
        self._state: KeeperState = "restarting"
        self._settled = asyncio.Event()
        self._deaths: deque[float] = deque()
        self._wanted: tuple[str, LoadParams] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._loading = asyncio.Lock()
        # turns that no daemon knows of yet; one that is stopped is taken out
        self._waiting: set[TurnKey] = set()
        self._restarting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def state(self) -> KeeperState:
        """Return whether the daemon runs, is being started again, or was given up."""
        return self._state

    @property
    def loaded(self) -> Mapping[str, Any] | None:
        """Return what the daemon said of its model; that of a daemon which died counts, as it comes back."""
        return self._loaded

    @property
    def pid(self) -> int | None:
        """Return the number of the daemon's process, None while there is none."""
        return self._daemon.pid if self._daemon is not None and self._daemon.alive else None

    async def start(self) -> None:
        """Start the first daemon; raises TransportError if that fails."""
        await self._launch()

    async def load(
        self, model: str, params: LoadParams, *, force: bool = False, progress: Progress | None = None
    ) -> Mapping[str, Any]:
        """Load a model and return the daemon's `loaded`; it is what a later daemon gets back."""
        async with self._loading:
            return await self._load(await self._ready(), model, params, force, progress)

    async def unload(self, *, force: bool = False) -> None:
        """Free the model; no later daemon gets it back."""
        async with self._loading:
            daemon = await self._ready()
            await daemon.request("unload", force=force)
            self._wanted = self._loaded = None

    async def request(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Send any other message and return its reply."""
        daemon = await self._ready()
        return await daemon.request(kind, **fields)

    async def generate(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Run a turn, after the model was loaded again if its daemon had died; see Daemon.generate."""
        key = request.key
        self._waiting.add(key)
        try:
            daemon = await self._with_model()
        except HipfireError as error:
            yield failed(key, error)
            return
        finally:
            stopped = key not in self._waiting
            self._waiting.discard(key)
        if stopped:
            yield Aborted(key, "cancelled")
            return
        async with aclosing(daemon.generate(request)) as events:
            async for event in events:
                yield event

    def commit(self, key: TurnKey) -> None:
        """Say that a Ready turn's client has everything."""
        if self._daemon is not None:
            self._daemon.commit(key)

    def abort(self, key: TurnKey) -> None:
        """Say that a turn's client is gone."""
        self._waiting.discard(key)
        if self._daemon is not None:
            self._daemon.abort(key)

    def cancel(self, key: TurnKey) -> None:
        """Stop a turn that waits, be it for the next daemon, or runs."""
        self._waiting.discard(key)
        if self._daemon is not None:
            self._daemon.cancel(key)

    async def close(self) -> None:
        """End the daemon and start no other."""
        self._closed = True
        for task in (self._restarting, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._daemon is not None:
            await self._daemon.close()
        self._state = "unhealthy"
        self._settled.set()

    async def _ready(self) -> Daemon:
        """Return a daemon that runs; waits for one that is being started."""
        try:
            async with asyncio.timeout(self._policy.patience):
                await self._settled.wait()
                # a daemon that was up may have died before this task was woken
                while self._state == "restarting":
                    await self._settled.wait()
        except TimeoutError as error:
            raise DaemonDiedError("the engine is being restarted", hint="ask again") from error
        if self._state != "ok" or self._daemon is None:
            raise TransportError("the engine does not run", hint="restart the server; its log says why")
        return self._daemon

    async def _with_model(self) -> Daemon:
        daemon = await self._ready()
        if daemon.model_loaded or self._wanted is None:
            return daemon
        async with self._loading:
            daemon = await self._ready()
            if not daemon.model_loaded and self._wanted is not None:
                await self._load(daemon, *self._wanted, force=False, progress=None)
            return daemon

    async def _load(
        self, daemon: Daemon, model: str, params: LoadParams, force: bool, progress: Progress | None
    ) -> Mapping[str, Any]:
        try:
            reply = await daemon.request(
                "load", model=model, params=asdict(params), force=force, progress=progress
            )
        except HipfireError:
            # a refusal leaves the former model; a failure after that was dropped leaves none to come back
            if daemon.alive and not daemon.model_loaded:
                self._wanted = self._loaded = None
            raise
        self._wanted, self._loaded = (model, params), reply
        return reply

    async def _launch(self) -> None:
        daemon = await Daemon.start(self._command, self._env, self._log_path)
        self._daemon = daemon
        try:
            await daemon.request("configure", config=asdict(self._config))
        except HipfireError:
            # the next one could not have the lock while this one lives
            await daemon.close()
            raise
        self._state = "ok"
        self._settled.set()
        daemon.when_dead(self._mourn)
        self._watching = asyncio.create_task(self._watch(daemon))

    async def _watch(self, daemon: Daemon) -> None:
        """Kill a daemon whose loop hangs: its turns would wait for ever, and so would their clients."""
        while daemon.alive:
            await asyncio.sleep(self._policy.check_every)
            if daemon.busy:
                continue
            try:
                await asyncio.wait_for(daemon.request("ping"), self._policy.stall)
            except TimeoutError:
                log.logger().error(f"the engine gives no sign of life for {self._policy.stall:g} s: killed")
                daemon.kill()
                return
            except HipfireError:
                return

    def _mourn(self) -> None:
        if not self._closed:
            self._state = "restarting"
            self._settled.clear()
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        """Start a daemon, again and again, until one runs or too many have died."""
        while not self._given_up():
            recent = len(self._deaths)
            await asyncio.sleep(min(self._policy.first_wait * 2 ** (recent - 1), self._policy.longest_wait))
            try:
                await self._launch()
                return
            except HipfireError as error:
                log.logger().error(str(error))
        log.logger().error("the engine keeps dying and is given up")
        self._state = "unhealthy"
        self._settled.set()

    def _given_up(self) -> bool:
        """Count a death; tell whether there were too many of late."""
        now = self._clock()
        self._deaths.append(now)
        while now - self._deaths[0] > self._policy.window:
            self._deaths.popleft()
        return len(self._deaths) >= self._policy.most_deaths
