"""The engine's core: turns in, events out, one step at a time over one loaded model.

It joins the scheduler (what runs next), the slots (what the cache holds), the runner (the model) and the
replies (text). It does not know processes, wires or clients: whoever owns it calls `step` until it says that
there is nothing to do, and passes on what the sinks receive. One thread calls everything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from hipfire.base.errors import HipfireError, InternalError
from hipfire.base.log import logger
from hipfire.engine.limits import CoreLimits
from hipfire.engine.live import LiveTurn, Sink, failure
from hipfire.engine.prompting import Prompting
from hipfire.engine.scheduler import BusyError, Phase, Scheduler
from hipfire.engine.sequence import RunningReply
from hipfire.engine.slots import SlotTable
from hipfire.engine.stepping import Part, run_together
from hipfire.engine.turn import Aborted, Done, Event, Failed, Ready, Started, TurnKey, TurnRequest
from hipfire.runtime.load import LoadedModel

__all__ = ["CoreLimits", "EngineCore"]

# a prompt waits for another one that is about to compute at least this many tokens which both begin with
WORTH_WAITING: Final = 16
_TOTALS: Final = ("submitted", "done", "aborted", "failed")
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "decode_steps")


class EngineCore:
    """Runs the turns of one loaded model.

    Every turn that `submit` took gets exactly one terminal event (Done, Aborted or Failed); Ready, which
    waits for `commit` or `abort`, is none. Keys of turns that have ended, or never were, are ignored.
    """

    def __init__(
        self, loaded: LoadedModel, limits: CoreLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loaded = loaded
        self._runner = loaded.runner
        self._clock = clock
        self._prompting = Prompting(loaded, limits.default_sampling, limits.default_max_tokens)
        for warning in self._prompting.warnings:
            logger().warning("%s", warning)
        # what the memory of the load was counted for is the most that a step may take
        self._chunk = min(limits.prefill_chunk or loaded.runner.chunk, loaded.runner.chunk)
        self._scheduler = Scheduler(
            loaded.runner.cache.slots,
            chunk=self._chunk,
            max_queue=limits.max_queue,
            queue_timeout_s=limits.queue_timeout_s,
            commit_timeout_s=limits.commit_timeout_s,
            clock=clock,
        )
        self._slots = SlotTable(loaded.runner, limits.state_budget, limits.state_interval)
        self._live: dict[TurnKey, LiveTurn] = {}
        self._counts: Counter[str] = Counter()

    def submit(self, request: TurnRequest, sink: Sink) -> None:
        """Take a turn; `sink` is called with its events during later calls, and only notes them.

        Raises ValidationError, ContextLengthError, UnsupportedError or QueueFullError (kind "transient")
        before any state changes.
        """
        self._scheduler.check(request.key)
        arrived = self._clock()
        reply = RunningReply(request.key, self._prompting.prepare(request), self._loaded)
        self._scheduler.enqueue(request.key, request.deadline)
        self._live[request.key] = LiveTurn(request.key, sink, reply, arrived)
        self._counts["submitted"] += 1

    def cancel(self, key: TurnKey) -> None:
        """End a turn wherever it is; nothing of it stays cached."""
        self._abort(key, "cancelled")

    def abort(self, key: TurnKey) -> None:
        """Give up a turn whose client is gone; nothing of it stays cached."""
        self._abort(key, "aborted by its client")

    def abort_all(self, reason: str) -> None:
        """End every turn with this reason."""
        for key in list(self._live):
            self._abort(key, reason)

    def commit(self, key: TurnKey) -> None:
        """Confirm that the client has all of a ready turn: Done follows, and its rows stay for reuse."""
        turn = self._live.get(key)
        if turn is not None and turn.result is not None and self._scheduler.phase(key) is Phase.READY:
            self._finish(turn, Done(key, turn.result), keep=True)

    def step(self) -> bool:
        """Run one step: what has expired, a decode step of all that decode, then one chunk of a prompt.

        Returns False when there was nothing to do.
        """
        expired = self._expire()
        started = self._start_waiting()
        decoded = self._decode()
        read = self._read()
        return expired or started or decoded or read

    def wait_s(self) -> float | None:
        """Return in how many seconds `step` has to be called if nothing else happens; None for never.

        It is 0 while turns can run, and above 0 while all that is left may only expire.
        """
        counts = self._scheduler.counts()
        if counts["prefill"] or counts["decode"] or self._scheduler.startable() is not None:
            return 0.0
        if any(turn.broken for turn in self._live.values()):
            return 0.0
        expiry = self._scheduler.next_expiry()
        return None if expiry is None else max(0.0, expiry - self._clock())

    @property
    def live(self) -> int:
        """Return how many turns have no terminal yet."""
        return len(self._live)

    def reset(self) -> None:
        """Drop all cached prefixes. Raises BusyError (kind "transient") while turns run."""
        if self._live:
            raise BusyError(f"{len(self._live)} turns are running", hint="wait for them, or abort them first")
        self._slots.clear()

    def stats(self) -> dict[str, Any]:
        """Return numbers for people and monitors: turns by phase, slots, cached rows, totals so far."""
        return {
            "slots": self._runner.cache.slots,
            "slots_busy": len(self._slots.busy),
            "cached_rows": self._slots.cached_tokens,
            "checkpoints": self._slots.checkpoints,
            "turns": self._scheduler.counts(),
            "totals": {name: self._counts[name] for name in _TOTALS + _TOKENS},
        }

    def integrity_check(self) -> None:
        """Raise InternalError if a slot has leaked or the bookkeeping of turns and cache rows disagrees."""
        held = {self._scheduler.slot(key) for key in self._live} - {None}
        if held != self._slots.busy or sum(self._scheduler.counts().values()) != len(self._live):
            raise InternalError(f"turns hold slots {held}, but {set(self._slots.busy)} are marked as busy")
        self._slots.check()

    def _expire(self) -> bool:
        expired = self._scheduler.expired()
        for key, phase, deadline in expired:
            turn = self._live[key]
            if deadline:
                self._finish(turn, Aborted(key, "its deadline has passed"))
            elif phase is Phase.READY:
                self._finish(turn, Aborted(key, "not committed in time"))
            else:
                error = BusyError("the request waited too long for its turn", hint="try again in a moment")
                self._finish(turn, failure(key, error))
        broken = [turn for turn in self._live.values() if turn.broken]
        for turn in broken:
            self._finish(turn, Aborted(turn.key, "its events could not be delivered"))
        return bool(expired or broken)

    def _start_waiting(self) -> bool:
        started = False
        while (key := self._scheduler.startable()) is not None:
            prompt = self._live[key].reply.history
            claim = self._slots.claim(prompt)
            self._scheduler.start(key, claim.slot, len(prompt) - claim.start)
            started = True
        return started

    def _decode(self) -> bool:
        turns = [self._live[key] for key in self._scheduler.decoding()]
        if not turns:
            return False
        parts = [Part(self._slot(t), len(t.reply.history) - 1, t.reply.history[-1:]) for t in turns]
        for turn, outcome in zip(turns, run_together(self._runner, parts), strict=True):
            if isinstance(outcome, Exception):
                self._fail(turn, outcome)
                continue
            turn.batch = max(turn.batch, len(turns))
            self._slots.computed(self._slot(turn), len(turn.reply.history))
            self._draw(turn, outcome)
        self._counts["decode_steps"] += 1
        return True

    def _read(self) -> bool:
        """Compute the next chunk of a prompt, together with others that are short enough to be completed."""
        keys = self._scheduler.next_readers()
        parts: dict[TurnKey, Part] = {}
        room = self._chunk
        for key in keys:
            turn = self._live[key]
            prompt, slot = turn.reply.history, self._slot(turn)
            if turn.began is None and (self._better_wait(turn, parts) or not self._begin(turn)):
                continue
            count = self._slots.room(slot, self._scheduler.chunk_of(key))
            if count > room:
                # more than was expected has to be computed, since other rows were overwritten
                continue
            room -= count
            parts[key] = Part(slot, turn.position, prompt[turn.position : turn.position + count])
        began = self._clock()
        outcomes = run_together(self._runner, list(parts.values())) if parts else []
        taken = self._clock() - began
        for (key, part), outcome in zip(parts.items(), outcomes, strict=True):
            turn = self._live[key]
            if isinstance(outcome, Exception):
                self._fail(turn, outcome)
                continue
            turn.reading += taken
            turn.position += len(part.tokens)
            self._slots.computed(part.slot, turn.position)
            if self._scheduler.advance(key, len(part.tokens)):
                self._draw(turn, outcome)
        return bool(keys)

    def _better_wait(self, turn: LiveTurn, parts: Mapping[TurnKey, Part]) -> bool:
        """Say whether others compute much of the prompt anyway, for this turn to copy from."""
        prompt = turn.reply.history
        shared = self._slots.promised(prompt, [part.slot for part in parts.values()])
        return shared >= WORTH_WAITING + self._slots.reusable(self._slot(turn), prompt)

    def _begin(self, turn: LiveTurn) -> bool:
        """Bring the rows in place that are there already; False if that failed, which ends the turn."""
        prompt = turn.reply.history
        turn.began = self._clock()
        try:
            slot, borders = self._slot(turn), turn.reply.prepared.borders
            turn.cached = turn.position = self._slots.begin(slot, prompt, borders)
        except Exception as error:
            self._fail(turn, error)
            return False
        self._scheduler.shorten(turn.key, len(prompt) - turn.cached)
        self._counts["prompt_tokens"] += len(prompt)
        self._counts["cached_tokens"] += turn.cached
        self._emit(turn, Started(turn.key, turn.reply.prepared.in_thinking, len(prompt), turn.cached))
        return True

    def _draw(self, turn: LiveTurn, logits: torch.Tensor) -> None:
        try:
            deltas = turn.reply.draw(logits)
        except Exception as error:
            self._fail(turn, error)
            return
        turn.note_token(self._clock())
        for delta in deltas:
            self._emit(turn, delta)
        if turn.reply.finish is not None:
            turn.result = turn.make_result(self._clock())
            self._counts["completion_tokens"] += turn.reply.generated
            self._scheduler.ready(turn.key)
            self._emit(turn, Ready(turn.key, turn.result))

    def _abort(self, key: TurnKey, reason: str) -> None:
        turn = self._live.get(key)
        if turn is not None:
            self._finish(turn, Aborted(key, reason))

    def _fail(self, turn: LiveTurn, error: Exception) -> None:
        if not isinstance(error, HipfireError):
            logger().error("turn %s failed", turn.key.id, exc_info=error)
        self._finish(turn, failure(turn.key, error), certain=False)

    def _finish(
        self, turn: LiveTurn, event: Done | Aborted | Failed, *, keep: bool = False, certain: bool = True
    ) -> None:
        """End a turn; its slot keeps its rows, or those it had before, or after an error none."""
        slot = self._scheduler.slot(turn.key)
        self._scheduler.release(turn.key)
        del self._live[turn.key]
        if slot is not None and certain:
            self._slots.release(slot, keep=keep)
        elif slot is not None:
            self._slots.drop(slot)
        self._counts[type(event).__name__.lower()] += 1
        self._emit(turn, event)

    def _emit(self, turn: LiveTurn, event: Event) -> None:
        if turn.broken:
            return
        try:
            turn.sink(event)
        except Exception as error:
            # told nobody, and ended by the next step
            logger().error("events of turn %s cannot be delivered: %s", turn.key.id, error)
            turn.broken = True

    def _slot(self, turn: LiveTurn) -> int:
        slot = self._scheduler.slot(turn.key)
        if slot is None:
            raise InternalError(f"turn {turn.key.id!r} runs without a slot")
        return slot
