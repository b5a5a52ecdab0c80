"""Rounds in which two servers take turns at every test, and what else the machine did meanwhile.

This file does not start servers, makes no requests itself, and shows nothing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from hipfire.base.errors import ValidationError
from peers.contest import turned
from peers.serve_requests import at_once, beside, chunk, long_alone, one_by_one
from peers.serve_servers import ServeError, Side
from peers.serve_texts import Texts

PAUSE_SECONDS = 0.1
# where in the reading of the long prompt a short request may arrive
FIRST_ARRIVAL, LAST_ARRIVAL = 0.1, 0.7
# how often it is sent anew, earlier, if the long prompt was read faster than before and it came too late
TRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: rounds, chats and tokens of each reply, tokens of the long prompt and of a chunk.

    `probes` is how many short requests a round sends, each beside a long prompt of its own.
    """

    rounds: int
    warmups: int
    chats: int
    tokens: int
    long: int
    chunk: int
    probes: int


class Clock(Protocol):
    """CPU times of the machine and of a process, in seconds."""

    def busy(self) -> float | None:
        """Return the time for which the CPUs have worked."""

    def process(self, pid: int) -> float | None:
        """Return the time that a process has used."""


@dataclass(frozen=True, slots=True)
class Use:
    """CPU seconds while one side was asked for `wall` seconds; None where the system does not tell."""

    wall: float
    others: float | None
    waiting: float | None
    client: float | None


@dataclass
class Figures:
    """Everything that was measured of one side: samples by the name of a figure, in order of the rounds.

    Names end in their unit. A figure has one sample a round, but for `beside_ms`, which has one a probe.
    `missed` counts probes that came when the long prompt had been read; they are no samples.
    """

    side: Side
    samples: dict[str, list[float]] = field(default_factory=dict)
    missed: int = 0

    def add(self, found: Mapping[str, float]) -> None:
        """Take in the figures of one measurement."""
        for name, value in found.items():
            self.samples.setdefault(name, []).append(value)

    def to_json(self) -> dict[str, Any]:
        """Return all samples as plain JSON values."""
        return {
            "server": self.side.name,
            "settings": self.side.settings,
            "samples": self.samples,
            "missed_probes": self.missed,
        }


@dataclass(frozen=True)
class Contest:
    """What came of a run: the plan, the figures of both sides, and what else the machine did."""

    plan: Plan
    own: Figures
    peer: Figures
    uses: tuple[Use, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        plan = {name: getattr(self.plan, name) for name in Plan.__slots__}
        uses = [
            {
                "wall_seconds": use.wall,
                "cpu_seconds_of_others": use.others,
                "cpu_seconds_of_waiting_server": use.waiting,
                "cpu_seconds_of_client": use.client,
            }
            for use in self.uses
        ]
        return {"plan": plan, "figures": [self.peer.to_json(), self.own.to_json()], "uses": uses}


def play(
    own: Side,
    peer: Side,
    texts: Texts,
    plan: Plan,
    clock: Clock,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Contest:
    """Measure everything in each round; both sides get the same texts, and take the first turn in turns.

    Warm-up rounds do not count. Raises ServeError for any reply that is not whole, and ValidationError for a
    plan without rounds.
    """
    if min(plan.rounds, plan.warmups, plan.chats, plan.probes) < 1:
        raise ValidationError("rounds, warm-ups, chats and probes must be at least 1")
    warm, counted = (_Rounds(own, peer, texts, plan, clock) for _ in range(2))
    for number in range(plan.warmups):
        progress(f"warm-up {number + 1} of {plan.warmups}")
        warm.play(number)
    for number in range(plan.rounds):
        progress(f"round {number + 1} of {plan.rounds}")
        counted.play(number, first_text=plan.warmups)
    if not all(figures.samples.get("beside_ms") for figures in counted.figures):
        raise ServeError("no short request came while the long prompt was read", hint="use more --probes")
    return Contest(plan, counted.figures[1], counted.figures[0], tuple(counted.uses))


class _Rounds:
    """The rounds of a run: every measurement of both sides, one after another."""

    def __init__(self, own: Side, peer: Side, texts: Texts, plan: Plan, clock: Clock) -> None:
        self.figures = (Figures(peer), Figures(own))
        self.uses: list[Use] = []
        self._texts = texts
        self._plan = plan
        self._clock = clock

    def play(self, number: int, first_text: int = 0) -> None:
        """Make one round; `first_text` is the number of rounds that have used up texts before."""
        plan, texts = self._plan, self._texts
        questions = (first_text + number) * (2 * plan.chats + plan.probes * TRIES)
        serial = [texts.question(questions + index) for index in range(plan.chats)]
        together = [texts.question(questions + plan.chats + index) for index in range(plan.chats)]
        used = (first_text + number) * (2 + plan.probes * TRIES)
        chunk_text, long = texts.text(used, plan.chunk), texts.text(used + 1, plan.long)
        self._each(number, lambda each: one_by_one(each.side, serial, plan.tokens))
        self._each(number, lambda each: at_once(each.side, together, plan.tokens))
        self._each(number, lambda each: chunk(each.side, chunk_text, plan.chunk))
        self._each(number, lambda each: long_alone(each.side, long))
        arrivals = random.Random(number)
        for probe in range(plan.probes):
            tries = range(probe * TRIES, (probe + 1) * TRIES)
            prompts = [
                (texts.text(used + 2 + each, plan.long), texts.question(questions + 2 * plan.chats + each))
                for each in tries
            ]
            arrival = arrivals.uniform(FIRST_ARRIVAL, LAST_ARRIVAL)
            self._each(number, partial(_probe, prompts=prompts, share=arrival))

    def _each(self, number: int, measure: Callable[[Figures], Mapping[str, float]]) -> None:
        for figures in turned(self.figures, number):
            waiting = next(other.side for other in self.figures if other is not figures)
            time.sleep(PAUSE_SECONDS)
            before, began = self._times(figures.side, waiting), time.perf_counter()
            found = measure(figures)
            wall = time.perf_counter() - began
            self.uses.append(_use(wall, before, self._times(figures.side, waiting)))
            figures.add(found)

    def _times(self, playing: Side, waiting: Side) -> tuple[float | None, ...]:
        groups = [playing.pids(), waiting.pids(), (os.getpid(),)]
        return self._clock.busy(), *(self._of_all(pids) for pids in groups)

    def _of_all(self, pids: Sequence[int]) -> float | None:
        times = [self._clock.process(pid) for pid in pids]
        return None if not times or None in times else sum(time for time in times if time is not None)


def _probe(figures: Figures, prompts: Sequence[tuple[str, str]], share: float) -> Mapping[str, float]:
    """Send a short request when this share of the long prompt has been read, by the last one's time alone.

    One that came too late is no sample; the next one comes after half that time. No figures after the last.
    """
    delay = share * figures.samples["long_s"][-1]
    for long, question in prompts:
        found = beside(figures.side, long, question, delay)
        if found is not None:
            return found
        figures.missed += 1
        delay /= 2
    return {}


def _use(wall: float, before: Sequence[float | None], after: Sequence[float | None]) -> Use:
    spent = [
        None if first is None or last is None else last - first
        for first, last in zip(before, after, strict=True)
    ]
    busy, playing, waiting, client = spent
    others = None
    if busy is not None and playing is not None and waiting is not None and client is not None:
        others = busy - playing - waiting - client
    return Use(wall, others, waiting, client)
