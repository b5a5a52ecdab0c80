"""The CPU engine: runs kernels on its threads, and records what a step ran so that it can be run again.

Implementations of operations call `launch`; each launch is one row of a program. A step is executed row by
row as its operations are started. While recording, the rows are also kept, and `finish` turns them into one
program that the threads walk without Python: with barriers only where a row needs what others wrote.
Replaying reads and writes the same tensors at the same addresses. This file knows no operation.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu.jit import Kernel
from hipfire.kernels.cpu.pool import FIRST_ARGUMENT, ROW_LENGTH, Pool, sections_of

# parameters of glibc's mallopt, and the largest value that it takes for the first
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 << 20

# how the units of a kernel are numbered; kernels of equal numbering give a unit to the same thread
Units = tuple[object, ...]
Argument = int | float | torch.Tensor


@dataclass(frozen=True)
class Launch:
    """One row of a program: the kernel, its arguments, and the tensors it reads and writes."""

    kernel: Kernel
    arguments: tuple[Argument, ...]
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    units: Units | None


@dataclass
class Recording:
    """The launches of a step in the making; `spoiled` names an operation that cannot be replayed."""

    launches: list[Launch] = field(default_factory=list)
    spoiled: str | None = None


class Program:
    """A step as an array of rows; it keeps every tensor alive whose address stands in them."""

    def __init__(self, pool: Pool, launches: Sequence[Launch], scratch: torch.Tensor) -> None:
        launches = merge_quantization(launches)
        self._pool = pool
        self._alive = (launches, scratch)
        self._rows = np.zeros((max(1, len(launches)), ROW_LENGTH), np.int64)
        self.length = len(launches)
        pending: list[Launch] = []
        for index, launch in enumerate(launches):
            if any(_conflict(launch, earlier) for earlier in pending):
                self._rows[index, 0] = 1
                pending = []
            pending.append(launch)
            encode(launch, self._rows[index])
        self._sections = sections_of(self._rows, self.length)

    @property
    def barriers(self) -> int:
        """Return how often the threads wait for each other in one run."""
        return int(self._rows[:, 0].sum())

    @property
    def launches(self) -> Sequence[Launch]:
        """Return the rows as launches, in their order."""
        return self._alive[0]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of the kernels in their order."""
        return tuple(launch.kernel.name for launch in self._alive[0])

    def run(self) -> None:
        """Run the step again on what its input tensors hold now."""
        self._pool.run(self._rows, self._sections)

    def time_by_kernel(self, repeats: int) -> dict[str, tuple[int, float]]:
        """Return, by kernel, its number of rows and the median seconds that they take together.

        The rows of each kernel are run on their own, `repeats` times. What they write is not a step's then:
        this is for measuring only. Waiting at barriers is included, one barrier before every row.
        """
        places: dict[str, list[int]] = {}
        for index, name in enumerate(self.kernels):
            places.setdefault(name, []).append(index)
        times = {}
        for name, indices in places.items():
            rows = np.ascontiguousarray(self._rows[indices])
            rows[:, 0] = 1
            samples = []
            for _ in range(repeats):
                began = time.perf_counter()
                self._pool.run(rows, np.arange(len(indices) + 1, dtype=np.int64))
                samples.append(time.perf_counter() - began)
            times[name] = (len(indices), statistics.median(samples))
        return times


