"""What the GPU benchmarks share: the machine, its limits, medians of timed replays, tables and JSON.

Times are of graphs between two events of the device, so that no Python stands between launches. On the CPU,
where kernels are interpreted, the same code runs with a clock: that tests the programs and measures nothing.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from hipfire.base.errors import UnsupportedError
from hipfire.cache.states import StateStore
from hipfire.device.graphs import Capturer
from hipfire.device.platform import Gpu, check_supported, find_gpu, keep_kernels
from hipfire.device.pool import device_pool
from hipfire.device.vmm_drivers import memory_driver
from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine, GpuTape
from hipfire.kernels.gpu.target import INTERPRETED, TargetName
from hipfire.kernels.packed import PackedMatrix
from hipfire.quant.packing import PACKINGS
from hipfire.runtime.gpu_load import Machine, _machine
from hipfire.runtime.retained import Capture, Graph

Run = Callable[[], object]
# what a round lasts at least, in seconds, so that events are exact
_ROUND_SECONDS = 0.004
_MOST_REPLAYS = 200
_PLACES = ("--json", "--folder")


@dataclass(frozen=True)
class Bench:
    """The device of a run; `rounds` is how many times are taken for each median."""

    name: str
    device: torch.device
    target: TargetName
    processors: int
    driver: str
    overlapped: bool = False
    gpu: Gpu | None = None
    rounds: int = 7

    @property
    def on_gpu(self) -> bool:
        """Tell whether this measures anything."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def engine(self, arithmetic: Arithmetic = "int8") -> GpuEngine:
        """Return an engine whose results lie in the same memory in every run."""
        return GpuEngine(
            self.device,
            self.target,
            arithmetic=arithmetic,
            processors=self.processors,
            overlapped=self.overlapped,
            scratch=SameScratch(self.device),
        )

    def machine(self, capture: Capture | None = None) -> Machine:
        """Return this device as loading wants it, with a pool of its own; `capture` stands in for graphs."""
        if self.gpu is not None:
            return _machine(self.gpu)
        return Machine(
            self.name,
            self.device,
            self.target,
            self.processors,
            device_pool(self.device),
            overlapped=self.overlapped,
            driver=lambda: memory_driver(self.device),
            capture=capture,
        )

    def facts(self) -> dict[str, Any]:
        """Return what a report says of the machine."""
        return {
            "device": self.name,
            "target": self.target,
            "processors": self.processors,
            "driver": self.driver,
            "torch": str(torch.__version__),
            "triton": str(triton.__version__),
            "python": platform.python_version(),
            "rounds": self.rounds,
        }


def find_bench(device: str, rounds: int = 7) -> Bench:
    """Return the device `gpu` or `cpu` names; UnsupportedError where kernels do not run that way."""
    if device == "cpu":
        if not INTERPRETED:
            raise UnsupportedError("kernels are compiled here", hint="set TRITON_INTERPRET=1 for the CPU")
        return Bench("CPU, interpreted", torch.device("cpu"), "plain", 1, "none", rounds=rounds)
    gpu = find_gpu()
    if gpu is None:
        raise UnsupportedError("there is no GPU", hint="use --device cpu with TRITON_INTERPRET=1")
    check_supported(gpu)
    keep_kernels()
    torch.cuda.set_device(gpu.device)
    overlapped = _machine(gpu).overlapped
    return Bench(
        gpu.name, gpu.device, gpu.vendor, gpu.processors, gpu.driver, overlapped, gpu=gpu, rounds=rounds
    )


class SameScratch:
    """Gives results the same memory in every run: the first run takes it, `settle` begins the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: dict[tuple[str, tuple[int, ...], torch.dtype, int], torch.Tensor] = {}
        self._counts: dict[tuple[str, tuple[int, ...], torch.dtype], int] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a result, the same for the same place in a run."""
        key = name, tuple(shape), dtype
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        place = *key, count
        if place not in self._taken:
            self._taken[place] = torch.empty(key[1], dtype=dtype, device=self._device)
        return self._taken[place]

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Begin a run, whatever is kept."""
        self._counts.clear()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: the median, and the best and worst round."""

    median: float
    best: float
    worst: float
    rounds: int

    def as_json(self) -> dict[str, float]:
        """Return microseconds."""
        return {"median_us": self.median * 1e6, "best_us": self.best * 1e6, "worst_us": self.worst * 1e6}


