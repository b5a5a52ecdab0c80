"""Which slot a prompt goes to, and how much of what the cache already holds it can use. Pure; no torch.

The planner compares token ids, never hashes of them, so nothing but an equal prefix is ever reused. It knows
slots and tokens; it moves no rows itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """What one slot holds: the tokens whose rows are in place, from position 0.

    `busy`: a turn runs in it. `used` grows with every use, so the smallest was used longest ago.
    `checkpoints` are the ascending positions at which a sequence can be taken up again where a layer keeps a
    running state, its live end included if that can be used; None where every position can, as in attention.
    """

    slot: int
    tokens: Sequence[int]
    busy: bool = False
    used: int = 0
    checkpoints: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt goes to `slot` and is computed from `start` on; `start` tokens count as cached.

    `copy_from` is the slot whose first `start` rows are copied to `slot` before, None if they are there.
    """

    slot: int
    start: int
    copy_from: int | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens `a` and `b` share from their beginning."""
    limit = min(len(a), len(b))
    # of one type, since a list never equals a tuple
    a, b = list(a[:limit]), list(b[:limit])
    if a == b:
        return limit
    low, high = 0, limit
    # slices are compared in C: halving is far faster than a loop over tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


def reusable(prompt: Sequence[int], resident: Resident) -> int:
    """Return how many tokens of `prompt` need not be computed, given this resident's rows.

    One token is always left to compute, since its logits are what the reply begins with.
    """
    shared = min(common_prefix(prompt, resident.tokens), len(prompt) - 1)
    if resident.checkpoints is None:
        return max(shared, 0)
    return max((point for point in resident.checkpoints if point <= shared), default=0)


def plan_prefix(prompt: Sequence[int], residents: Sequence[Resident]) -> Plan | None:
    """Return where `prompt` goes, or None if every slot is busy.

    The longest reusable prefix wins, whichever slot holds it, a busy one too. Its rows are used in place if
    the slot is idle and at least half of them are reused: the rest is then an older state of the same
    conversation. Otherwise they are copied into the idle slot that was used longest ago, empty ones first,
    so that a short common beginning does not cost another conversation its rows.
    """
    idle = [resident for resident in residents if not resident.busy]
    if not idle:
        return None
    best = max(residents, key=lambda r: (reusable(prompt, r), not r.busy, r.used))
    start = reusable(prompt, best)
    if not best.busy and 2 * start >= len(best.tokens) > 0:
        return Plan(best.slot, start)
    victim = min(idle, key=lambda r: (len(r.tokens) > 0, r.slot == best.slot and start > 0, r.used, r.slot))
    return _into(victim, best, start, prompt)


def plan_start(prompt: Sequence[int], residents: Sequence[Resident], slot: int) -> Plan:
    """Return the plan for a prompt that has its slot already: other slots may hold more of it by now."""
    own = next(resident for resident in residents if resident.slot == slot)
    best = max(residents, key=lambda r: (reusable(prompt, r), r is own))
    return _into(own, best, reusable(prompt, best), prompt)


def _into(target: Resident, best: Resident, start: int, prompt: Sequence[int]) -> Plan:
    own = reusable(prompt, target)
    return Plan(target.slot, own) if own >= start else Plan(target.slot, start, best.slot)
