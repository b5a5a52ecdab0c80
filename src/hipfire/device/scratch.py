"""The memory of a step's results: planned once in a rehearsal, then at the same addresses in every step.

A result is asked for by name. Its slot is the first of that name that is free: slots are taken in a block of
layers, and `settle` frees them for the next block, all but those that hold a tensor that is still needed. So
equal sequences of requests get equal slots, and a step needs the memory of one block, not of all of them.
Slots of different names never share memory.

The planner and the fixed scratch satisfy the same interface as any scratch of an engine. They do not know the
engine, nor operations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from hipfire.base.errors import InternalError
from hipfire.device.pool import ALIGNMENT, Block, View
from hipfire.device.staging import Staging, release_all

Key = tuple[str, int]

# no byte of a usual number: neither zero nor part of a small integer, and a NaN in no floating type
GUARD_BYTE = 0xA5
# how many types and shapes of a slot are kept ready: those of decode steps for all batch sizes, and then some
_VIEWS = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """The k-th memory for results called `name`; `shape` and `dtype` are those of its largest result."""

    name: str
    k: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}[{self.k}]"


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one slot, or those of the guard behind it: uint8 [n]."""

    slot: Slot
    view: View


Plan = tuple[Slot, ...]


def merge(plans: Iterable[Plan]) -> Plan:
    """Return the plan that serves every step that one of `plans` serves, in order of first use."""
    largest: dict[Key, Slot] = {}
    for plan in plans:
        for slot in plan:
            _learn(largest, slot)
    return tuple(largest.values())


def plan_nbytes(plan: Plan, guard: int = 0) -> int:
    """Return the device memory that a FixedScratch of this plan takes."""
    return sum(_allocated(slot, guard) for slot in plan)


class ScratchPlanner:
    """Learns the slots that steps need. Its tensors are on the meta device and hold nothing.

    One planner may watch several rehearsals, each begun with `settle(())`; their plans merge.
    """

    def __init__(self) -> None:
        self._slots: dict[Key, Slot] = {}
        # the storage of what was taken since the last settle; views of a tensor have its storage
        self._taken: dict[Key, torch.UntypedStorage] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a meta tensor and note its slot."""
        k = 0
        while (name, k) in self._taken:
            k += 1
        size = tuple(shape)
        _learn(self._slots, Slot(name, k, size, dtype, math.prod(size) * dtype.itemsize))
        tensor = torch.empty(size, dtype=dtype, device="meta")
        self._taken[name, k] = tensor.untyped_storage()
        return tensor

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Free all slots but those of which a tensor in `kept` is a view."""
        # the fixed scratch cannot recognize an empty tensor by its address, so it keeps nothing here either
        needed = [tensor.untyped_storage() for tensor in kept if tensor.numel()]
        self._taken = {
            key: storage for key, storage in self._taken.items() if any(storage is other for other in needed)
        }

    def plan(self) -> Plan:
        """Return the slots in order of first use."""
        return tuple(self._slots.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """A slot's memory. `views` holds it as the types and shapes that were asked for, to make each once."""

    slot: Slot
    memory: torch.Tensor
    views: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor]


