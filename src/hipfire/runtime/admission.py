"""Whether a model fits: weights, caches and scratch are added up before anything is allocated.

The figures are upper bounds for the memory that a load will touch, so a refusal comes before the work and
names both numbers. This file allocates nothing and knows no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hipfire.base.errors import MemoryLimitError
from hipfire.base.types import CacheSpec, StateSpec
from hipfire.cache.kv import KvMode, kv_nbytes
from hipfire.cache.states import state_nbytes
from hipfire.kernels.attention import QUERY_ROWS
from hipfire.models.sizes import Sizes
from hipfire.runtime.weights import Residency

FLOAT = 4
# share of the available memory that a load may take; the rest is left to the system and other programs
USABLE = 0.9


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a load needs, by purpose; `states` are those of recurrent layers."""

    weights: int
    caches: int
    scratch: int
    states: int = 0

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.weights + self.caches + self.states + self.scratch


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take: the system's, bounded by its control group's."""
    kibibytes = _field(proc / "meminfo", "MemAvailable:")
    if kibibytes is not None:
        available = kibibytes * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        # cached file pages count as used but are given back on demand
        reclaimable = _field(cgroup / "memory.stat", "inactive_file") or 0
        available = min(available, max(limit - used + reclaimable, 0))
    return available


def scratch_nbytes(sizes: Sizes, chunk: int, max_seq: int, states: Sequence[StateSpec] = ()) -> int:
    """Return the bytes of a step's temporaries for `chunk` tokens over a context of `max_seq`.

    Counted are the widest activations of a layer, those of recurrent layers too, the attention scores and
    float32 copies of one layer's keys and values, and one row of logits.
    """
    attention_width = sizes.heads * sizes.head_dim
    activations = chunk * (3 * sizes.intermediate + 4 * sizes.hidden + 4 * attention_width)
    scores = 2 * sizes.heads * min(chunk, QUERY_ROWS) * max_seq
    copies = 4 * sizes.kv_heads * sizes.head_dim * max_seq
    recurrent = (2 * spec.channels + 4 * spec.value_heads * spec.value_dim for spec in states)
    activations += chunk * max(recurrent, default=0)
    return FLOAT * (activations + scores + copies + 2 * sizes.vocab_size)


def plan_memory(
    *,
    sizes: Sizes,
    weights: int,
    specs: Sequence[CacheSpec],
    mode: KvMode,
    slots: int,
    max_seq: int,
    chunk: int,
    residency: Residency,
    states: Sequence[StateSpec] = (),
) -> MemoryPlan:
    """Return what a load needs, for weights of so many bytes; packed ones stay mapped from the file."""
    largest_matrix = FLOAT * sizes.vocab_size * sizes.hidden if residency == "packed" else 0
    return MemoryPlan(
        weights=weights,
        caches=kv_nbytes(specs, mode, slots, max_seq),
        states=slots * state_nbytes(states),
        scratch=scratch_nbytes(sizes, chunk, max_seq, states) + largest_matrix,
    )


def fits(plan: MemoryPlan, available: int) -> bool:
    """Tell whether the plan leaves the rest of the machine its share."""
    return plan.total <= available * USABLE


def admit(plan: MemoryPlan, available: int) -> None:
    """Raise MemoryLimitError with both numbers unless the plan fits."""
    if not fits(plan, available):
        raise MemoryLimitError(
            plan.total,
            int(available * USABLE),
            what=f"this model ({plan.weights >> 20} MiB weights, {plan.caches >> 20} MiB caches, "
            f"{plan.states >> 20} MiB states, {plan.scratch >> 20} MiB scratch)",
            hint="lower memory.max_seq, use memory.kv_cache=q8 or a smaller format",
        )


def _field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of one field a line, or None."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