def _timing(seconds: Sequence[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def clocked(bench: Bench, run: Run, *, warm: int = 1) -> Timing:
    """Return the wall time of a run to its end, the device's work and Python's together."""
    for _ in range(warm):
        run()
    seconds = []
    for _ in range(bench.rounds):
        bench.synchronize()
        began = time.perf_counter()
        run()
        bench.synchronize()
        seconds.append(time.perf_counter() - began)
    return _timing(seconds)


def timed(bench: Bench, run: Run) -> Timing:
    """Return the device's time of what `run` launches, started as one graph; it allocates nothing twice."""
    if not bench.on_gpu:
        return clocked(bench, run, warm=1)
    replay = captured(bench, run)
    timing = replayed(bench, replay)
    # the graph goes with its last reference, which must not be while it runs
    bench.synchronize()
    return timing


def captured(bench: Bench, run: Run) -> Callable[[], None]:
    """Return what starts the launches of `run` as one graph; a second `run` may not allocate."""
    capturer = Capturer(bench.device)
    for _ in range(2):
        # compiles, takes memory, and gives libraries their workspace on the stream of the capture
        capturer.warm_up(lambda: _ignore(run()))
    bench.synchronize()
    return partial(_replay, capturer.capture(run), run)


def _replay(graph: Graph, kept: Run) -> None:
    # what was captured must live as long as the graph: its memory is what the graph works on
    del kept
    graph.replay()


def replayed(bench: Bench, run: Run) -> Timing:
    """Return the device's time of a run that only starts work on the current stream."""
    if not bench.on_gpu:
        return clocked(bench, run)
    run()
    bench.synchronize()
    once = _between_events(run, 3)
    count = max(1, min(_MOST_REPLAYS, round(_ROUND_SECONDS / max(once, 1e-7))))
    return _timing([_between_events(run, count) for _ in range(bench.rounds)])


def _between_events(run: Run, count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def _ignore(result: object) -> None:
    del result


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device does at best: bytes per second of copies, operations per second of matrix products.

    `copies` holds the rate by bytes copied; `copy` is the largest, counting what is read and what is written.
    """

    copies: Mapping[int, float]
    matrix: float

    @property
    def copy(self) -> float:
        """The copy limit in bytes per second."""
        return max(self.copies.values())

    def as_json(self) -> dict[str, Any]:
        """Return GB/s and TFLOP/s."""
        copies = {f"{size >> 20} MiB": rate / 1e9 for size, rate in self.copies.items()}
        return {"copy_gb_s": copies, "copy_limit_gb_s": self.copy / 1e9, "matrix_tflop_s": self.matrix / 1e12}


def measure_limits(bench: Bench, sizes: Sequence[int] = (1 << 30, 4 << 30), matrix: int = 8192) -> Limits:
    """Measure copies of these many bytes, and the product of two bfloat16 matrices of that size."""
    copies = {}
    for nbytes in sizes:
        source = torch.ones(nbytes, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        # not from a graph: that is how programs copy
        copies[nbytes] = 2 * nbytes / replayed(bench, lambda a=source, b=target: b.copy_(a)).median
        del source, target
    a = torch.randn(matrix, matrix, device=bench.device).bfloat16()
    b = torch.randn(matrix, matrix, device=bench.device).bfloat16()
    out = torch.empty_like(a)
    seconds = replayed(bench, lambda: torch.mm(a, b.t(), out=out)).median
    return Limits(copies, 2 * matrix**3 / seconds)


class LaunchedAgain:
    """Stands in for captured graphs where there are none: a replay starts the recorded launches again."""

    def __init__(self) -> None:
        self.engine: GpuEngine | None = None
        self.states: StateStore | None = None

    def capture(self, run: Run) -> Graph:
        """Run, and return what starts the launches of that run again; states are as before the run."""
        assert self.engine is not None
        # the launches of this very run, which the engine is recording
        tape = self.engine._tape
        assert tape is not None
        states = self.states
        kept = [states.snapshot(slot) for slot in range(states.slots)] if states is not None else []
        run()
        for slot, snapshot in enumerate(kept):
            assert states is not None
            states.restore(slot, snapshot)
        return _Launches(tape)


class _Launches:
    def __init__(self, tape: GpuTape) -> None:
        self._tape = tape

    def replay(self) -> None:
        for launch in self._tape.launches:
            launch.run()


def fill_random(matrix: PackedMatrix, first: int = 0, rows: int | None = None) -> None:
    """Fill rows of a packed matrix, by default all of them.

    Codes are random, and scales such that products are about as large as the activations.
    """
    taken = slice(first, None if rows is None else first + rows)
    layout = matrix.layout
    matrix.codes[taken].random_(0, 256)
    if matrix.high is not None:
        matrix.high[taken].random_(0, 256)
    spread = 2.0**layout.bits / 12**0.5
    scales = matrix.scales[taken].uniform_(0.5, 1.5).mul_(1.0 / (spread * matrix.cols**0.5))
    if matrix.minima is not None:
        # minus the middle of the codes, so that weights have no mean
        matrix.minima[taken].copy_(scales).mul_(-(2.0**layout.bits - 1) / 2)


def random_matrix(bench: Bench, layout: str, rows: int, cols: int) -> PackedMatrix:
    """Return a random packed matrix on the device."""
    packing = next(each for each in PACKINGS.values() if each.layout.name == layout)
    matrix = packing.empty(
        rows, cols, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=bench.device)
    )
    fill_random(matrix)
    return matrix


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Return a Markdown table whose columns from `numbers_from` on are aligned to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index < numbers_from else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join(
            "-" * (width + 2) if index < numbers_from else "-" * (width + 1) + ":"
            for index, width in enumerate(widths)
        )
        + "|"
    )
    return "\n".join([line(columns), rule, *map(line, rows)])


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for a table, a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


@dataclass
class Report:
    """What a run found, as JSON; `say` prints a line at once."""

    program: str
    bench: Bench
    quiet: bool = False
    parts: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str = "") -> None:
        """Print a line, so that a run that is stopped has told what it knew."""
        if not self.quiet:
            print(text, flush=True)

    def as_json(self) -> dict[str, Any]:
        """Return the whole report."""
        return {
            "program": self.program,
            "date": datetime.date.today().isoformat(),
            "command": [self.program, *_without_places(sys.argv[1:])],
            "machine": self.bench.facts(),
            **self.parts,
        }

    def write(self, path: Path | None) -> None:
        """Write the report if there is a place for it."""
        if path is not None:
            path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")


def _without_places(words: Sequence[str]) -> list[str]:
    """Leave out the options that name files: a report may be read on another machine."""
    kept: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        if previous in _PLACES or word in _PLACES or word.startswith(tuple(f"{name}=" for name in _PLACES)):
            continue
        kept.append(word)
    return kept
