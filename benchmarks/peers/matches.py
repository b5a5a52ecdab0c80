"""One model against the peer: its files, how a measurement is asked for, and everything that came of it.

This file does not know how times are compared or shown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from peers.contest import Arm, Case, Rounds, Sample, Way, play
from peers.files import ModelFile, describe

# tokens that a sequence holds when its decode steps begin
CONTEXT = 16
# at least this long are the contexts of both sides
LEAST_CONTEXT = 1024
# between measurements, so that threads which wait for more work have gone to sleep
PAUSE_SECONDS = 0.05
PROFILE_REPEATS = 30
PEER_WAYS = tuple(
    Way(call, setting)
    for setting in ("flash attention off", "flash attention on")
    for call in ("llama_decode", "Llama.eval")
)
_CALLS = {"llama_decode": "raw", "Llama.eval": "eval"}


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of a decode step: of each kernel (name, rows of the program, seconds), and of all of it.

    `program` is the recorded program in one call, `step` the same through the runner. No kernels: not
    recorded.
    """

    kernels: tuple[tuple[str, int, float], ...]
    barriers: int
    program: float
    step: float


@dataclass(frozen=True)
class Match:
    """What was measured for one model: `title` says which, `files` and `profiles` go by the names of arms.

    The notes of `rounds` are the bytes per second that the threads read from memory.
    """

    title: str
    files: Mapping[str, ModelFile]
    rounds: Rounds
    profiles: Mapping[str, Profile]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "title": self.title,
            "files": {name: file.to_json() for name, file in self.files.items()},
            "series": [each.to_json() for each in self.rounds.series],
            "memory_bytes_per_second": list(self.rounds.notes),
            "decode_step": {
                name: {
                    "kernels": [list(kernel) for kernel in profile.kernels],
                    "barriers": profile.barriers,
                    "program_seconds": profile.program,
                    "step_seconds": profile.step,
                }
                for name, profile in self.profiles.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: rounds, lengths in tokens, and how many sequences the last case decodes."""

    rounds: int
    warmups: int
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    batch: int

    @property
    def cases(self) -> tuple[Case, ...]:
        """Return what is measured, in order; the batch decodes as many steps as the shortest case."""
        cases = [Case("pp", length) for length in self.prefill] + [
            Case("tg", length) for length in self.decode
        ]
        return (*cases, Case("tg", min(self.decode), self.batch))

    @property
    def n_ctx(self) -> int:
        """Return the length of the contexts that hold all cases."""
        return max(LEAST_CONTEXT, *self.prefill, CONTEXT + max(self.decode))


class Asked(Protocol):
    """A worker, as far as matches know one."""

    name: str

    @property
    def pid(self) -> int:
        """Return the number of its process."""

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return the answer."""


class Clock(Protocol):
    """CPU times of the machine and of a process, in seconds."""

    def busy(self) -> float | None:
        """Return the time for which the CPUs have worked."""

    def process(self, pid: int) -> float | None:
        """Return the time that a process has used."""


@dataclass(frozen=True)
class Workers:
    """Both sides, and what watches them."""

    peer: Asked
    own: Asked
    clock: Clock
    pause: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Texts:
    """Synthetic tokens: the same in every run, for both sides, other ones for every stream."""

    vocabulary: int

    def text(self, length: int, stream: int = 0) -> list[int]:
        """Return `length` ids from the middle of the vocabulary, where no control tokens are."""
        low, high = min(1000, self.vocabulary // 4), self.vocabulary - self.vocabulary // 8
        return random.Random(stream).choices(range(low, high), k=length)

    def request(self, case: Case) -> dict[str, Any]:
        """Return the tokens of a case as fields of a request."""
        if case.kind == "pp":
            return {"tokens": self.text(case.tokens)}
        rows = [self.text(case.tokens, 1 + row) for row in range(case.batch)]
        return {"context": self.text(CONTEXT), "rows": rows}


def run_match(
    title: str,
    files: Sequence[tuple[Arm, Path]],
    workers: Workers,
    plan: Plan,
    progress: Callable[[str], None],
) -> Match:
    """Load the files, measure all cases, look into hipfire's decode steps, and unload the files.

    Raises what workers raise, and ValidationError for a plan without rounds.
    """
    progress("loading")
    sizes: dict[str, ModelFile] = {}
    vocabulary = []
    for arm, path in files:
        sizes[arm.name] = describe(path)
        fields: dict[str, Any] = {"key": arm.name, "path": str(path), "n_ctx": plan.n_ctx}
        if arm.peer:
            workers.peer.ask("load", **fields)
        else:
            answer = workers.own.ask("load", slots=plan.batch, **fields)
            vocabulary.append(int(answer["vocab"]))
            held = int(answer["memory_bytes"])
            step = int(answer["step_bytes"])
            sizes[arm.name] = replace(sizes[arm.name], memory_bytes=held, step_bytes=step)
    texts = Texts(min(vocabulary))

    def measure(arm: Arm, way: Way, case: Case) -> Sample:
        request = {"key": arm.name, **texts.request(case)}
        if arm.peer:
            request |= {"call": _CALLS[way.call], "flash": way.setting == "flash attention on"}
        return timed(workers, arm, case, request)

    arms = [arm for arm, _ in files]
    rounds = play(
        arms,
        plan.cases,
        measure,
        rounds=plan.rounds,
        warmups=plan.warmups,
        each_round=lambda: float(workers.own.ask("read")["bytes_per_second"]),
        progress=progress,
    )
    progress("decode step by operation")
    profiles = {arm.name: _profile(workers, arm, texts) for arm in arms if not arm.peer}
    for arm in arms:
        (workers.peer if arm.peer else workers.own).ask("unload", key=arm.name)
    return Match(title, sizes, rounds, profiles)


def timed(workers: Workers, arm: Arm, case: Case, request: Mapping[str, Any]) -> Sample:
    """Ask for one measurement after a pause, and note what else the CPUs did meanwhile."""
    player, waiting = (workers.peer, workers.own) if arm.peer else (workers.own, workers.peer)
    clock = workers.clock
    workers.pause(PAUSE_SECONDS)
    before = (clock.busy(), clock.process(player.pid), clock.process(waiting.pid))
    began = time.perf_counter()
    answer = player.ask(case.kind, **request)
    wall = time.perf_counter() - began
    after = (clock.busy(), clock.process(player.pid), clock.process(waiting.pid))
    busy, playing, idle = (
        None if first is None or last is None else last - first
        for first, last in zip(before, after, strict=True)
    )
    others = None
    if busy is not None and playing is not None and idle is not None:
        others = busy - playing - idle
    return Sample(float(answer["seconds"]), wall, others, idle)


def _profile(workers: Workers, arm: Arm, texts: Texts) -> Profile:
    context, (token,) = texts.text(CONTEXT), texts.text(1, 1)
    answer = workers.own.ask("profile", key=arm.name, context=context, token=token, repeats=PROFILE_REPEATS)
    kernels = tuple((str(name), int(rows), float(seconds)) for name, rows, seconds in answer["kernels"])
    return Profile(kernels, int(answer["barriers"]), float(answer["program"]), float(answer["step"]))
