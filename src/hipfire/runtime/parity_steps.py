"""The steps that proofs of replay compare: prompts, tokens, and which cached rows they may write.

This file runs steps and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from hipfire.base.errors import ValidationError
from hipfire.layers.context import Segment
from hipfire.runtime.route import Retained
from hipfire.runtime.runner import Runner

# rows behind the last one that is written, and of slots that take no part, that must not change
GUARD_ROWS: Final = 256

Regions = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which steps are compared: `positions` of `batch` sequences that have read `context` tokens or more."""

    context: int = 16
    positions: int = 15
    batch: int = 1

    def __post_init__(self) -> None:
        if self.context < 1 or self.positions < 1 or self.batch < 1:
            raise ValidationError("context, positions and batch must be at least 1")


def lengths(plan: Plan) -> list[int]:
    """Return the prompt length of each sequence: no two alike."""
    return [plan.context + index for index in range(plan.batch)]


def _tokens(runner: Runner, slot: int, start: int, count: int) -> list[int]:
    vocab = runner.model.vocab_size
    return [(101 + 37 * slot + 7919 * place) % vocab for place in range(start, start + count)]


def prime(runner: Runner, retained: Retained, plan: Plan) -> None:
    """Read the prompts. Their last chunk may be a single token, which must not count as a step of an arm."""
    retained.request = "eager"
    for slot, length in enumerate(lengths(plan)):
        runner.prefill(slot, _tokens(runner, slot, 0, length))


def feed(runner: Runner, plan: Plan, index: int) -> torch.Tensor:
    """Feed every sequence its next token."""
    places = [(slot, length + index) for slot, length in enumerate(lengths(plan))]
    return runner.step([(Segment(slot, start, 1), _tokens(runner, slot, start, 1)) for slot, start in places])


def own_rows(runner: Runner, plan: Plan) -> list[tuple[str, torch.Tensor]]:
    """Return the cached rows that an arm writes."""
    found = []
    for slot, length in enumerate(lengths(plan)):
        end = length + plan.positions
        runner.cache.ensure(slot, end)
        found += [(f"slot {slot}: {name}", view) for name, view in runner.cache.views(slot, 0, end)]
    return _numbered(found)


def guard_rows(runner: Runner, plan: Plan) -> list[tuple[str, torch.Tensor]]:
    """Return cached rows that no arm may write: behind the sequences, and of other slots."""
    ends = {slot: length + plan.positions for slot, length in enumerate(lengths(plan))}
    found = []
    for slot in range(runner.cache.slots):
        start = ends.get(slot, 0)
        stop = min(start + GUARD_ROWS, runner.cache.max_seq)
        if start < stop:
            runner.cache.ensure(slot, stop)
            found += [(f"slot {slot}: {name}", view) for name, view in runner.cache.views(slot, start, stop)]
    return _numbered(found)


def own_states(runner: Runner, plan: Plan) -> list[tuple[str, torch.Tensor]]:
    """Return what recurrent layers keep of the sequences of an arm; nothing where there are none."""
    return _states(runner, range(plan.batch))


def other_states(runner: Runner, plan: Plan) -> list[tuple[str, torch.Tensor]]:
    """Return what recurrent layers keep in slots that no arm may write."""
    return _states(runner, range(plan.batch, runner.cache.slots))


def _states(runner: Runner, slots: Iterable[int]) -> list[tuple[str, torch.Tensor]]:
    states = runner.cache.states
    if states is None:
        return []
    return [(f"slot {slot}: {name}", view) for slot in slots for name, view in states.views(slot)]


def _numbered(regions: Regions) -> list[tuple[str, torch.Tensor]]:
    """Give regions of one name, as parts of several blocks, names of their own."""
    counts: dict[str, int] = {}
    found = []
    for name, tensor in regions:
        counts[name] = counts.get(name, -1) + 1
        found.append((f"{name}, part {counts[name]}" if counts[name] else name, tensor))
    return found
