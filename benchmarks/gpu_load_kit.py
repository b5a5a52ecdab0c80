"""Synthetic model files, and their loads onto a device, for benchmarks/gpu_load.py.

This file measures nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from gpu_bench_kit import Bench, LaunchedAgain, Report
from gpu_random_model import SHAPES, tensor_infos
from hipfire.base.errors import InternalError
from hipfire.base.types import TensorInfo
from hipfire.cache.block import BLOCK_MODES
from hipfire.cache.kv import kv_mode
from hipfire.checkpoint.hfq_writer import write_hfq
from hipfire.checkpoint.source import Checkpoint
from hipfire.device.pool import Block, Pool
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.models.family import family_of
from hipfire.quant.registry import format_of
from hipfire.runtime.gpu_load import GpuModel, GpuPlan, Request, build, plan_load
from hipfire.runtime.gpu_memory import KvBackend
from hipfire.runtime.identify import named_checkpoint, read_config
from hipfire.runtime.retained import Graph
from hipfire.runtime.runner import Runner

# weights that are encoded for a file; its tensors repeat them
_PATTERN_ELEMENTS = 1 << 22
# enough that the step is recorded, captured and replayed
STEPS = 4


SMALL: Mapping[str, Any] = {
    **SHAPES["qwen3-8b"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class Sizes:
    """The models of a run: `large` for rates, `small` for everything else."""

    large: Mapping[str, Any]
    small: Mapping[str, Any]
    max_seq: int
    chunk: int
    prompt: int


FULL = Sizes(SHAPES["qwen3-32b"], SMALL, max_seq=2048, chunk=512, prompt=300)
# for interpreted kernels
TINY = Sizes(SHAPES["tiny"], SHAPES["tiny"], max_seq=300, chunk=4, prompt=2)


def write_model(path: Path, fields: Mapping[str, Any], fmt: str) -> int:
    """Write a container of random weights and return its bytes."""
    family = family_of(str(fields["model_type"]))
    infos = list(tensor_infos(family.from_hf(fields), fmt).values())
    patterns: dict[tuple[int, int], memoryview] = {}

    def chunks(info: TensorInfo) -> Iterator[memoryview]:
        key = info.qtype, info.rows_cols[1]
        if key not in patterns:
            patterns[key] = _pattern(*key)
        left, data = info.nbytes, patterns[key]
        while left:
            yield data[:left]
            left -= min(left, len(data))

    metadata = {"architecture": fields["model_type"], "config": dict(fields), "row_order": "half_split"}
    write_hfq(path, family.arch_id, metadata, infos, (chunks(info) for info in infos))
    return path.stat().st_size


def _pattern(qtype: int, cols: int) -> memoryview:
    """Return whole rows of random weights in a format."""
    fmt, rows = format_of(qtype), max(1, _PATTERN_ELEMENTS // cols)
    assert fmt.encode is not None
    weights = torch.randn(rows, cols, generator=torch.Generator().manual_seed(cols)) * cols**-0.5
    return memoryview(fmt.encode(weights).contiguous().view(torch.uint8).flatten().numpy())


class Loads:
    """Loads of synthetic files on one device."""

    def __init__(self, report: Report, sizes: Sizes, fmt: str, folder: Path) -> None:
        self.report = report
        self.bench: Bench = report.bench
        self.sizes = sizes
        self.fmt = fmt
        self.folder = folder
        self._plans: dict[KvBackend, GpuPlan] = {}

    def request(self, checkpoint: Checkpoint, backend: KvBackend = "auto") -> Request:
        """Return the request to load an open checkpoint."""
        family, config = read_config(checkpoint)
        return Request(
            family=family,
            config=config,
            named=named_checkpoint(checkpoint, family, config),
            mode=kv_mode("q8", BLOCK_MODES),
            max_seq=self.sizes.max_seq,
            slots=1,
            chunk=self.sizes.chunk,
            kv_backend=backend,
            arithmetic="int8",
        )

    def built(
        self,
        checkpoint: Checkpoint,
        pool: Pool | Passing,
        backend: KvBackend = "auto",
        failing: bool = False,
        change: Callable[[Request], Request] = lambda request: request,
    ) -> GpuModel:
        """Load a checkpoint with memory of a pool; with `failing`, no step can be captured."""
        again = LaunchedAgain()
        machine = self.bench.machine(again.capture)
        machine = dataclasses.replace(machine, pool=cast(Pool, pool))
        if failing:
            machine = dataclasses.replace(machine, capture=capture_fails)
        wanted = change(self.request(checkpoint, backend))
        if backend not in self._plans:
            self._plans[backend] = plan_load(wanted, machine)
        model = build(wanted, machine, self._plans[backend])
        engine = model.runner.launcher.engines["triton"]
        assert isinstance(engine, GpuEngine)
        again.engine = engine
        return model

    def use(self, runner: Runner) -> list[torch.Tensor]:
        """Read a prompt and decode, far enough that steps are replayed; return all logits."""
        prompt = [(7 * place) % runner.model.vocab_size for place in range(self.sizes.prompt)]
        found = [runner.prefill(0, prompt)]
        for place in range(len(prompt), len(prompt) + STEPS):
            found.append(runner.decode(0, place % runner.model.vocab_size, place))
        self.bench.synchronize()
        return [each.cpu() for each in found]


def capture_fails(run: Callable[[], object]) -> Graph:
    """Refuse to capture anything."""
    raise InternalError("an injected fault of a capture")


class Passing:
    """A pool whose blocks come from a given function, and that keeps what comes back for the next load."""

    def __init__(self, pool: Pool, take: Callable[[int], Block]) -> None:
        self.take = take
        self.counters = pool.counters

    def drain(self) -> int:
        """Drop nothing: retries must find every block again."""
        return 0
