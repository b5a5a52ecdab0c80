"""A model of three small kernels on the GPU engine, with fixed memory and a stand-in for graph capture.

Run as a program it prints the key of its recorded step, for a test that compares processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine, GpuLaunch
from hipfire.kernels.gpu.target import INTERPRETED, TargetName
from hipfire.kernels.launch import Launcher
from hipfire.layers.context import Segment, StepContext
from hipfire.runtime.retained import RetainedDecode

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TARGET: TargetName = "plain" if INTERPRETED else ("hip" if torch.version.hip else "cuda")
SLOTS, MAX_SEQ, WIDTH, VOCAB = 4, 40, 16, 32
GUARD = 64


@triton.jit
def enter_kernel(ids_ptr, rows_ptr, cache_ptr, slot_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    place = tl.load(rows_ptr + 2 * token) * slot_stride + tl.load(rows_ptr + 2 * token + 1) * WIDTH
    columns = tl.arange(0, WIDTH)
    values = ((tl.load(ids_ptr + token) * 31 + columns * 7) % 97).to(tl.float32) / 97.0
    tl.store(cache_ptr + place + columns, values)


@triton.jit
def attend_kernel(rows_ptr, cache_ptr, out_ptr, slot_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    base = cache_ptr + tl.load(rows_ptr + 2 * token) * slot_stride
    columns = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for position in range(tl.load(rows_ptr + 2 * token + 1) + 1):
        total = total * 0.75 + tl.load(base + position * WIDTH + columns)
    tl.store(out_ptr + token * WIDTH + columns, total)


@triton.jit
def score_kernel(x_ptr, logits_ptr, WIDTH: tl.constexpr, VOCAB: tl.constexpr):
    token = tl.program_id(0)
    columns, words = tl.arange(0, WIDTH), tl.arange(0, VOCAB)
    x = tl.load(x_ptr + token * WIDTH + columns)
    weights = ((words[:, None] * 13 + columns[None, :] * 5) % 11 - 5).to(tl.float32)
    tl.store(logits_ptr + token * VOCAB + words, tl.sum(weights * x[None, :], axis=1))


class FixedMemory:
    """A scratch whose k-th result of a name lies at the same address in every step, with guards around it."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, int], torch.Tensor] = {}
        self._taken: dict[str, int] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        number = self._taken.get(name, 0)
        self._taken[name] = number + 1
        if (name, number) not in self.memory:
            size = 2 * GUARD + SLOTS * VOCAB * 4
            self.memory[name, number] = torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE)
        count = torch.Size(shape).numel()
        body = self.memory[name, number][GUARD : GUARD + count * dtype.itemsize]
        return body.view(dtype).view(tuple(shape))

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        if not kept:
            self._taken.clear()

    def regions(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"{name}[{k}]", each[GUARD:-GUARD]) for (name, k), each in self.memory.items()]

    def guards(self) -> list[tuple[str, torch.Tensor]]:
        ends = [
            (f"{name}[{k}]", part)
            for (name, k), each in self.memory.items()
            for part in (each[:GUARD], each[-GUARD:])
        ]
        return [(f"{name} {index}", part) for index, (name, part) in enumerate(ends)]


class CapturingEngine(GpuEngine):
    """The engine, with a mode in which launches are noted and not carried out, as in a graph's capture."""

    captured: list[GpuLaunch] | None = None
    compiled: ClassVar[dict[str, Any]] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], /, **fields: Any) -> None:
        if self.captured is None:
            super().launch(kernel, grid, **fields)
            if self._tape is not None:
                self.compiled[kernel.__name__] = self._tape.launches[-1].compiled
            return
        reads, writes = fields.pop("reads"), fields.pop("writes")
        options = {"num_warps": fields.pop("warps", 4), "num_stages": fields.pop("stages", 1)}
        constants = fields.pop("constants")
        name, used = kernel.__name__, (tuple(reads), tuple(writes))
        launch = GpuLaunch(name, kernel, grid, fields, constants, options, *used, self.compiled.get(name))
        self.captured.append(launch)
        assert self._tape is not None
        self._tape.launches.append(launch)


class Graph:
    """What was captured; `fault` is raised by a replay, before its last launch."""

    def __init__(self, launches: Sequence[GpuLaunch]) -> None:
        self.launches = launches
        self.fault: Exception | None = None

    def replay(self) -> None:
        for index, launch in enumerate(self.launches):
            if self.fault is not None and index == len(self.launches) - 1:
                raise self.fault
            launch.run()


