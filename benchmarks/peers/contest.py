"""Rounds of measurements in which all arms take turns, so that a machine that drifts slows all of them alike.

An arm is a program with a model. It may have several ways to do the same (with or without some setting,
through one call or another): settings are decided in warm-up, calls are all measured to the end, and the
report takes the best one. This file does not know programs, and how a measurement is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hipfire.base.errors import ValidationError
from hipfire.bench.summary import Summary, rates

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """Prefill (`pp`) of so many tokens, or as many decode steps (`tg`) of `batch` sequences."""

    kind: Literal["pp", "tg"]
    tokens: int
    batch: int = 1

    @property
    def name(self) -> str:
        """Return a short name such as pp512, tg64 or tg64x8."""
        return f"{self.kind}{self.tokens}" + (f"x{self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which an arm can be measured: a call, under a setting."""

    call: str = ""
    setting: str = ""

    @property
    def name(self) -> str:
        """Return call and setting as words."""
        return ", ".join(filter(None, (self.call, self.setting)))


@dataclass(frozen=True, slots=True)
class Arm:
    """Who is measured with which model: a name among the arms, and the format of the file."""

    name: str
    format: str
    peer: bool = False
    ways: tuple[Way, ...] = (Way(),)
    batches: bool = True

    def takes(self, case: Case) -> bool:
        """Return whether this arm can be measured in a case."""
        return self.batches or case.batch == 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: its time, the time around it, and the CPU time of others in that (None = unknown).

    `others` is the time of all other programs, `waiting` that of the workers whose turn it was not. All in
    seconds.
    """

    seconds: float
    wall: float
    others: float | None = None
    waiting: float | None = None


Measure = Callable[[Arm, Way, Case], Sample]


@dataclass(frozen=True)
class Series:
    """The samples of one way of an arm in one case, a sample per round."""

    arm: Arm
    way: Way
    case: Case
    samples: tuple[Sample, ...]

    @property
    def tok_s(self) -> Summary:
        """Return tokens per second, those of all sequences together."""
        return rates(self.case.tokens * self.case.batch, [sample.seconds for sample in self.samples])

    def to_json(self) -> dict[str, Any]:
        """Return all samples as plain JSON values."""
        return {
            "case": self.case.name,
            "arm": self.arm.name,
            "format": self.arm.format,
            "way": self.way.name,
            "tok_s": self.tok_s.to_json(),
            "seconds": [sample.seconds for sample in self.samples],
            "wall_seconds": [sample.wall for sample in self.samples],
            "cpu_seconds_of_others": [sample.others for sample in self.samples],
            "cpu_seconds_of_waiting_workers": [sample.waiting for sample in self.samples],
        }


@dataclass(frozen=True)
class Rounds:
    """Everything that was measured between some arms; `notes` is what `each_round` returned."""

    arms: tuple[Arm, ...]
    cases: tuple[Case, ...]
    series: tuple[Series, ...]
    notes: tuple[float, ...] = field(default=())

    def best(self, arm: Arm, case: Case) -> Series | None:
        """Return the way with the highest median, None if the arm does not take the case."""
        own = [each for each in self.series if each.arm == arm and each.case == case]
        return max(own, key=lambda each: each.tok_s.median, default=None)

    @property
    def peer(self) -> Arm:
        """Return the arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.peer)

    @property
    def own(self) -> tuple[Arm, ...]:
        """Return the other arms."""
        return tuple(arm for arm in self.arms if not arm.peer)


def play(
    arms: Sequence[Arm],
    cases: Sequence[Case],
    measure: Measure,
    *,
    rounds: int,
    warmups: int,
    each_round: Callable[[], float] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Rounds:
    """Measure every case of every arm in each round; the order of the arms turns around from round to round.

    In `warmups` rounds before those, all ways are tried; of the settings of an arm, the one with the
    fastest time in a case stays for that case. `each_round` is called before each counted round. Raises
    ValidationError for less than one round or warm-up.
    """
    if min(rounds, warmups) < 1:
        raise ValidationError(
            "rounds and warm-ups must be at least 1", hint="use 6 rounds or more to publish"
        )
    slots = [(case, arm, way) for case in cases for arm in arms if arm.takes(case) for way in arm.ways]
    trials: dict[tuple[Case, Arm, Way], list[Sample]] = {slot: [] for slot in slots}
    for number in range(warmups):
        progress(f"warm-up {number + 1} of {warmups}")
        _round(number, cases, slots, trials, measure)
    slots = [slot for slot in slots if slot[2].setting == _best_setting(slot[0], slot[1], trials)]
    counted: dict[tuple[Case, Arm, Way], list[Sample]] = {slot: [] for slot in slots}
    notes = []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        if each_round is not None:
            notes.append(each_round())
        _round(number, cases, slots, counted, measure)
    series = tuple(Series(arm, way, case, tuple(counted[case, arm, way])) for case, arm, way in slots)
    return Rounds(tuple(arms), tuple(cases), series, tuple(notes))


def ratio_of_medians(own: Series, other: Series) -> float:
    """Return how many times faster `own` is, by medians of tokens per second."""
    return own.tok_s.median / other.tok_s.median


def median_of_ratios(own: Series, other: Series) -> float:
    """Return how many times faster `own` is, by the median of the ratios within each round."""
    pairs = zip(own.tok_s.samples, other.tok_s.samples, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _round(
    number: int,
    cases: Sequence[Case],
    slots: Sequence[tuple[Case, Arm, Way]],
    samples: dict[tuple[Case, Arm, Way], list[Sample]],
    measure: Measure,
) -> None:
    for case in cases:
        turns = [slot for slot in slots if slot[0] == case]
        for slot in turned(turns, number):
            samples[slot].append(measure(slot[1], slot[2], case))


def turned(turns: Sequence[T], number: int) -> list[T]:
    """Return the turns of a round in their order: forwards in even rounds, backwards in odd ones."""
    return list(turns) if number % 2 == 0 else list(reversed(turns))


def _best_setting(case: Case, arm: Arm, trials: dict[tuple[Case, Arm, Way], list[Sample]]) -> str:
    # by the fastest time, since a first one pays for pages that were never touched
    def fastest(way: Way) -> float:
        return min(sample.seconds for sample in trials[case, arm, way])

    return min(arm.ways, key=fastest).setting
