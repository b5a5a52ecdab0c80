"""Running one turn for a client, whatever API it speaks: find the model, have it loaded, follow the turn.

This file knows no API's fields and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hipfire.base import env, log
from hipfire.base.errors import HipfireError
from hipfire.checkpoint.library import Library, LocalModel
from hipfire.engine.turn import TurnKey, TurnRequest
from hipfire.server import prepare
from hipfire.server.backend import Backend
from hipfire.server.catalog import Catalog, ModelEntry
from hipfire.server.errors import RETRY_AFTER, OverloadedError
from hipfire.server.metrics import Metrics
from hipfire.server.options import ServeOptions
from hipfire.server.reply import Reply, TurnTrace
from hipfire.server.residency import Residency

__all__ = ["ModelEntry", "Reply", "Service"]

# seconds without an event of any running turn after which GET /health says that the engine is stuck; a
# long prompt takes minutes on a slow machine
STALLED_SECONDS = 600.0


class Service:
    """Everything that API adapters share. Use it from one event loop only.

    `token` is shown at GET /health, where it proves that a record on disk is this server's.
    """

    def __init__(
        self,
        options: ServeOptions,
        backend: Backend,
        library: Library,
        *,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.backend = backend
        self.metrics = Metrics()
        self.token = token or secrets.token_hex(32)
        self.closing = False
        self._catalog = Catalog(library, own=options.model, paths=options.allow_request_paths)
        self._residency = Residency(backend, idle_s=options.idle_timeout_s)
        self._clock = clock
        self._began = clock()
        self._numbers = itertools.count(1)
        self._open: set[Reply] = set()
        self._asked = 0
        self._warming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, and load the owner's model in the background.

        Raises what the engine's start raises, and ValidationError if the owner's model is not there.
        """
        own = self._catalog.own()
        await self.backend.start()
        if own is not None and self.options.prewarm:
            self._warming = asyncio.create_task(self._prewarm(own))

    async def close(self) -> None:
        """Stop all turns and the engine."""
        self.closing = True
        if self._warming is not None:
            self._warming.cancel()
        for reply in list(self._open):
            reply.leave()
        await self._residency.close()
        await self.backend.close()

    async def open(self, model: str, request: TurnRequest, *, warnings: Sequence[str] = ()) -> Reply:
        """Start a turn and return once its prompt is about to be read; use the reply with `async with`.

        `warnings` are told with the turn's own. Raises HipfireErrors only: NotFoundError for a model that is
        not here, OverloadedError where the queue is full or the wait has expired, and whatever the engine
        refuses the turn with.
        """
        self.metrics.asked()
        try:
            local = self._catalog.resolve(model)
            ready = prepare.turn(request, self.options, self.options.settings_of(local))
            self._admit()
        except HipfireError:
            self.metrics.failed()
            raise
        self._asked += 1
        try:
            await self._residency.acquire(
                local.name, local.path, self._load_params(local), timeout_s=self.options.queue_timeout_s
            )
        except BaseException as error:
            self._asked -= 1
            if isinstance(error, HipfireError):
                self.metrics.failed()
            else:
                self.metrics.abandoned()
            raise
        reply = Reply(model, ready, self.backend, ended=self._ended, clock=self._clock, notes=warnings)
        self._open.add(reply)
        await reply.begin()
        return reply

    def resolve(self, model: str) -> LocalModel:
        """Return the model that a request's name means; NotFoundError if it is not here."""
        return self._catalog.resolve(model)

    def next_key(self, prefix: str) -> TurnKey:
        """Return the key of a new turn, with an id such as `chatcmpl-1234-7`."""
        return TurnKey(f"{prefix}-{os.getpid()}-{next(self._numbers)}", 1)

    def models(self) -> list[ModelEntry]:
        """Return the models on this disk."""
        return self._catalog.entries()

    @property
    def loading(self) -> str | None:
        """Return the name of the model that is being loaded, None if there is none."""
        return self._residency.loading

    @property
    def resident(self) -> str | None:
        """Return the name of the model in memory, None if there is none."""
        return self._residency.resident()

    def stats(self) -> dict[str, Any]:
        """Return the figures of GET /stats."""
        return {
            "model": self.resident,
            "uptime_sec": self._uptime(),
            "queue_depth": self._waiting(),
            "running": self._asked - self._waiting(),
            "requests_served": self.metrics.served,
            "retries_attempted": 0,
            "retries_succeeded": 0,
            "recent_tok_s": self.metrics.recent_speed(),
            "engine": self._engine(),
        }

    def gauges(self) -> dict[str, float]:
        """Return the current values of GET /metrics."""
        return {
            "hipfire_queue_depth": self._waiting(),
            "hipfire_queue_capacity": self.options.max_queue,
            "hipfire_turns_running": self._asked - self._waiting(),
            "hipfire_uptime_seconds": self._uptime(),
            "hipfire_model_loaded": int(self.resident is not None),
        }

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of GET /health.

        The status tells that the server lives; `ready` that a request would be worked on now.
        """
        state = self.backend.state()
        if state == "ok" and self.closing:
            state = "restarting"
        stalled = self._stalled()
        body = {
            "status": state,
            "model": self.resident,
            "loading_model": self.loading,
            "loading_progress": self._residency.progress,
            "ready": state == "ok" and self.loading is None and not stalled,
            "stalled": stalled,
            "pid": os.getpid(),
            "token": self.token,
            "native": True,
        }
        return (200 if state == "ok" else 503), body

    def _admit(self) -> None:
        """Raise OverloadedError if the turn has no place."""
        if self.closing:
            raise OverloadedError("the server is stopping", hint="try again when it is back")
        if self.backend.state() == "unhealthy":
            raise OverloadedError("the engine does not stay up", hint="see the server's log")
        limit = self.options.max_queue
        if limit and self._asked >= limit + self.options.slots:
            self.metrics.rejected()
            raise OverloadedError(
                f"the queue is full ({limit} requests wait)", hint=f"try again in {RETRY_AFTER} s or later"
            )

    def _ended(self, reply: Reply, trace: TurnTrace) -> None:
        self._asked -= 1
        self._open.discard(reply)
        self.metrics.ended(trace)
        _log_turn(reply, trace, self._clock() - trace.opened)
        self._residency.release()

    async def _prewarm(self, model: LocalModel) -> None:
        try:
            await self._residency.acquire(model.name, model.path, self._load_params(model), timeout_s=0)
            self._residency.release()
        except HipfireError as error:
            log.logger().warning(f"{model.name} is not loaded ahead: {error.line()}")

    def _load_params(self, model: LocalModel) -> Mapping[str, Any]:
        """Return what the engine's `load` is told, as the daemon's protocol names it."""
        options = self.options
        params = {
            "max_seq": options.max_seq,
            "kv_mode": options.kv_cache,
            "weights": options.weights,
            "threads": options.threads,
            "device": options.device,
            "kv_backend": options.kv_backend,
            "activations": options.activations,
            "tp": options.tp,
            "slots": options.slots,
            "prefill_chunk": options.prefill_chunk,
            "state_budget": options.state_budget,
            "state_interval": options.state_interval,
            "max_queue": options.max_queue,
            "queue_timeout_s": options.queue_timeout_s,
            "template_dir": str(env.templates_dir()),
            "sampling": options.default_sampling,
            "max_tokens": options.default_max_tokens,
        }
        return {**params, **options.settings_of(model).load}

    def _engine(self) -> dict[str, Any] | None:
        """Return what the engine says of its model, but not where the file lies."""
        info = self.backend.loaded()
        if info is None:
            return None
        return {"max_seq": info.max_seq} | {
            key: value for key, value in info.details.items() if key != "model"
        }

    def _waiting(self) -> int:
        # the engine runs as many turns as it has slots; the others wait there or for their model, for which
        # the load ahead of all requests waits as well
        waiting = self._residency.waiting + max(0, len(self._open) - self.options.slots)
        return min(self._asked, waiting)

    def _uptime(self) -> float:
        return self._clock() - self._began

    def _stalled(self) -> bool:
        heard = [reply.heard for reply in self._open if not reply.settling]
        return bool(heard) and self._clock() - max(heard) > STALLED_SECONDS


def _log_turn(reply: Reply, trace: TurnTrace, seconds: float) -> None:
    """Log one line for a turn that is over."""
    end = "committed" if trace.committed else "dropped"
    if trace.error is not None:
        end = f"failed ({trace.error.line()})"
    told = ""
    if (result := trace.result) is not None:
        counts = result.usage
        told = (
            f", {counts.prompt} prompt tokens ({counts.cached} cached), {counts.completion} new,"
            f" finish {result.finish}"
        )
    log.logger().info(f"turn {reply.key.id} of {reply.model}: {end} after {seconds:.2f} s{told}")
