"""States of recurrent layers, kept at positions to which sequences may have to return.

The rows of attention can be taken up at any position. A running state cannot: it stands at the end of what it
has read. So copies of it are kept, within a budget of bytes; the one that was used longest ago goes first. A
checkpoint belongs to a position of a slot's sequence and is forgotten with the rows before it. This file
knows slots and positions, not tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hipfire.base.log import logger
from hipfire.runtime.runner import Runner, Snapshot


@dataclass(slots=True, eq=False)
class _Held:
    """A snapshot, and the slots whose sequences begin with what it was taken of."""

    snapshot: Snapshot
    slots: set[int] = field(default_factory=set)


class Checkpoints:
    """The checkpoints of one runner's slots, of at most `budget` bytes together."""

    def __init__(self, runner: Runner, budget: int) -> None:
        self._runner = runner
        states = runner.cache.states
        self.nbytes_each = 0 if states is None else states.nbytes // states.slots
        self._most = budget // self.nbytes_each if self.nbytes_each else 0
        # in the order of their use, the longest ago first
        self._held: dict[_Held, None] = {}
        self._places: list[dict[int, _Held]] = [{} for _ in range(runner.cache.slots)]
        self.hits = 0

    @property
    def possible(self) -> bool:
        """Tell whether the budget holds any."""
        return self._most > 0

    @property
    def count(self) -> int:
        """Return how many states are kept."""
        return len(self._held)

    def positions(self, slot: int) -> list[int]:
        """Return the positions of a slot's sequence that have a checkpoint."""
        return list(self._places[slot])

    def take(self, slot: int) -> None:
        """Keep a slot's state as it stands now. Where that fails, later turns have more to compute."""
        position = self._runner.filled(slot)
        held = self._places[slot].get(position)
        if held is not None:
            self._touch(held)
            return
        if not self.possible:
            return
        while len(self._held) >= self._most:
            self._evict(next(iter(self._held)))
        try:
            held = _Held(self._runner.snapshot(slot), {slot})
        except Exception as error:
            logger().warning("the state at token %d is not kept: %s", position, error)
            return
        self._held[held] = None
        self._places[slot][position] = held

    def find(self, slot: int, position: int) -> Snapshot | None:
        """Return the state of a slot's sequence at a position, which thereby counts as used."""
        held = self._places[slot].get(position)
        if held is None:
            return None
        self._touch(held)
        return held.snapshot

    def share(self, source: int, target: int, rows: int) -> None:
        """Let `target`, which now begins with the first `rows` rows of `source`, have its checkpoints too."""
        if source == target:
            self.cut(target, rows)
            return
        self.cut(target, -1)
        for position, held in self._places[source].items():
            if position <= rows:
                held.slots.add(target)
                self._places[target][position] = held

    def cut(self, slot: int, rows: int) -> None:
        """Forget a slot's checkpoints behind its first `rows` rows."""
        places = self._places[slot]
        for position in [position for position in places if position > rows]:
            held = places.pop(position)
            held.slots.discard(slot)
            if not held.slots:
                del self._held[held]

    def _touch(self, held: _Held) -> None:
        del self._held[held]
        self._held[held] = None

    def _evict(self, held: _Held) -> None:
        for slot in held.slots:
            del self._places[slot][held.snapshot.position]
        del self._held[held]
