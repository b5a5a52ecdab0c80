"""Memory blocks that are kept for the next request of their size, with counters that show a leak.

A `Block` owns its memory and is given back once; a `View` borrows from a block and cannot give back anything.
Blocks have the size that was asked for: rounding up to a power of two would waste a large part of a device.
The power of two only says on which list a block waits. Lists are last in, first out, and a waiting block that
is too small for a request of its list is dropped for good. So whoever builds several things gives them back
in reverse order: then the next equal construction finds every block again.

This file does not know what is kept in the memory, nor which device it is on. A pool belongs to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hipfire.base.errors import InternalError, MemoryLimitError

Allocate = Callable[[int], torch.Tensor]

MINIMUM = 256
# addresses that every block begins at; what vector loads and the largest tiles want
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class View:
    """Bytes that belong to a block: uint8 [n]. They must not be used after their owner was released."""

    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """What a pool has done, and what it holds.

    `fresh` counts allocations from the device and `reused` requests that a waiting block served; `dropped`
    counts blocks that went back to the device. `live` blocks are with their owners, `waiting` ones on the
    lists. Live bytes are those that were asked for, the others those that were allocated.
    """

    fresh: int
    fresh_bytes: int
    reused: int
    reused_bytes: int
    dropped: int
    dropped_bytes: int
    live: int
    live_bytes: int
    waiting: int
    waiting_bytes: int


class Block:
    """The owner of some memory, uint8 [nbytes].

    `give_back` is called with the block when it is released, which can happen once.
    """

    def __init__(self, memory: torch.Tensor, give_back: Callable[[Block], None]) -> None:
        self.nbytes = memory.numel()
        self._memory: torch.Tensor | None = memory
        self._give_back = give_back

    @property
    def memory(self) -> torch.Tensor:
        """The bytes; InternalError after the release."""
        if self._memory is None:
            raise InternalError(f"a block of {self.nbytes} bytes was used after its release")
        return self._memory

    @property
    def released(self) -> bool:
        """Tell whether the memory has been given back."""
        return self._memory is None

    def view(self, offset: int = 0, nbytes: int | None = None) -> View:
        """Lend `nbytes` bytes from `offset` on, by default all that follow; InternalError beyond the end."""
        end = self.nbytes if nbytes is None else offset + nbytes
        if not 0 <= offset <= end <= self.nbytes:
            raise InternalError(f"a view of bytes {offset} to {end} in a block of {self.nbytes} bytes")
        return View(self.memory[offset:end])

    def release(self) -> None:
        """Give the memory back; InternalError the second time, when it may be another owner's already."""
        if self._memory is None:
            raise InternalError(f"a block of {self.nbytes} bytes was released twice")
        self._memory = None
        self._give_back(self)


class Pool:
    """Hands out blocks of exact sizes and keeps those that come back.

    `allocate` returns new memory of a number of bytes, uint8 and aligned to ALIGNMENT; it raises
    MemoryLimitError where there is none. `trim` is called after waiting blocks were dropped, for allocators
    that keep memory themselves.
    """

    def __init__(self, allocate: Allocate, trim: Callable[[], None] | None = None) -> None:
        self._allocate = allocate
        self._trim = trim
        self._lists: dict[int, list[torch.Tensor]] = {}
        # by the block itself, so a block of another pool cannot come in here
        self._live: dict[Block, torch.Tensor] = {}
        self._fresh = self._fresh_bytes = 0
        self._reused = self._reused_bytes = 0
        self._dropped = self._dropped_bytes = 0

    def take(self, nbytes: int) -> Block:
        """Return a block of `nbytes` bytes, uninitialized; MemoryLimitError where no memory is left.

        Before it gives up, the pool drops everything that waits and tries once more.
        """
        if nbytes < 0:
            raise InternalError(f"a block of {nbytes} bytes was asked for")
        whole = self._waiting_block(nbytes)
        if whole is None:
            whole = self._new(max(nbytes, MINIMUM))
        else:
            self._reused += 1
            self._reused_bytes += whole.numel()
        block = Block(whole[:nbytes], self._return)
        self._live[block] = whole
        return block

    def drain(self) -> int:
        """Drop all blocks that wait and return their bytes; live blocks stay with their owners."""
        waiting = [whole for blocks in self._lists.values() for whole in blocks]
        self._lists.clear()
        nbytes = sum(whole.numel() for whole in waiting)
        self._dropped += len(waiting)
        self._dropped_bytes += nbytes
        del waiting
        if self._trim is not None:
            self._trim()
        return nbytes

    def counters(self) -> PoolCounters:
        """Return the counters as they are now."""
        waiting = [whole.numel() for blocks in self._lists.values() for whole in blocks]
        return PoolCounters(
            fresh=self._fresh,
            fresh_bytes=self._fresh_bytes,
            reused=self._reused,
            reused_bytes=self._reused_bytes,
            dropped=self._dropped,
            dropped_bytes=self._dropped_bytes,
            live=len(self._live),
            live_bytes=sum(block.nbytes for block in self._live),
            waiting=len(waiting),
            waiting_bytes=sum(waiting),
        )

    def _waiting_block(self, nbytes: int) -> torch.Tensor | None:
        blocks = self._lists.get(_bucket(nbytes), [])
        while blocks:
            whole = blocks.pop()
            if whole.numel() >= nbytes:
                return whole
            self._dropped += 1
            self._dropped_bytes += whole.numel()
        return None

    def _new(self, nbytes: int) -> torch.Tensor:
        try:
            whole = self._allocate(nbytes)
        except MemoryLimitError:
            if not any(self._lists.values()):
                raise
            self.drain()
            whole = self._allocate(nbytes)
        if whole.dtype != torch.uint8 or whole.shape != (nbytes,) or whole.data_ptr() % ALIGNMENT:
            raise InternalError(f"the allocator returned something else than {nbytes} aligned bytes")
        self._fresh += 1
        self._fresh_bytes += nbytes
        return whole

    def _return(self, block: Block) -> None:
        whole = self._live.pop(block)
        self._lists.setdefault(_bucket(whole.numel()), []).append(whole)


def device_pool(device: torch.device) -> Pool:
    """Return a pool of the device's memory; on the CPU, of aligned memory of the process."""
    if device.type == "cpu":
        return Pool(_host_memory)

    def allocate(nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(device)
            raise MemoryLimitError(nbytes, free, what=f"a block on {device}") from error

    return Pool(allocate, torch.cuda.empty_cache)


def free_host_memory() -> int:
    """Return the bytes of physical memory that are free now; 0 where the system does not tell."""
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _host_memory(nbytes: int) -> torch.Tensor:
    try:
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    except RuntimeError as error:
        # torch has no class of its own for this on the CPU, and nothing else can go wrong here
        raise MemoryLimitError(nbytes, free_host_memory(), what="a block in host memory") from error
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def _bucket(nbytes: int) -> int:
    """Return the power of two at or above a size, at least MINIMUM."""
    return max(MINIMUM, 1 << (nbytes - 1).bit_length() if nbytes else 0)
