"""A core whose turns do what their prompts say, and a daemon that runs it: `python scripted_core.py`.

A prompt is a list of words that are carried out one at each step: `wait` does nothing, `think:TEXT` and
`say:TEXT` send a piece, `info:TEXT` a note, `boom` raises in the step, `fail` and `misname` fail the turn,
the latter with half a surrogate pair, `nan` sends what JSON does not have, `sleep:SECONDS` blocks. At the end
the turn waits for its commit. A model's path says how loading goes: `refused` and `misnamed` are not
admitted, `broken` fails when it is read, `slow` takes until the daemon ends, `deadly` ends it, `leaky` has a
core whose books do not agree.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hipfire.base.errors import (
    ArtifactError,
    ContextLengthError,
    InternalError,
    MemoryLimitError,
    ValidationError,
)
from hipfire.engine import daemon
from hipfire.engine.daemon_parts import Progress, Resident
from hipfire.engine.scheduler import QueueFullError
from hipfire.engine.turn import (
    Aborted,
    Delta,
    Done,
    Event,
    Failed,
    Info,
    Ready,
    Started,
    TextLogprob,
    TurnKey,
    TurnRequest,
    TurnResult,
    TurnTimings,
    TurnUsage,
)
from hipfire.engine.wire_messages import Load, ProcessConfig

Sink = Callable[[Event], None]
MOST_TURNS = 8


def result(completion: int, **fields: Any) -> TurnResult:
    return TurnResult(
        "stop", TurnUsage(7, 3, completion, 1), TurnTimings(0.5, 1.0, 2.0, 3.0, 70.0, 9.0), seed=5, **fields
    )


class Turn:
    def __init__(self, request: TurnRequest, sink: Sink) -> None:
        self.key, self.sink = request.key, sink
        self.words = (request.prompt or "say:hello").split()
        self.sent = 0
        self.started = self.ready = False

    def run_one(self) -> bool:
        """Carry the next word out; False once the turn is over."""
        if not self.started:
            self.started = True
            self.sink(Started(self.key, False, 7, 3))
            return True
        if not self.words:
            self.ready = True
            self.sink(Ready(self.key, result(self.sent)))
            return True
        word, _, text = self.words.pop(0).partition(":")
        self.sent += word in ("say", "think")
        if word == "say":
            self.sink(Delta(self.key, "answer", text))
        elif word == "think":
            self.sink(Delta(self.key, "reasoning", text))
        elif word == "info":
            self.sink(Info(self.key, text))
        elif word == "nan":
            self.sink(Delta(self.key, "answer", "x", (TextLogprob("x", (120,), float("nan")),)))
        elif word == "sleep":
            time.sleep(float(text))
        elif word == "boom":
            raise RuntimeError("the scripted core broke")
        elif word == "misname":
            self.sink(Failed(self.key, "internal", "the tensor 'a\udc80' is lost"))
            return False
        elif word == "fail":
            self.sink(Failed(self.key, "internal", "as scripted"))
            return False
        return True


class ScriptedCore:
    def __init__(self) -> None:
        self.turns: dict[TurnKey, Turn] = {}
        self.calls: list[str] = []
        self.integrity: Exception | None = None

    def submit(self, request: TurnRequest, sink: Sink) -> None:
        if len(self.turns) >= MOST_TURNS:
            raise QueueFullError("8 turns run", hint="try again")
        if request.prompt == "too-long":
            raise ContextLengthError(9000, 4096, hint="shorten it")
        self.turns[request.key] = Turn(request, sink)

    def step(self) -> bool:
        running = [turn for turn in self.turns.values() if not turn.ready]
        for turn in running:
            try:
                if not turn.run_one():
                    del self.turns[turn.key]
            except ValidationError:
                # an event could not be delivered; nobody can be told
                del self.turns[turn.key]
        return bool(running)

    def _end(self, key: TurnKey, event: Event) -> None:
        turn = self.turns.pop(key, None)
        if turn is not None:
            turn.sink(event)

    def cancel(self, key: TurnKey) -> None:
        self._end(key, Aborted(key, "cancelled"))

    def abort(self, key: TurnKey) -> None:
        self._end(key, Aborted(key, "aborted"))

    def commit(self, key: TurnKey) -> None:
        if key in self.turns and self.turns[key].ready:
            self._end(key, Done(key, result(self.turns[key].sent)))

    def abort_all(self, reason: str) -> None:
        for key in tuple(self.turns):
            self._end(key, Aborted(key, reason))

    def wait_s(self) -> float | None:
        return None

    def reset(self) -> None:
        self.calls.append("reset")

    def stats(self) -> dict[str, Any]:
        return {"turns": len(self.turns), "calls": self.calls}

    def integrity_check(self) -> None:
        self.calls.append("check")
        if self.integrity is not None:
            raise self.integrity


class ScriptedResident:
    def __init__(self, message: Load) -> None:
        self.message = message
        self.core = ScriptedCore()
        if "leaky" in message.model:
            self.core.integrity = InternalError("slot 2 is nobody's")

    def describe(self) -> Mapping[str, Any]:
        params = self.message.params
        return {"model": self.message.model, "arch": "scripted", "max_seq": params.max_seq or 4096}

    def close(self) -> None:
        self.core.calls.append("close")

    def bench_prefill(self, tokens: int) -> Mapping[str, Any]:
        return {"tokens": tokens, "ms": 2.0, "tok_s": tokens / 0.002}

    def bench_decode(self, context: int, iterations: int) -> Mapping[str, Any]:
        return {"context_tokens": context, "iterations": iterations, "tok_s": 50.0}

    def redline_capture(self, context: int, batch: int) -> Mapping[str, Any]:
        return {"context": context, "launches": 10 * batch, "kernels": 3, "sequence_hash": "00000000000000ab"}

    def redline_shadow(self, context: int, positions: int, batch: int) -> Mapping[str, Any]:
        return {"plan": {"context": context, "positions": positions, "batch": batch}, "exact": False}


class ScriptedLoader:
    def __init__(self) -> None:
        self.config = ProcessConfig()
        self.reclaimed = 0

    def configure(self, config: ProcessConfig) -> None:
        self.config = config

    def admit(self, message: Load, resident: Resident | None) -> None:
        if "refused" in message.model:
            raise MemoryLimitError(2**31, 2**30, what="this model", hint="use a smaller one")
        if "misnamed" in message.model:
            raise ArtifactError("the tensor 'a\udc80' is damaged")

    def load(self, message: Load, progress: Progress) -> ScriptedResident:
        # libraries print; this must reach the log and not the protocol
        print("a library prints this")
        progress(0, 2, "reading weights")
        while "slow" in message.model:
            time.sleep(0.02)
            progress(1, 2, "reading weights")
        if "broken" in message.model:
            raise ArtifactError("a tensor is damaged", path=Path(message.model), offset=64)
        if "deadly" in message.model:
            sys.exit("the machine stopped this process")
        progress(2, 2, "reading weights")
        return ScriptedResident(message)

    def reclaim(self) -> None:
        self.reclaimed += 1

    def diag(self) -> Mapping[str, Any]:
        return {"device": "none", "threads": self.config.threads}


if __name__ == "__main__":
    sys.exit(daemon.main(ScriptedLoader))
