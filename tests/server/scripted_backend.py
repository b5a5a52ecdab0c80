"""An engine whose replies a test scripts; server_kit.py puts servers around it.

A script is a list of `Say`, `think`, `Call`, `Wait`, `Hold`, `Fail`, `Note` and `End`; text is split into
pieces as an engine would. What the server asked for is recorded: requests, commits, aborts, cancels, loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hipfire.base.errors import HipfireError
from hipfire.engine.turn import (
    Aborted,
    Channel,
    Delta,
    Done,
    Event,
    Failed,
    Info,
    Ready,
    Started,
    TextLogprob,
    ToolCall,
    TurnFinish,
    TurnKey,
    TurnRequest,
    TurnResult,
    TurnTimings,
    TurnUsage,
)
from hipfire.server.backend import BackendState, LoadedInfo, LoadProgress

MODEL = "tiny"


@dataclass(frozen=True)
class Say:
    """Answer text, sent in pieces of `size` characters."""

    text: str
    size: int = 3
    channel: Channel = "answer"


def think(text: str, size: int = 3) -> Say:
    """Return reasoning text."""
    return Say(text, size, "reasoning")


@dataclass(frozen=True)
class Call:
    """A tool call; the turn then ends with "tool_calls"."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Wait:
    """A pause in seconds; `before_start` delays the start of the turn, as a queue does."""

    seconds: float
    before_start: bool = False


@dataclass(frozen=True)
class Hold:
    """A pause until the test sets the event."""

    event: asyncio.Event | threading.Event


@dataclass(frozen=True)
class Fail:
    """The turn fails here."""

    kind: str
    message: str
    before_start: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Note:
    """An Info event."""

    message: str


@dataclass(frozen=True)
class End:
    """How the turn ends, where it is not by itself."""

    finish: TurnFinish = "stop"
    stop: str | None = None
    warnings: tuple[str, ...] = ()


Step = Say | Call | Wait | Hold | Fail | Note | End
Script = Sequence[Step]
TIMINGS = TurnTimings(
    queue_ms=1.0, prefill_ms=20.0, ttft_ms=25.0, latency_ms=125.0, prefill_tok_s=500.0, decode_tok_s=40.0
)


