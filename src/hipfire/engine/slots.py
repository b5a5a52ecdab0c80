"""What the cache's slots hold, and which turn has which: the bookkeeping around the prefix planner.

This file knows token ids and rows. It does not know requests, text or the order of turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hipfire.base.errors import InternalError
from hipfire.cache.prefix import Resident, plan_prefix, plan_start
from hipfire.runtime.runner import Runner


class Claim(NamedTuple):
    """The slot that a prompt got, and from which of its tokens on it has to be computed, as things stand."""

    slot: int
    start: int


@dataclass(slots=True)
class _Slot:
    number: int
    # the sequence whose rows these are; a running turn appends to it before it computes
    tokens: list[int] = field(default_factory=list)
    rows: int = 0
    # the rows that were there before the running turn
    kept: int = 0
    busy: bool = False
    begun: bool = False
    used: int = 0


class SlotTable:
    """The slots of one runner's cache."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._slots = [_Slot(number) for number in range(runner.cache.slots)]
        self._uses = 0

    def claim(self, prompt: list[int]) -> Claim:
        """Take the best idle slot for `prompt`; InternalError if there is none."""
        plan = plan_prefix(prompt, self._residents())
        if plan is None:
            raise InternalError("no slot is free")
        self._uses += 1
        slot = self._slots[plan.slot]
        slot.busy, slot.begun, slot.used = True, False, self._uses
        return Claim(plan.slot, plan.start)

    def reusable(self, number: int, prompt: list[int]) -> int:
        """Return how many tokens of `prompt` would not have to be computed if it began now."""
        return plan_start(prompt, self._residents(), number).start

    def begin(self, number: int, history: list[int]) -> int:
        """Bring the rows that `history`, a prompt, shares with any slot into its own; returns how many.

        From here on `history` belongs to the slot and grows with the reply.
        """
        slot = self._slots[number]
        plan = plan_start(history, self._residents(), number)
        if plan.copy_from is not None:
            self._runner.share_rows(plan.copy_from, number, plan.start)
        slot.tokens, slot.rows, slot.kept, slot.begun = history, plan.start, plan.start, True
        return plan.start

    def computed(self, number: int, rows: int) -> None:
        """Note that the slot now holds `rows` rows of its turn."""
        self._slots[number].rows = rows

    def release(self, number: int, *, keep: bool) -> None:
        """Free a slot: its turn's rows stay for reuse, or only those that were there before it."""
        slot = self._slots[number]
        if slot.begun:
            rows = slot.rows if keep else slot.kept
            slot.tokens, slot.rows = slot.tokens[:rows], rows
        slot.busy = slot.begun = False

    def drop(self, number: int) -> None:
        """Free a slot of whose rows nothing is certain any more."""
        slot = self._slots[number]
        slot.tokens, slot.rows, slot.busy, slot.begun = [], 0, False, False

    def clear(self) -> None:
        """Forget the rows of all idle slots."""
        for slot in self._slots:
            if not slot.busy:
                self.drop(slot.number)

    @property
    def busy(self) -> frozenset[int]:
        """Return the slots that turns hold."""
        return frozenset(slot.number for slot in self._slots if slot.busy)

    @property
    def cached_tokens(self) -> int:
        """Return the number of rows that all slots together hold."""
        return sum(slot.rows for slot in self._slots)

    def check(self) -> None:
        """Raise InternalError unless every row that a slot claims to hold is in the cache."""
        for slot in self._slots:
            held = self._runner.filled(slot.number)
            fits = slot.kept <= slot.rows <= held if slot.busy and slot.begun else slot.rows <= held
            exact = slot.busy or len(slot.tokens) == slot.rows
            if not (fits and exact and slot.rows <= len(slot.tokens)):
                raise InternalError(
                    f"slot {slot.number} claims {slot.rows} rows of {len(slot.tokens)} tokens, "
                    f"but the cache holds {held}"
                )

    def _residents(self) -> list[Resident]:
        return [Resident(slot.number, slot.tokens[: slot.rows], slot.busy, slot.used) for slot in self._slots]