class FixedScratch:
    """The memory of a plan, one owner for each slot, at addresses that do not change.

    `take` makes a block of a number of bytes, such as `Pool.take`; if it fails nothing stays taken, and its
    error goes through. With `guard` > 0 that many bytes or more behind each slot are filled with GUARD_BYTE.
    """

    def __init__(self, take: Callable[[int], Block], plan: Plan, guard: int = 0) -> None:
        _check(plan)
        self.plan = plan
        self._guard = guard
        self._places: dict[str, list[_Place]] = {}
        self._taken: set[Key] = set()
        with Staging(take) as staging:
            for slot in plan:
                block = staging.take(str(slot), _allocated(slot, guard))
                if guard:
                    block.view(slot.nbytes).memory.fill_(GUARD_BYTE)
            self._blocks = staging.publish()
        self._ranges: list[tuple[int, int, Key]] = []
        for slot, block in zip(plan, self._blocks, strict=True):
            memory = block.memory[: _aligned(slot.nbytes)]
            self._places.setdefault(slot.name, []).append(_Place(slot, memory, {}))
            self._ranges.append((memory.data_ptr(), memory.data_ptr() + memory.numel(), (slot.name, slot.k)))
        self._ranges.sort()
        self._starts = [start for start, _, _ in self._ranges]

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a result's memory, uninitialized; InternalError if its slot is missing or too small."""
        places = self._places.get(name, [])
        place = next((each for each in places if (name, each.slot.k) not in self._taken), None)
        if place is None:
            raise InternalError(f"scratch {name}[{len(places)}] is not in the plan")
        tensor = place.views.get((dtype, tuple(shape)))
        if tensor is None:
            tensor = _new_view(place, dtype, tuple(shape))
        self._taken.add((name, place.slot.k))
        return tensor

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Free all slots but those that a tensor in `kept` begins in. Tensors elsewhere do not matter."""
        needed: set[Key] = set()
        for tensor in kept:
            index = bisect_right(self._starts, tensor.data_ptr()) - 1
            if tensor.numel() and index >= 0 and tensor.data_ptr() < self._ranges[index][1]:
                needed.add(self._ranges[index][2])
        self._taken &= needed

    def regions(self) -> tuple[Region, ...]:
        """Return the bytes of every slot, without its guard, in the plan's order."""
        return tuple(
            Region(slot, block.view(0, slot.nbytes))
            for slot, block in zip(self.plan, self._blocks, strict=True)
        )

    def guards(self) -> tuple[Region, ...]:
        """Return the bytes behind every slot, in the plan's order; nothing if there are no guards."""
        if not self._guard:
            return ()
        return tuple(
            Region(slot, block.view(slot.nbytes)) for slot, block in zip(self.plan, self._blocks, strict=True)
        )

    def check_guards(self) -> None:
        """Raise InternalError, which names the slot, if something was written behind a slot."""
        for region in self.guards():
            if not bool((region.view.memory == GUARD_BYTE).all()):
                raise InternalError(f"something was written behind scratch {region.slot}")

    def close(self) -> None:
        """Release the memory, last slot first; InternalError the second time."""
        self._places.clear()
        self._ranges.clear()
        self._starts.clear()
        release_all(self._blocks)

    def release(self) -> None:
        """Do what `close` does: a scratch can be a part of a construction."""
        self.close()


def _new_view(place: _Place, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """Return a slot's memory as a tensor, kept for the next step; InternalError if it is too small."""
    numel = math.prod(size)
    nbytes, held = numel * dtype.itemsize, place.slot.nbytes
    if nbytes > held:
        raise InternalError(f"scratch {place.slot} has {held} bytes, but {nbytes} are needed")
    # prompts have any length, so the shapes have no end
    if len(place.views) >= _VIEWS:
        place.views.clear()
    tensor = place.views[dtype, size] = place.memory.view(dtype)[:numel].view(size)
    return tensor


def _check(plan: Plan) -> None:
    """Raise InternalError unless the slots of each name are numbered from 0 on."""
    counts: dict[str, int] = {}
    for slot in plan:
        expected = counts.get(slot.name, 0)
        if slot.k != expected:
            raise InternalError(f"scratch {slot} stands in the plan where {slot.name}[{expected}] belongs")
        counts[slot.name] = expected + 1


def _learn(slots: dict[Key, Slot], slot: Slot) -> None:
    """Keep the larger of this slot and the one that is known."""
    known = slots.get((slot.name, slot.k))
    if known is None or slot.nbytes > known.nbytes:
        slots[slot.name, slot.k] = slot


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _allocated(slot: Slot, guard: int) -> int:
    # whole lines, so that memory can be read as any type
    return _aligned(slot.nbytes) + _aligned(guard)
