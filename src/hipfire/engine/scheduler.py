"""Which turn runs next: a bounded queue, slots, prompt chunks, decode batches and deadlines. Pure; no torch.

The scheduler knows keys, numbers of tokens and the clock. It does not know models, text or caches, and it
runs nothing: the core asks it what to do and tells it what was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from hipfire.base.errors import HipfireError, InternalError, ValidationError
from hipfire.engine.turn import TurnKey

# a prompt that was passed over this often in favour of shorter ones gets the next chunk
MOST_PASSES: Final = 4


class BusyError(HipfireError):
    """What was asked for is possible, but not now."""

    kind = "transient"


class QueueFullError(BusyError):
    """As many turns wait as may."""


class Phase(Enum):
    """Where a turn is on its way."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    READY = "ready"


class Expired(NamedTuple):
    """A turn whose time is over: in which phase, and whether its own deadline passed."""

    key: TurnKey
    phase: Phase
    deadline: bool


@dataclass(slots=True)
class _Turn:
    key: TurnKey
    order: int
    phase: Phase
    deadline: float | None
    phase_ends: float | None
    slot: int | None = None
    remaining: int = 0
    passes: int = 0


class Scheduler:
    """The turns of one engine, from their arrival to their release."""

    def __init__(
        self,
        slots: int,
        *,
        chunk: int,
        max_queue: int,
        queue_timeout_s: float,
        commit_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._chunk = chunk
        self._max_queue = max_queue
        self._queue_timeout = queue_timeout_s
        self._commit_timeout = commit_timeout_s
        self._clock = clock
        self._turns: dict[TurnKey, _Turn] = {}
        self._order = 0

    def check(self, key: TurnKey) -> None:
        """Raise ValidationError for a key that is alive, QueueFullError if one more turn may not wait."""
        if key in self._turns:
            raise ValidationError(
                f"turn {key.id!r}, attempt {key.attempt}, is already running", hint="use an id of its own"
            )
        waiting = len(self._in(Phase.QUEUED))
        if waiting - self.free_slots >= self._max_queue:
            raise QueueFullError(
                f"{waiting} requests are already waiting",
                hint="try again in a moment, or raise serve.max_queue",
            )

    def enqueue(self, key: TurnKey, deadline_s: float | None = None) -> None:
        """Put a turn at the end of the queue; raises as `check` does."""
        self.check(key)
        now = self._clock()
        deadline = None if deadline_s is None else now + deadline_s
        self._turns[key] = _Turn(key, self._order, Phase.QUEUED, deadline, now + self._queue_timeout)
        self._order += 1

    @property
    def free_slots(self) -> int:
        """Return how many slots no turn holds."""
        return self._slots - sum(turn.slot is not None for turn in self._turns.values())

    def startable(self) -> TurnKey | None:
        """Return the turn that waited longest, if a slot is free for it."""
        waiting = self._in(Phase.QUEUED)
        return waiting[0].key if waiting and self.free_slots else None

    def start(self, key: TurnKey, slot: int, tokens: int) -> None:
        """Give a waiting turn its slot; `tokens` of its prompt have to be computed."""
        if any(turn.slot == slot for turn in self._turns.values()):
            raise InternalError(f"slot {slot} is given away twice")
        turn = self._expect(key, Phase.QUEUED)
        turn.phase, turn.phase_ends = Phase.PREFILL, None
        turn.slot, turn.remaining = slot, tokens

    def next_readers(self) -> tuple[TurnKey, ...]:
        """Return whose prompts are read next, in one step of at most a chunk's tokens.

        The first is the one with the fewest tokens left, ties in arrival order; but a prompt that was passed
        over MOST_PASSES times in a row comes first, so that none waits for ever. Others follow if they are
        completed by what is left of the chunk: a part of a long prompt would only delay the short ones.
        Choosing counts as a pass for the others: call it once for every step that is run.
        """
        reading = sorted(self._in(Phase.PREFILL), key=_urgency)
        chosen, room = reading[:1], self._chunk - sum(turn.remaining for turn in reading[:1])
        for turn in reading[1:]:
            if turn.remaining <= room:
                chosen.append(turn)
                room -= turn.remaining
        for turn in reading:
            turn.passes = 0 if turn in chosen else turn.passes + 1
        return tuple(turn.key for turn in chosen)

    def chunk_of(self, key: TurnKey) -> int:
        """Return how many tokens the next chunk of a prompt has."""
        return min(self._expect(key, Phase.PREFILL).remaining, self._chunk)

    def shorten(self, key: TurnKey, tokens: int) -> None:
        """State anew how many tokens of a prompt have to be computed, before its first chunk runs."""
        self._expect(key, Phase.PREFILL).remaining = tokens

    def advance(self, key: TurnKey, tokens: int) -> bool:
        """Note that so many tokens of the prompt were computed; True once it is complete and decodes."""
        turn = self._expect(key, Phase.PREFILL)
        if not 0 < tokens <= turn.remaining:
            raise InternalError(f"{tokens} tokens were computed of {turn.remaining} that were left")
        turn.remaining -= tokens
        if turn.remaining == 0:
            turn.phase = Phase.DECODE
        return turn.phase is Phase.DECODE

    def decoding(self) -> tuple[TurnKey, ...]:
        """Return the turns that decode together, in the order of their slots."""
        running = self._in(Phase.DECODE)
        return tuple(turn.key for turn in sorted(running, key=lambda turn: turn.slot or 0))

    def ready(self, key: TurnKey) -> None:
        """Note that a turn is complete and waits for its commit."""
        turn = self._expect(key, Phase.DECODE)
        turn.phase, turn.phase_ends = Phase.READY, self._clock() + self._commit_timeout

    def release(self, key: TurnKey) -> None:
        """Forget a turn, wherever it is; its slot is free again."""
        del self._turns[key]

    def phase(self, key: TurnKey) -> Phase | None:
        """Return where a turn is, None for a key that is not alive."""
        turn = self._turns.get(key)
        return None if turn is None else turn.phase

    def slot(self, key: TurnKey) -> int | None:
        """Return the slot of a turn, None while it waits."""
        return self._turns[key].slot

    def expired(self) -> list[Expired]:
        """Return the turns past their deadline, or past the time that their phase may take."""
        now = self._clock()
        found = []
        for turn in self._turns.values():
            late = turn.deadline is not None and now >= turn.deadline
            if late or (turn.phase_ends is not None and now >= turn.phase_ends):
                found.append(Expired(turn.key, turn.phase, late))
        return found

    def next_expiry(self) -> float | None:
        """Return the earliest time by the clock at which a turn expires, None if none ever does."""
        ends = (end for turn in self._turns.values() for end in (turn.deadline, turn.phase_ends))
        return min((end for end in ends if end is not None), default=None)

    def counts(self) -> dict[str, int]:
        """Return how many turns are in each phase."""
        return {phase.value: len(self._in(phase)) for phase in Phase}

    def _in(self, phase: Phase) -> list[_Turn]:
        return [turn for turn in self._turns.values() if turn.phase is phase]

    def _expect(self, key: TurnKey, phase: Phase) -> _Turn:
        turn = self._turns[key]
        if turn.phase is not phase:
            raise InternalError(f"turn {key.id!r} is {turn.phase.value}, not {phase.value}")
        return turn


def _urgency(turn: _Turn) -> tuple[int, int, int]:
    overdue = turn.passes if turn.passes >= MOST_PASSES else 0
    return -overdue, turn.remaining, turn.order