class Cache:
    """One layer of vectors [slots, max_seq, WIDTH]."""

    states = None

    def __init__(self) -> None:
        self.slots, self.max_seq = SLOTS, MAX_SEQ
        self.memory = torch.full((SLOTS, MAX_SEQ, WIDTH), torch.nan, device=DEVICE)

    def ensure(self, slot: int, rows: int) -> None:
        assert slot < SLOTS
        assert rows <= MAX_SEQ

    def tiles(self, lengths: Sequence[int]) -> None:
        del lengths

    def views(self, slot: int, start: int, stop: int) -> list[tuple[str, torch.Tensor]]:
        return [("vectors", self.memory[slot, start:stop])]


class Steps:
    """The model with its cache and what replays its steps: the part of a runner that proofs use."""

    vocab_size = VOCAB

    def __init__(self, *, replaying: bool = True, scratch: Any = None) -> None:
        self.cache: Any = Cache()
        self.model = self
        self.memory = scratch or FixedMemory()
        self.engine = CapturingEngine(DEVICE, TARGET, processors=4, scratch=self.memory)
        self.graphs: list[Graph] = []
        self.before: Callable[[], None] = lambda: None
        self.replay: RetainedDecode | None = None
        if replaying:
            regions = isinstance(self.memory, FixedMemory)
            self.replay = RetainedDecode(
                self.engine,
                self.forward,
                self.capture,
                scratch=self.memory.regions if regions else list,
                guards=self.memory.guards if regions else list,
            )

    def capture(self, run: Callable[[], object]) -> Graph:
        self.engine.captured = []
        try:
            run()
            self.graphs.append(Graph(self.engine.captured))
        finally:
            self.engine.captured = None
        return self.graphs[-1]

    def forward(self, ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        self.before()
        cache, count = self.cache.memory, len(ids)
        strides = {"slot_stride": cache.stride(0)}
        self.engine.launch(
            enter_kernel, (count,), reads=[ids, step.rows], writes=[cache], constants={"WIDTH": WIDTH},
            ids_ptr=ids, rows_ptr=step.rows, cache_ptr=cache, **strides,
        )  # fmt: skip
        out = self.engine.empty("attended", (count, WIDTH))
        self.engine.launch(
            attend_kernel, (count,), reads=[cache, step.rows], writes=[out], constants={"WIDTH": WIDTH},
            rows_ptr=step.rows, cache_ptr=cache, out_ptr=out, **strides,
        )  # fmt: skip
        logits = self.engine.empty("logits", (count, VOCAB))
        self.engine.launch(
            score_kernel, (count,), reads=[out], writes=[logits], constants={"WIDTH": WIDTH, "VOCAB": VOCAB},
            x_ptr=out, logits_ptr=logits,
        )  # fmt: skip
        return logits

    def context(self, segments: Sequence[Segment]) -> StepContext:
        return StepContext(Launcher(), self.cache, segments, DEVICE)

    def step(self, batch: Sequence[tuple[Segment, Sequence[int]]]) -> torch.Tensor:
        logits = None if self.replay is None else self.replay.again(batch)
        if logits is not None:
            return logits
        step, tokens = self.context([each for each, _ in batch]), [one for _, part in batch for one in part]
        slots = {segment.slot for segment in step.segments}
        if self.replay is not None and len(tokens) == len(batch) == len(slots):
            return self.replay.first(step, tokens)
        self.engine.settle()
        return self.forward(torch.tensor(tokens, device=DEVICE), step)

    def decode(self, places: Sequence[tuple[int, int]], tokens: Sequence[int]) -> torch.Tensor:
        """Run a step of single tokens at (slot, position); the logits are the caller's own."""
        batch = [(Segment(slot, at, 1), (token,)) for (slot, at), token in zip(places, tokens, strict=True)]
        return self.step(batch).clone()

    def prefill(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        """Feed a text in chunks of two tokens."""
        for start in range(0, len(tokens), 2):
            part = tokens[start : start + 2]
            logits = self.step([(Segment(slot, start, len(part)), part)])
        return logits[-1]


if __name__ == "__main__":
    steps = Steps()
    steps.decode([(0, 0), (1, 0)], [1, 2])
    assert steps.replay is not None
    facts = steps.replay.facts(2)
    assert facts is not None
    print(facts.key)
