"""Where steps of a model run on a GPU: its engine, the memory of a step, and graphs of decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hipfire.cache.block import BlockCache, block_count, block_nbytes
from hipfire.cache.kv import KvMode
from hipfire.cache.states import StateStore, state_nbytes
from hipfire.device.graphs import Capturer
from hipfire.device.scratch import FixedScratch, Plan, Region, ScratchPlanner
from hipfire.kernels.elementwise import GATHER_ROWS
from hipfire.kernels.gpu.engine import FreshScratch, GpuEngine
from hipfire.kernels.launch import Launcher
from hipfire.layers.context import Segment, StepContext
from hipfire.layers.decoder import Decoder
from hipfire.models.family import Model, ModelConfig
from hipfire.runtime.retained import Capture, RetainedDecode
from hipfire.runtime.route import Forward, Retained

# numbers of tokens around which other kernels, or other shares of their work, need other memory
_TURNS = (1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 96, 127, 128, 129, 192, 256, 257)


class GpuSite:
    """The `runtime.runner.Site` of a GPU; steps of up to `tokens` tokens find their memory in `scratch`."""

    def __init__(
        self, engine: GpuEngine, scratch: FixedScratch, tokens: int, capture: Capture | None = None
    ) -> None:
        self.device = engine.device
        self._engine = engine
        self._scratch = scratch
        self._tokens = tokens
        self._capture = capture

    @contextmanager
    def memory(self, tokens: int, *, every_row: bool) -> Iterator[None]:
        """Give a step the planned memory, or fresh memory if it is larger than any that was planned."""
        engine = self._engine
        planned = engine.scratch
        if tokens > self._tokens or every_row:
            engine.scratch = FreshScratch(self.device)
        engine.settle()
        try:
            yield
        finally:
            engine.scratch = planned

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy: the next step writes over a step's own memory."""
        return logits.clone()

    def retained(self, forward: Forward) -> Retained | None:
        """Return what records decode steps, and replays them as graphs."""
        capture = self._capture or Capturer(self.device).capture
        return RetainedDecode(
            self._engine,
            forward,
            capture,
            scratch=lambda: _named(self._scratch.regions()),
            guards=lambda: _named(self._scratch.guards()),
        )


def _named(regions: Sequence[Region]) -> list[tuple[str, torch.Tensor]]:
    return [(str(region.slot), region.view.memory) for region in regions]


class _NoMemory:
    """The memory of a cache that is only rehearsed."""

    def __init__(self, slots: int, blocks: int, block_bytes: int) -> None:
        self._buffer = torch.empty((slots, blocks, block_bytes), dtype=torch.uint8, device="meta")

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def ensure(self, slot: int, blocks: int) -> None:
        """Nothing is there in any case."""


def plan_scratch(
    model: Model,
    config: ModelConfig,
    mode: KvMode,
    engine: GpuEngine,
    *,
    slots: int,
    max_seq: int,
    chunk: int,
) -> Plan:
    """Return the memory that steps need: decode steps of 1 to `slots` tokens, prefills of up to `chunk`.

    `model` may be one without memory (`GpuWeights` on the meta device). Steps are gone through operation by
    operation without running them.
    """
    specs, states = config.cache_specs(), config.state_specs()
    memory = _NoMemory(slots, block_count(max_seq), block_nbytes(specs, mode))
    nothing = torch.empty((slots, state_nbytes(states)), dtype=torch.uint8, device="meta")
    store = StateStore(states, slots, nothing) if states else None
    cache = BlockCache(specs, mode=mode, max_seq=max_seq, memory=memory, states=store)
    launcher, planner = Launcher(engines={"triton": engine}, only="triton"), ScratchPlanner()
    if isinstance(model, Decoder):
        model = model.outline()
    longest = min(chunk, max_seq)
    turns = {min(turn, longest) for turn in _TURNS} | {longest}
    shapes = [[1] * count for count in range(1, slots + 1)]
    for tokens in sorted(turns):
        # several prompts at once need the most logits
        others = min(slots, tokens) - 1
        shapes.append([tokens - others, *[1] * others])
    with engine.rehearse(planner), torch.inference_mode():
        for lengths in shapes:
            engine.settle()
            _rehearse(model, StepContext(launcher, cache, _segments(lengths), torch.device("meta")), lengths)
    return planner.plan()


def _segments(lengths: Sequence[int]) -> list[Segment]:
    return [Segment(slot, 0, length) for slot, length in enumerate(lengths)]


def _rehearse(model: Model, step: StepContext, lengths: Sequence[int]) -> None:
    hidden = model(torch.zeros(sum(lengths), dtype=torch.int64, device="meta"), step)
    if max(lengths) > 1:
        hidden = step.launcher.run(GATHER_ROWS, hidden, step.last_rows())
    model.logits(hidden, step)
