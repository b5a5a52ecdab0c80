"""Memory of key and value caches on a device: taken at once, or mapped as sequences grow.

This file does not know what a block of a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from hipfire.base import log
from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.device.pool import Block
from hipfire.device.vmm import Arena, MemoryDriver

KvBackend = Literal["auto", "vmm", "legacy"]


class OwnedCacheMemory(Protocol):
    """Memory of a cache (`cache.block.CacheMemory`) that can be given back."""

    def buffer(self) -> torch.Tensor:
        """Return uint8 [slots, blocks of a slot, bytes of a block]."""

    def ensure(self, slot: int, blocks: int) -> None:
        """See to it that the first `blocks` blocks of a slot are there."""

    def total_mapped(self) -> int:
        """Return the bytes of memory that it has mapped by now, besides what it took of a pool."""

    def release(self) -> None:
        """Give the memory back."""


class WholeCacheMemory:
    """All blocks of all slots in one piece of memory, there from the start."""

    def __init__(self, take: Callable[[int], Block], slots: int, blocks: int, block_bytes: int) -> None:
        self._block = take(slots * blocks * block_bytes)
        memory = self._block.memory[: slots * blocks * block_bytes]
        self._buffer = memory.view(slots, blocks, block_bytes)

    def buffer(self) -> torch.Tensor:
        """Return uint8 [slots, blocks, bytes of a block]."""
        return self._buffer

    def ensure(self, slot: int, blocks: int) -> None:
        """Check that the blocks exist; their memory is there."""
        if not (0 <= slot < self._buffer.shape[0] and blocks <= self._buffer.shape[1]):
            raise InternalError(f"slot {slot} has no {blocks} blocks")

    def total_mapped(self) -> int:
        """Return 0: all is of the pool."""
        return 0

    def release(self) -> None:
        """Give the memory back."""
        self._block.release()


class GrowingCacheMemory:
    """A reserved range of addresses for each slot, with memory as far as the slot's sequence reached."""

    def __init__(self, driver: MemoryDriver, slots: int, blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._arena = Arena(driver, blocks * block_bytes, slots)
        try:
            # the runtime finds the device of a tensor by its first address
            self._arena.ensure(block_bytes, 0)
            whole = self._arena.whole()
        except Exception:
            self._arena.release()
            raise
        stride = whole.stride(0)
        self._buffer = whole.as_strided((slots, blocks, block_bytes), (stride, block_bytes, 1))

    def buffer(self) -> torch.Tensor:
        """Return uint8 [slots, blocks, bytes of a block]; only what `ensure` asked for may be touched."""
        return self._buffer

    def ensure(self, slot: int, blocks: int) -> None:
        """Map memory for the first `blocks` blocks of a slot; MemoryLimitError if there is none."""
        self._arena.ensure(blocks * self._block_bytes, slot)

    def mapped(self, slot: int) -> int:
        """Return the bytes that a slot has memory for."""
        return self._arena.mapped(slot)

    def total_mapped(self) -> int:
        """Return the bytes that all slots have memory for."""
        return self._arena.nbytes

    def release(self) -> None:
        """Give memory and addresses back."""
        self._arena.release()


def cache_memory(
    backend: KvBackend,
    driver: Callable[[], MemoryDriver] | None,
    take: Callable[[int], Block],
    slots: int,
    blocks: int,
    block_bytes: int,
) -> WholeCacheMemory | GrowingCacheMemory:
    """Return memory for a cache; UnsupportedError if it must grow and cannot. `auto` grows where it can."""
    found = _growing(backend, driver)
    if found is None:
        return WholeCacheMemory(take, slots, blocks, block_bytes)
    return GrowingCacheMemory(found, slots, blocks, block_bytes)


def _growing(backend: KvBackend, driver: Callable[[], MemoryDriver] | None) -> MemoryDriver | None:
    """Return what maps memory as caches grow; None where all of it is taken at once."""
    if backend == "legacy":
        return None
    try:
        if driver is None:
            raise UnsupportedError("memory that grows in place is not available on this device")
        return driver()
    except UnsupportedError as error:
        if backend == "auto":
            log.logger().info(f"caches take all of their memory at once: {error}")
            return None
        raise UnsupportedError(error.message, hint="use memory.kv_backend=legacy") from error
