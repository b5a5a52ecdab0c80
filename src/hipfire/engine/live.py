"""A turn between its arrival and its terminal: its reply, its client, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hipfire.base.errors import HipfireError
from hipfire.engine.scheduler import BusyError
from hipfire.engine.sequence import RunningReply
from hipfire.engine.turn import Event, Failed, TurnKey, TurnResult, TurnTimings, TurnUsage

Sink = Callable[[Event], None]


@dataclass(slots=True)
class LiveTurn:
    """One turn of the core; times are seconds by the core's clock.

    `position` is how many tokens of the prompt have rows, `cached` how many had them before. `began` is when
    the first chunk ran, `reading` the time in this turn's own chunks. `broken`: its sink has failed.
    """

    key: TurnKey
    sink: Sink
    reply: RunningReply
    arrived: float
    began: float | None = None
    cached: int = 0
    position: int = 0
    reading: float = 0.0
    first: float | None = None
    last: float = 0.0
    batch: int = 1
    result: TurnResult | None = None
    broken: bool = False

    def note_token(self, now: float) -> None:
        """Note that a token came."""
        self.first = now if self.first is None else self.first
        self.last = now

    def make_result(self, now: float) -> TurnResult:
        """Return how the turn ended, at the time `now`."""
        reply = self.reply
        prompt = len(reply.prepared.prompt)
        began = self.arrived if self.began is None else self.began
        first = now if self.first is None else self.first
        timings = TurnTimings(
            queue_ms=1000 * (began - self.arrived),
            prefill_ms=1000 * self.reading,
            ttft_ms=1000 * (first - self.arrived),
            latency_ms=1000 * (now - self.arrived),
            prefill_tok_s=_rate(prompt - self.cached, self.reading),
            decode_tok_s=_rate(reply.generated - 1, self.last - first),
        )
        return TurnResult(
            finish=reply.finish or "stop",
            usage=TurnUsage(prompt, self.cached, reply.generated, reply.reasoning),
            timings=timings,
            seed=reply.seed,
            stop=reply.stop,
            calls=reply.calls,
            warnings=tuple(reply.warnings),
            batch=self.batch,
        )


def failure(key: TurnKey, error: Exception) -> Failed:
    """Return the terminal for an error; what is no HipfireError is internal."""
    if isinstance(error, HipfireError):
        return Failed(key, error.kind, error.message, error.hint, retryable=isinstance(error, BusyError))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failed(key, "internal", f"the turn failed: {text}", "see the log of the engine")


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
