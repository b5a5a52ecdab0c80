"""What one rendering of a template may use: steps, processor time, characters, and sizes of numbers.

A template is part of a downloaded file, so it is not trusted to end. This file knows nothing about Jinja.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from hipfire.base.errors import ArtifactError
from hipfire.text.extent import MAX_DEPTH, Extent, extent

_CLOCK_EVERY: Final = 64
_ITEM: Final = 32
_HINT: Final = "the template is faulty or hostile; name another one with the chat template option"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds for one rendering.

    `steps` counts loop rounds, calls and filters; `seconds` is processor time of the rendering thread, so
    that a busy machine fails nothing; `text` and `work` are characters of one string and of all strings made
    on the way; `items` bounds lists, `rounds` ranges, `number` integer arguments of calls and filters, `bits`
    integer results.
    """

    steps: int = 100_000
    seconds: float = 1.0
    text: int = 16 << 20
    work: int = 128 << 20
    items: int = 1_000_000
    rounds: int = 100_000
    number: int = 10_000
    bits: int = 1024


class Budget:
    """The running account of one rendering; its methods raise ArtifactError when a limit is passed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._steps = 0
        self._work = 0
        self._deadline = time.thread_time() + limits.seconds

    def step(self) -> None:
        """Account for one loop round, call, filter or operator."""
        self._steps += 1
        if self._steps > self._limits.steps:
            raise _spent(f"{self._limits.steps} steps")
        if self._steps % _CLOCK_EVERY == 0 and time.thread_time() > self._deadline:
            raise _spent(f"{self._limits.seconds:g} s of processor time")

    def text(self, length: int) -> None:
        """Account for a new string of `length` characters, before it is made where that is possible."""
        if length > self._limits.text:
            raise _spent(f"{self._limits.text} characters in one text")
        self._spend(length)

    def shown(self, values: Iterable[Any], *, copies: int = 1, indent: int = 0) -> None:
        """Account for `copies` texts of each value that is no string yet, before they are made.

        `indent` is the number of characters in front of an item for each level of nesting.
        """
        for value in values:
            if not isinstance(value, str):
                size = self._extent(value, self._limits.text)
                self.text(copies * (size.characters + indent * size.items * size.depth))

    def compared(self, value: Any) -> None:
        """Account for putting the items of `value` in order, which copies and compares all of their texts."""
        self._spend(self._extent(value, self._limits.work).characters)

    def items(self, count: int) -> None:
        """Account for a new list of `count` items, before it is made where that is possible."""
        if count > self._limits.items:
            raise _spent(f"{self._limits.items} items in one list")
        self._work += _ITEM * count
        if self._work > self._limits.work:
            raise _spent(f"{self._limits.work} characters altogether (an item counts as {_ITEM})")

    def rounds(self, count: int) -> None:
        """Refuse a range of more than `rounds` numbers."""
        if count > self._limits.rounds:
            raise _spent(f"{self._limits.rounds} numbers in one range (it asks for {count})")

    def arguments(self, values: Iterable[Any]) -> None:
        """Refuse integer arguments that would ask a filter or method for huge padding or repetition."""
        for value in values:
            if isinstance(value, int) and abs(value) > self._limits.number:
                raise _spent(f"integer arguments of {self._limits.number} (it passes {_shown(value)})")

    def integer(self, bits: int) -> None:
        """Account for an integer result of about `bits` bits."""
        if bits > self._limits.bits:
            raise _spent(f"integers of {self._limits.bits} bits")

    def _extent(self, value: Any, limit: int) -> Extent:
        size = extent(value, limit)
        if size.depth > MAX_DEPTH:
            raise _spent(f"{MAX_DEPTH} levels of lists in lists")
        return size

    def _spend(self, length: int) -> None:
        self._work += length
        if self._work > self._limits.work:
            raise _spent(f"{self._limits.work} characters altogether")


def _shown(value: int) -> str:
    return str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"


def _spent(limit: str) -> ArtifactError:
    return ArtifactError(f"the chat template asks for more than {limit}", hint=_HINT)
