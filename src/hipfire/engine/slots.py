"""What the cache's slots hold, and which turn has which: the bookkeeping around the prefix planner.

This file knows token ids and rows. It does not know requests, text or the order of turns. Where a model has
recurrent layers, a sequence can only be taken up where their state stands or where a checkpoint was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hipfire.base.errors import InternalError
from hipfire.cache.prefix import Plan, Resident, common_prefix, plan_prefix, plan_start
from hipfire.engine.checkpoints import Checkpoints
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
    # where the running turn's prompt has to stop for a checkpoint, in ascending order
    stops: list[int] = field(default_factory=list)


class SlotTable:
    """The slots of one runner's cache.

    For models with recurrent layers `state_budget` is the most bytes of checkpoints, and one is taken every
    `state_interval` tokens of a prompt besides those that it is asked for; 0 takes none of these.
    """

    def __init__(self, runner: Runner, state_budget: int = 0, state_interval: int = 0) -> None:
        self._runner = runner
        self._states = Checkpoints(runner, state_budget) if runner.recurrent else None
        self._interval = state_interval
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

    def begin(self, number: int, history: list[int], borders: Sequence[int] = ()) -> int:
        """Bring the rows that `history`, a prompt, shares with any slot into its own; returns how many.

        From here on `history` belongs to the slot and grows with the reply. `borders` are numbers of its
        tokens with which later prompts are likely to begin.
        """
        slot = self._slots[number]
        plan = plan_start(history, self._residents(), number)
        if self._states is not None:
            self._resume(self._states, plan)
            slot.stops = self._wanted(plan.start, len(history), borders)
        elif plan.copy_from is not None:
            self._runner.share_rows(plan.copy_from, number, plan.start)
        slot.tokens, slot.rows, slot.kept, slot.begun = history, plan.start, plan.start, True
        return plan.start

    def _resume(self, states: Checkpoints, plan: Plan) -> None:
        """Bring rows and state of a slot to where its turn starts."""
        source = plan.slot if plan.copy_from is None else plan.copy_from
        standing = self._stands(self._slots[source]) and self._slots[source].rows == plan.start
        if plan.start and standing:
            # the state moves on from here, and this end of a turn may be asked for again
            states.take(source)
        if plan.start and not (standing and source == plan.slot):
            snapshot = states.find(source, plan.start)
            if snapshot is None:
                snapshot = self._runner.snapshot(source)
            if source == plan.slot:
                self._runner.restore(source, snapshot)
            else:
                self._runner.share_rows(source, plan.slot, plan.start, snapshot)
        states.hits += plan.start > 0
        states.share(source, plan.slot, plan.start)

    def _wanted(self, start: int, end: int, borders: Sequence[int]) -> list[int]:
        if self._states is None or not self._states.possible:
            return []
        regular = range(self._interval, end, self._interval) if self._interval else ()
        # one right beside a border would only cost memory
        apart = [stop for stop in regular if all(abs(stop - one) >= self._interval // 4 for one in borders)]
        return sorted({stop for stop in (*borders, *apart) if start < stop < end})

    def room(self, number: int, tokens: int) -> int:
        """Return how many of the next `tokens` of a slot's prompt may be computed before it has to stop."""
        slot = self._slots[number]
        return min(tokens, slot.stops[0] - slot.rows) if slot.stops else tokens

    def promised(self, prompt: list[int], reading: Iterable[int]) -> int:
        """Return how many tokens of `prompt` can be copied once others have computed theirs.

        `reading` are the slots whose prompts the next step reads. Where only checkpoints can be copied, those
        count that any prompt still comes to.
        """
        if self._states is None:
            shares = [common_prefix(prompt, self._slots[number].tokens) for number in reading]
            return max(shares, default=0)
        ahead = [slot for slot in self._slots if slot.stops]
        shares = [
            max((stop for stop in slot.stops if stop <= shared), default=0)
            for slot in ahead
            for shared in (common_prefix(prompt, slot.tokens),)
        ]
        return max(shares, default=0)

    def computed(self, number: int, rows: int) -> None:
        """Note that the slot now holds `rows` rows of its turn."""
        slot = self._slots[number]
        slot.rows = rows
        if self._states is not None and slot.stops[:1] == [rows]:
            del slot.stops[0]
            self._states.take(number)

    def release(self, number: int, *, keep: bool) -> None:
        """Free a slot: its turn's rows stay for reuse, or only those that were there before it."""
        slot = self._slots[number]
        if slot.begun:
            rows = slot.rows if keep else slot.kept
            slot.tokens, slot.rows = slot.tokens[:rows], rows
            self._forget(number, rows)
        slot.busy = slot.begun = False

    def drop(self, number: int) -> None:
        """Free a slot of whose rows nothing is certain any more."""
        slot = self._slots[number]
        slot.tokens, slot.rows, slot.busy, slot.begun = [], 0, False, False
        self._forget(number, 0)

    def _forget(self, number: int, rows: int) -> None:
        self._slots[number].stops = []
        if self._states is not None:
            self._states.cut(number, rows)

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

    @property
    def checkpoints(self) -> dict[str, int]:
        """Return how many states are kept, their bytes, and how many turns began at one; empty without."""
        states = self._states
        if states is None:
            return {}
        count = states.count
        return {"count": count, "bytes": count * states.nbytes_each, "hits": states.hits}

    def _stands(self, slot: _Slot) -> bool:
        """Tell whether the state of a slot's recurrent layers is that after its last row.

        It is ahead where rows were taken back, and on its way while a turn runs.
        """
        return not slot.begun and 0 < slot.rows == self._runner.filled(slot.number)

    def _residents(self) -> list[Resident]:
        return [
            Resident(slot.number, slot.tokens[: slot.rows], slot.busy, slot.used, self._points(slot))
            for slot in self._slots
        ]

    def _points(self, slot: _Slot) -> list[int] | None:
        if self._states is None:
            return None
        ends = [slot.rows] if self._stands(slot) else []
        return sorted({*self._states.positions(slot.number), *ends})