class CpuEngine:
    """The engine of one loaded model: its threads and their scratch memory."""

    def __init__(self, threads: int) -> None:
        keep_freed_memory()
        self.threads = threads
        self.pool = Pool(threads)
        self._row = np.zeros((1, ROW_LENGTH), np.int64)
        self._section = sections_of(self._row, 1)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._recording: Recording | None = None
        self._rehearsed: dict[str, Kernel] | None = None
        self._last: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def launch(
        self,
        kernel: Kernel,
        *arguments: Argument,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        units: Units | None = None,
    ) -> None:
        """Run a kernel now. Tensors among the arguments stand for their addresses.

        `units` describes how the kernel shares out its work: between two kernels of equal units no barrier is
        needed, since whatever a thread reads it has written itself.
        """
        if self._rehearsed is not None:
            self._rehearsed.setdefault(kernel.name, kernel)
            return
        launch = Launch(kernel, arguments, tuple(reads), tuple(writes), units)
        encode(launch, self._row[0])
        self.pool.run(self._row, self._section)
        if self._recording is not None:
            self._recording.launches.append(launch)

    @contextmanager
    def rehearse(self) -> Iterator[dict[str, Kernel]]:
        """Collect the kernels that are launched, by name, and run none of them; results are undefined."""
        found: dict[str, Kernel] = {}
        self._rehearsed = found
        try:
            yield found
        finally:
            self._rehearsed = self._last = None

    def scratch(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """Return scratch memory and the bytes that each part of the work has of it: at least `nbytes`."""
        each = -(-nbytes // 64) * 64
        if self._scratch.numel() < each * self.pool.parts:
            self._scratch = aligned_bytes(each * self.pool.parts)
        return self._scratch, self._scratch.numel() // self.pool.parts // 64 * 64

    def record(self) -> None:
        """Begin to keep launches; what was remembered of earlier ones is forgotten."""
        self._recording = Recording()
        self._last = None

    def spoil(self, name: str) -> None:
        """Note that an operation ran outside of the engine, so this recording cannot be replayed."""
        if self._recording is not None:
            self._recording.spoiled = name

    def settle(self, *kept: torch.Tensor) -> None:
        """Do nothing: results are tensors of their own, and a program keeps all that it needs."""

    def finish(self) -> Program | None:
        """End the recording; returns the program, or None if some operation cannot be replayed."""
        recording, self._recording, self._last = self._recording, None, None
        if recording is None:
            raise InternalError("no recording was begun")
        if recording.spoiled is not None:
            return None
        return Program(self.pool, recording.launches, self._scratch)

    def remembered(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what `remember` was last given for this very tensor, or None."""
        return self._last[1] if self._last is not None and self._last[0] is x else None

    def remember(self, x: torch.Tensor, quantized: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep the quantized form of activations that several weights will read."""
        self._last = (x, quantized)

    def forget(self) -> None:
        """Release what `remember` keeps."""
        self._last = None


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, where it is one that can be told to.

    Activations of a prefill come and go by the megabyte. Given back to the system each time, their pages
    would be cleared and mapped again for every operation, which was seen to take a tenth of the time.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    tune(_MMAP_THRESHOLD, _KEPT_BYTES)
    tune(_TRIM_THRESHOLD, _KEPT_BYTES)


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] at an address that 64 divides."""
    memory = torch.empty(nbytes + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :][:nbytes]


def encode(launch: Launch, row: np.ndarray) -> None:
    """Write a launch without its barrier flag into an int64 [ROW_LENGTH] row."""
    if len(launch.arguments) > ROW_LENGTH - FIRST_ARGUMENT:
        raise InternalError(f"kernel {launch.kernel.name} has {len(launch.arguments)} arguments")
    row[1] = launch.kernel.address
    for index, value in enumerate(launch.arguments, FIRST_ARGUMENT):
        if isinstance(value, torch.Tensor):
            row[index] = value.data_ptr()
        elif isinstance(value, float):
            row[index] = int(np.float32(value).view(np.int32))
        else:
            row[index] = value


def merge_quantization(launches: Sequence[Launch]) -> list[Launch]:
    """Let norms quantize what they wrote, where that is what follows: one row instead of two."""
    merged: list[Launch] = []
    for launch in launches:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.kernel.name, launch.kernel.name) == ("rms-norm", "quantize")
            and launch.reads[0] is last.writes[0]
            and len(last.writes) == 1
            and last.arguments[1] == launch.arguments[1]
        ):
            arguments = (*last.arguments[:9], *launch.writes)
            merged[-1] = Launch(
                last.kernel, arguments, last.reads, (*last.writes, *launch.writes), last.units
            )
        else:
            merged.append(launch)
    return merged


def _conflict(later: Launch, earlier: Launch) -> bool:
    if later.units is not None and later.units == earlier.units:
        return False
    return (
        _overlap(later.reads, earlier.writes)
        or _overlap(later.writes, earlier.writes)
        or _overlap(later.writes, earlier.reads)
    )


def _overlap(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return any(a < d and c < b for a, b in map(_range, some) for c, d in map(_range, others))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses from a tensor's first element to behind its last."""
    span = 0
    if tensor.numel():
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
