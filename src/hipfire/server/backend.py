"""The engine as the server sees it: load a model, run turns, settle them.

`Backend` is the interface; `DaemonBackend` (daemon_backend.py) is the one that users run, and tests script
one of their own. This file knows no HTTP and no transport.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hipfire.engine.turn import Event, TurnKey, TurnRequest

BackendState = Literal["ok", "restarting", "unhealthy"]
LoadProgress = Callable[[float, float, str], None]


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """The resident model: its file, the tokens its context holds, and what else the engine says of it."""

    path: Path
    max_seq: int
    details: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """One engine. Methods raise HipfireErrors only."""

    async def start(self) -> None:
        """Make the engine ready to load models."""

    async def close(self) -> None:
        """End the engine and everything that runs on it."""

    def kill(self) -> None:
        """End the engine at once; `close` still has to be called."""

    async def load(
        self, path: Path, params: Mapping[str, Any], progress: LoadProgress | None = None
    ) -> LoadedInfo:
        """Make this model the resident one; a refusal leaves the previous one as it was.

        `progress` is told (done, total, what) while it loads.
        """

    async def unload(self) -> None:
        """Free the resident model's memory; does nothing if there is none."""

    def generate(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Run a turn: Started, then Delta and Info, then Ready, then after `commit` Done.

        Ends after exactly one of Done, Aborted and Failed. A refused turn is a Failed without a Started, or
        raises.
        """

    async def commit(self, key: TurnKey) -> None:
        """Say that a Ready turn's client has everything; the turn's tokens stay cached."""

    async def abort(self, key: TurnKey) -> None:
        """Say that a turn's client is gone; nothing of the turn stays cached."""

    async def cancel(self, key: TurnKey) -> None:
        """Stop a turn that waits or runs."""

    def state(self) -> BackendState:
        """Return whether the engine can work."""

    def loaded(self) -> LoadedInfo | None:
        """Return the resident model."""

    async def diag(self) -> Mapping[str, Any]:
        """Return what the engine says about itself."""