@dataclass
class ScriptedBackend:
    """A `Backend` in this process.

    `scripts` are used up one a turn, the last one again and again; a function is given the request. `seen`
    holds the requests, `ended` the way each turn ended: "done", "aborted" or "failed".
    """

    scripts: list[Script | Callable[[TurnRequest], Script]] = field(default_factory=lambda: [[Say("Hello!")]])
    max_seq: int = 2048
    cached_tokens: int = 0
    load_error: HipfireError | None = None
    load_seconds: float = 0.0
    status: BackendState = "ok"
    seen: list[TurnRequest] = field(default_factory=list)
    loads: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    unloads: int = 0
    commits: list[TurnKey] = field(default_factory=list)
    aborts: list[TurnKey] = field(default_factory=list)
    cancels: list[TurnKey] = field(default_factory=list)
    ended: dict[TurnKey, str] = field(default_factory=dict)
    running: int = 0
    most_running: int = 0
    closed: bool = False
    _info: LoadedInfo | None = None
    _settled: dict[TurnKey, asyncio.Event] = field(default_factory=dict)

    async def start(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.closed = True

    async def load(
        self, path: Path, params: Mapping[str, Any], progress: LoadProgress | None = None
    ) -> LoadedInfo:
        self.loads.append((path, dict(params)))
        if progress is not None:
            progress(1, 2, "weights")
        if self.load_seconds:
            await asyncio.sleep(self.load_seconds)
        if self.load_error is not None:
            raise self.load_error
        assert not self.running, "a model was loaded while turns ran"
        self._info = LoadedInfo(path, self.max_seq, {"arch": "llama"})
        return self._info

    async def unload(self) -> None:
        assert not self.running, "a model was unloaded while turns ran"
        self.unloads += 1
        self._info = None

    def state(self) -> BackendState:
        return self.status

    def loaded(self) -> LoadedInfo | None:
        return self._info

    async def diag(self) -> Mapping[str, Any]:
        return {"model_loaded": self._info is not None}

    async def commit(self, key: TurnKey) -> None:
        self.commits.append(key)
        self._settle(key)

    async def abort(self, key: TurnKey) -> None:
        self.aborts.append(key)
        self._settle(key)

    async def cancel(self, key: TurnKey) -> None:
        self.cancels.append(key)
        self._settle(key)

    def _settle(self, key: TurnKey) -> None:
        if (event := self._settled.get(key)) is not None:
            event.set()

    async def generate(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Play the script; stops at once when the turn is aborted or cancelled."""
        assert request.key not in self._settled, "a key was used twice"
        self.seen.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self._settled[request.key] = asyncio.Event()
        try:
            async for event in self._play(request):
                if isinstance(event, Done | Aborted | Failed):
                    self.ended[request.key] = type(event).__name__.lower()
                    # as from an engine: the turn is over before its last event is read
                    self.running -= 1
                yield event
        finally:
            if request.key not in self.ended:
                self.ended[request.key] = "left"
                self.running -= 1

    async def _play(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        key, settled = request.key, self._settled[request.key]
        script = self._script(request)
        for step in script:
            if isinstance(step, Wait) and step.before_start and await _passes(settled, step.seconds):
                yield Aborted(key, "cancelled")
                return
            if isinstance(step, Fail) and step.before_start:
                yield Failed(key, step.kind, step.message, step.hint)
                return
        yield Started(key, any(_thinks(step) for step in script), 12, self.cached_tokens)
        counts = {"answer": 0, "reasoning": 0}
        for step in script:
            async for event in self._play_step(step, request, counts):
                yield event
                if isinstance(event, Failed | Aborted):
                    return
        result = self._result(script, request, counts)
        yield Ready(key, result)
        await settled.wait()
        yield Done(key, result) if key in self.commits else Aborted(key, "the client is gone")

    async def _play_step(
        self, step: Step, request: TurnRequest, counts: dict[str, int]
    ) -> AsyncGenerator[Event, None]:
        key, settled = request.key, self._settled[request.key]
        if isinstance(step, Say):
            for start in range(0, len(step.text), step.size):
                if await _passes(settled, 0):
                    yield Aborted(key, "cancelled")
                    return
                piece = step.text[start : start + step.size]
                counts[step.channel] += 1
                yield Delta(key, step.channel, piece, _logprobs(piece, request.generation.top_logprobs))
        elif isinstance(step, Wait) and not step.before_start and await _passes(settled, step.seconds):
            yield Aborted(key, "cancelled")
        elif isinstance(step, Hold):
            while not step.event.is_set():
                if await _passes(settled, 0.005):
                    yield Aborted(key, "cancelled")
                    return
        elif isinstance(step, Note):
            yield Info(key, step.message)
        elif isinstance(step, Fail) and not step.before_start:
            yield Failed(key, step.kind, step.message, step.hint)

    def _script(self, request: TurnRequest) -> Script:
        chosen = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return chosen(request) if callable(chosen) else chosen

    def _result(self, script: Script, request: TurnRequest, counts: Mapping[str, int]) -> TurnResult:
        end = next((step for step in script if isinstance(step, End)), End())
        calls = tuple(ToolCall(step.name, step.arguments) for step in script if isinstance(step, Call))
        usage = TurnUsage(12, self.cached_tokens, sum(counts.values()), counts["reasoning"])
        seed = request.sampling.seed if request.sampling.seed is not None else 7
        return TurnResult(
            finish="tool_calls" if calls else end.finish,
            usage=usage,
            timings=TIMINGS,
            seed=seed,
            stop=end.stop,
            calls=calls,
            warnings=end.warnings,
        )


def _thinks(step: Step) -> bool:
    return isinstance(step, Say) and step.channel == "reasoning"


def _logprobs(text: str, top: int | None) -> tuple[TextLogprob, ...]:
    if top is None:
        return ()
    others = tuple(TextLogprob(f"{text}{n}", tuple(f"{text}{n}".encode()), -1.0 - n) for n in range(top))
    return (TextLogprob(text, tuple(text.encode()), -0.5, others),)


async def _passes(settled: asyncio.Event, seconds: float) -> bool:
    """Wait; return True at once when the turn is settled meanwhile."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return settled.is_set()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(settled.wait(), seconds)
    return settled.is_set()
