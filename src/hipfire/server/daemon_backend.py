"""The engine in a process of its own: `Backend` over the daemon and its keeper.

This file starts no process itself and knows no wire.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.engine.keeper import DaemonKeeper
from hipfire.engine.turn import Event, TurnKey, TurnRequest
from hipfire.engine.wire_messages import LoadParams, ProcessConfig
from hipfire.server.backend import BackendState, LoadedInfo, LoadProgress


class DaemonBackend:
    """One daemon, which is started again when it dies."""

    def __init__(
        self, command: Sequence[str], *, log_path: Path | None = None, threads: int | None = None
    ) -> None:
        # as the caller spells it; the daemon may tell another path of the same file
        self._path: Path | None = None
        self._keeper = DaemonKeeper(command, log_path=log_path, config=ProcessConfig(threads=threads))

    async def start(self) -> None:
        """Start the daemon; raises TransportError if it does not come up."""
        await self._keeper.start()

    async def close(self) -> None:
        """End the daemon; it is killed if it takes too long."""
        await self._keeper.close()

    def kill(self) -> None:
        """End the daemon at once."""
        if (pid := self._keeper.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def load(
        self, path: Path, params: Mapping[str, Any], progress: LoadProgress | None = None
    ) -> LoadedInfo:
        """Have the model loaded; a refusal leaves the previous one as it was."""
        try:
            checked = LoadParams(**params)
        except TypeError as error:
            raise ValidationError(f"the engine does not know such a load parameter: {error}") from error

        def tell(record: Mapping[str, Any]) -> None:
            if progress is not None:
                progress(record["done"], record["total"], str(record["what"]))

        told = await self._keeper.load(str(path), checked, progress=tell)
        self._path = path
        return LoadedInfo(path, int(told["max_seq"]), told)

    async def unload(self) -> None:
        """Free the model's memory."""
        await self._keeper.unload()

    async def generate(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Run a turn."""
        async with contextlib.aclosing(self._keeper.generate(request)) as events:
            async for event in events:
                yield event

    async def commit(self, key: TurnKey) -> None:
        """Settle a turn whose client has everything."""
        self._keeper.commit(key)

    async def abort(self, key: TurnKey) -> None:
        """Settle a turn whose client is gone."""
        self._keeper.abort(key)

    async def cancel(self, key: TurnKey) -> None:
        """Stop a turn."""
        self._keeper.cancel(key)

    def state(self) -> BackendState:
        """Return whether the daemon runs, is being started again, or was given up."""
        return self._keeper.state

    def loaded(self) -> LoadedInfo | None:
        """Return the model that the daemon has, or gets back with the next turn if it has died."""
        told = self._keeper.loaded
        if told is None or self._path is None:
            return None
        return LoadedInfo(self._path, int(told["max_seq"]), told)

    async def diag(self) -> Mapping[str, Any]:
        """Return what the daemon says about itself."""
        return await self._keeper.request("diag")
