"""What the daemon is put together from: the core that runs turns, a resident model, the source of models.

Tests script these. This file has no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hipfire.engine.turn import Event, TurnKey, TurnRequest
from hipfire.engine.wire_messages import Load, ProcessConfig

Progress = Callable[[int, int, str], None]


class Core(Protocol):
    """The engine's core, as far as the daemon drives it; `core.EngineCore` is the one that users run."""

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> None:
        """Take a turn, or refuse it with a HipfireError before any state changes."""

    def cancel(self, key: TurnKey) -> None:
        """End a turn wherever it is; unknown keys are ignored."""

    def commit(self, key: TurnKey) -> None:
        """Confirm that a ready turn's client has everything."""

    def abort(self, key: TurnKey) -> None:
        """Give up a turn whose client is gone."""

    def abort_all(self, reason: str) -> None:
        """End every turn."""

    def step(self) -> bool:
        """Run one scheduling step; False when there was nothing to do."""

    def wait_s(self) -> float | None:
        """Return in how many seconds `step` must be called although nothing arrives; None: never."""

    def reset(self) -> None:
        """Drop all cached prefixes."""

    def stats(self) -> dict[str, Any]:
        """Return counts."""

    def integrity_check(self) -> None:
        """Raise InternalError if the idle core's books do not agree."""


class Resident(Protocol):
    """A loaded model with its core."""

    @property
    def core(self) -> Core:
        """Return what runs its turns."""

    def describe(self) -> Mapping[str, Any]:
        """Return the fields of `loaded`."""

    def close(self) -> None:
        """Give its memory back; it is not used any more, and no turn runs."""

    def bench_prefill(self, tokens: int) -> Mapping[str, Any]:
        """Return the fields of `prefill_result`; no turn runs."""

    def bench_decode(self, context: int, iterations: int) -> Mapping[str, Any]:
        """Return the fields of `decode_result`; no turn runs."""

    def redline_capture(self, context: int, batch: int) -> Mapping[str, Any]:
        """Return the fields of `redline_capture_result`; no turn runs."""

    def redline_shadow(self, context: int, positions: int, batch: int) -> Mapping[str, Any]:
        """Return the fields of `redline_shadow_result`; no turn runs."""


class Loader(Protocol):
    """Where resident models come from."""

    def configure(self, config: ProcessConfig) -> None:
        """Take what holds for the process."""

    def admit(self, message: Load, resident: Resident | None) -> None:
        """Refuse (HipfireError) a load that cannot succeed once `resident` is gone; changes nothing."""

    def load(self, message: Load, progress: Progress) -> Resident:
        """Load a model; raises HipfireError and leaves nothing behind if that fails."""

    def reclaim(self) -> None:
        """Give memory of what was dropped back to the system."""

    def diag(self) -> Mapping[str, Any]:
        """Return what is known about the machine and this process."""
