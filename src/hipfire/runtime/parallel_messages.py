"""What the first process tells the others through a pipe: numbers, each message led by their count.

A message is int64 numbers: count, kind, then what the kind needs. This file starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from hipfire.base.errors import InternalError
from hipfire.layers.context import Segment

Batch = Sequence[tuple[Segment, Sequence[int]]]
_STOP, _STEP, _SHARE = range(3)
_WIDTH = 8
# no step is that long; a larger count is no count
_MOST = 1 << 26


@dataclass(frozen=True, slots=True)
class Step:
    """Run a step over a batch."""

    batch: Batch
    every_row: bool


@dataclass(frozen=True, slots=True)
class ShareRows:
    """Copy rows of a slot."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


Message = Step | ShareRows | Stop


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    if isinstance(message, Stop):
        numbers = [_STOP]
    elif isinstance(message, ShareRows):
        numbers = [_SHARE, message.source, message.target, message.count]
    else:
        numbers = [_STEP, int(message.every_row), len(message.batch)]
        for segment, _ in message.batch:
            numbers += (segment.slot, segment.start, segment.length)
        for _, tokens in message.batch:
            numbers.extend(tokens)
    return np.array([len(numbers), *numbers], dtype="<i8").tobytes()


def read(stream: BinaryIO) -> Message:
    """Return the next message; a stream that has ended says stop. InternalError for anything else."""
    count = _numbers(stream, 1)
    if not count:
        return Stop()
    if not 0 < count[0] <= _MOST:
        raise InternalError(f"a message of {count[0]} numbers came")
    numbers = _numbers(stream, count[0])
    if not numbers:
        return Stop()
    kind, rest = numbers[0], numbers[1:]
    if kind == _STOP:
        return Stop()
    if kind == _SHARE:
        return ShareRows(*rest)
    if kind != _STEP:
        raise InternalError(f"a message of the unknown kind {kind} came")
    every_row, segments = bool(rest[0]), rest[1]
    places, tokens = rest[2 : 2 + 3 * segments], rest[2 + 3 * segments :]
    batch: list[tuple[Segment, Sequence[int]]] = []
    for index in range(0, 3 * segments, 3):
        segment = Segment(*places[index : index + 3])
        batch.append((segment, tokens[: segment.length]))
        tokens = tokens[segment.length :]
    return Step(batch, every_row)


def _numbers(stream: BinaryIO, count: int) -> list[int]:
    data = stream.read(count * _WIDTH)
    if len(data) < count * _WIDTH:
        return []
    numbers: list[int] = np.frombuffer(data, dtype="<i8").tolist()
    return numbers
