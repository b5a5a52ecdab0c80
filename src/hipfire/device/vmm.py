"""Memory that grows without moving: a range of addresses is reserved once, memory is mapped into it later.

Graphs and recorded launches hold addresses. A cache in an `Arena` can grow under them, and takes only the
memory that its sequences fill. The range is divided into lanes of one size, one for each sequence; each lane
grows from its own start.

A `MemoryDriver` does the work on one device; the drivers are in files of their own. This file does not know
devices, nor what is kept in the memory. An arena belongs to one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hipfire.base.errors import HipfireError, InternalError


class MemoryDriver(Protocol):
    """Addresses and physical memory of one device. All sizes are multiples of `granularity`, in bytes.

    A call that fails raises a HipfireError (MemoryLimitError where memory is short) and has changed nothing.
    """

    @property
    def granularity(self) -> int:
        """The unit of memory."""

    def reserve(self, nbytes: int) -> int:
        """Reserve a range and return its address; nothing can be read or written there."""

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back in which nothing is mapped."""

    def create(self, nbytes: int) -> int:
        """Take physical memory and return its handle."""

    def release(self, handle: int) -> None:
        """Give physical memory back."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Place physical memory at an address; it cannot be used yet."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`, whose address and size these are."""

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write all of this range, in which everything is mapped."""

    def synchronize(self) -> None:
        """Wait until nothing uses the memory."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a range as uint8 [nbytes] that does not own it; something must be mapped at `address`."""


@dataclass(slots=True)
class _Segment:
    """Physical memory at its place, as far as it still has either."""

    address: int
    nbytes: int
    handle: int | None
    mapped: bool


class Arena:
    """A reserved range of `lanes` lanes, each of `lane_bytes` rounded up to the driver's granularity.

    Nothing is mapped at first. Tensors that an arena returns do not own its memory. They must not be used
    after `release`, nor beyond what is mapped.
    """

    def __init__(self, driver: MemoryDriver, lane_bytes: int, lanes: int = 1) -> None:
        if lane_bytes <= 0 or lanes <= 0:
            raise InternalError(f"an arena of {lanes} lanes of {lane_bytes} bytes was asked for")
        self._driver = driver
        self.lane_stride = self._rounded(lane_bytes)
        self.reserved = self.lane_stride * lanes
        # of all lanes, in the order of growth; what a failed growth could not undo is here too
        self._segments: list[_Segment] = []
        self._mapped = [0] * lanes
        self._releasing = False
        self._address: int | None = driver.reserve(self.reserved)

    @property
    def base(self) -> int:
        """The first address; lane i begins at base + i * lane_stride. InternalError after the release."""
        if self._address is None:
            raise InternalError("an arena was used after its release")
        return self._address

    @property
    def nbytes(self) -> int:
        """The bytes of physical memory in all lanes."""
        return sum(segment.nbytes for segment in self._segments if segment.handle is not None)

    def mapped(self, lane: int = 0) -> int:
        """Return how many bytes of a lane can be used, from its start."""
        return self._mapped[lane]

    def grow(self, nbytes: int, lane: int = 0) -> int:
        """Map at least `nbytes` more bytes behind those of a lane, and return how many of it are mapped then.

        The size is rounded up to the granularity. InternalError beyond the end of the lane or after a failure
        that could not be undone, before anything changes. If the driver fails, its error goes through and the
        lane is as before.
        """
        start, before, size = self._start(lane), self.mapped(lane), self._rounded(nbytes)
        if nbytes <= 0 or before + size > self.lane_stride:
            raise InternalError(
                f"a lane of {self.lane_stride} bytes with {before} mapped cannot grow by {nbytes} bytes"
            )
        segment = _Segment(start + before, size, self._driver.create(size), mapped=False)
        try:
            self._driver.map(segment.address, size, _handle(segment))
            segment.mapped = True
            # from the lane's start: some drivers refuse ranges that begin elsewhere
            self._driver.allow(start, before + size)
        except BaseException:
            if self._undo(segment) is not None:
                self._segments.append(segment)
                self._releasing = True
            raise
        self._segments.append(segment)
        self._mapped[lane] = before + size
        return before + size

    def ensure(self, nbytes: int, lane: int = 0) -> int:
        """Grow a lane until `nbytes` of it are mapped, if they are not, and return how many are then."""
        missing = nbytes - self.mapped(lane)
        return self.grow(missing, lane) if missing > 0 else self.mapped(lane)

    def view(self, nbytes: int, lane: int = 0) -> torch.Tensor:
        """Return the first `nbytes` bytes of a lane as uint8 [nbytes]; InternalError unless all is mapped."""
        start = self._start(lane)
        if not 0 < nbytes <= self.mapped(lane):
            raise InternalError(f"a view of {nbytes} bytes in a lane with {self.mapped(lane)} mapped")
        return self._driver.tensor(start, nbytes)

    def whole(self) -> torch.Tensor:
        """Return the whole range as uint8 [lanes, lane_stride], mapped or not, for addresses that stay.

        InternalError before the first lane has begun to grow: runtimes find the device by the first address.
        """
        start = self._start(0)
        if not self._mapped[0]:
            raise InternalError("an arena has no tensor before its first lane has grown")
        return self._driver.tensor(start, self.reserved).view(len(self._mapped), self.lane_stride)

    def release(self) -> None:
        """Wait for the device, then unmap and give back everything, what came last first.

        Goes on past errors and raises the first one; what is left can be released by another call.
        InternalError once all has been given back.
        """
        address = self.base
        self._releasing = True
        first: HipfireError | None = None
        try:
            self._driver.synchronize()
        except HipfireError as error:
            first = error
        for index in reversed(range(len(self._segments))):
            failed = self._undo(self._segments[index])
            if failed is None:
                del self._segments[index]
            first = first or failed
        if not self._segments:
            try:
                self._driver.free(address, self.reserved)
                self._address = None
            except HipfireError as error:
                first = first or error
        if first is not None:
            raise first

    def _start(self, lane: int) -> int:
        """Return a lane's address; InternalError for a lane that is not there or if a release has begun."""
        if not 0 <= lane < len(self._mapped):
            raise InternalError(f"an arena of {len(self._mapped)} lanes has no lane {lane}")
        if self._releasing and self._address is not None:
            raise InternalError("an arena that is partly released can only be released")
        return self.base + lane * self.lane_stride

    def _undo(self, segment: _Segment) -> HipfireError | None:
        """Unmap a segment and give its memory back, as far as that is not done; return the first error."""
        first: HipfireError | None = None
        if segment.mapped:
            try:
                self._driver.unmap(segment.address, segment.nbytes)
                segment.mapped = False
            except HipfireError as error:
                first = error
        if segment.handle is not None:
            try:
                self._driver.release(segment.handle)
                segment.handle = None
            except HipfireError as error:
                first = first or error
        return first

    def _rounded(self, nbytes: int) -> int:
        unit = self._driver.granularity
        return -(-nbytes // unit) * unit


def _handle(segment: _Segment) -> int:
    if segment.handle is None:
        raise InternalError("memory without a handle cannot be mapped")
    return segment.handle
