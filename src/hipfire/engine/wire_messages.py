"""What a client may tell the daemon besides a turn's request: plain, checked values, one class for each.

This file does not know how they are written on the wire, or what answers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hipfire.base.errors import ValidationError
from hipfire.base.sampling import SamplingParams
from hipfire.runtime.load_options import device_number

MAX_BENCH = 2**20


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """What holds for the whole process: `threads` of loads that name none, and debug lines in the log."""

    threads: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None:
            _within("config.threads", self.threads, 1, 4096)


@dataclass(frozen=True, slots=True)
class LoadParams:
    """How to load a model and run turns on it; a None leaves the choice to the engine.

    `device` is auto, cpu, gpu, or gpu:N, and `tp` how many share the model; `kv_backend` and `activations`
    concern a GPU, `weights` and `threads` the CPU. `max_seq` is in tokens, `template_file` and
    `template_dir` are paths, times are in seconds. `sampling` and `max_tokens` stand in where neither a
    request nor the model's file says. `state_budget` is in MiB, `state_interval` in tokens. `max_queue` and
    `queue_timeout_s` of 0 are no limit.
    """

    max_seq: int | None = None
    kv_mode: str = "auto"
    weights: Literal["auto", "panels", "decoded", "packed"] = "auto"
    threads: int | None = None
    device: str = "auto"
    kv_backend: Literal["auto", "vmm", "legacy"] = "auto"
    activations: Literal["int8", "float"] = "int8"
    tp: int = 1
    slots: int = 4
    prefill_chunk: int | None = None
    state_budget: int = 2048
    state_interval: int = 4096
    template_file: str | None = None
    template_dir: str | None = None
    max_queue: int = 64
    queue_timeout_s: float = 600.0
    commit_timeout_s: float = 30.0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _within("params.slots", self.slots, 1, 64)
        _within("params.tp", self.tp, 1, 64)
        device_number(self.device)
        _within("params.state_budget", self.state_budget, 0, 2**20)
        _within("params.state_interval", self.state_interval, 0, 2**20)
        _within("params.max_queue", self.max_queue, 0, 2**20)
        _within("params.queue_timeout_s", self.queue_timeout_s, 0, 31_536_000)
        _within("params.commit_timeout_s", self.commit_timeout_s, 0, 86_400)
        for name in ("max_seq", "threads", "prefill_chunk", "max_tokens"):
            value, high = getattr(self, name), 4096 if name == "threads" else 2**20
            if value is not None:
                _within(f"params.{name}", value, 1, high)


@dataclass(frozen=True, slots=True)
class Configure:
    """Set what holds for the process; only before the first load."""

    config: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for a sign of life from the loop that runs the turns."""


@dataclass(frozen=True, slots=True)
class Load:
    """Make the model at a path the resident one; `force` ends the turns that run."""

    model: str
    params: LoadParams = field(default_factory=LoadParams)
    force: bool = False

    def __post_init__(self) -> None:
        if not self.model or "\0" in self.model:
            raise ValidationError(f"model is {self.model[:80]!r} but must be a path")


@dataclass(frozen=True, slots=True)
class Unload:
    """Free the resident model; `force` ends the turns that run."""

    force: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop all cached prefixes; `force` ends the turns that run."""

    attempt_id: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class Diag:
    """Ask what the daemon knows about itself."""


@dataclass(frozen=True, slots=True)
class BenchPrefill:
    """Time the reading of so many tokens."""

    tokens: int

    def __post_init__(self) -> None:
        _within("tokens", self.tokens, 1, MAX_BENCH)


@dataclass(frozen=True, slots=True)
class BenchDecode:
    """Time so many steps of one token after a context."""

    context_tokens: int
    iterations: int

    def __post_init__(self) -> None:
        _within("context_tokens", self.context_tokens, 0, MAX_BENCH)
        _within("iterations", self.iterations, 1, MAX_BENCH)


@dataclass(frozen=True, slots=True)
class RedlineCapture:
    """Record a step of `batch` sequences after prompts of so many tokens, and tell what it is known by."""

    context_tokens: int = 16
    batch: int = 1

    def __post_init__(self) -> None:
        _within("context_tokens", self.context_tokens, 1, MAX_BENCH)
        _within("batch", self.batch, 1, 64)


@dataclass(frozen=True, slots=True)
class RedlineShadow:
    """Compare so many steps, taken three ways, byte for byte."""

    context_tokens: int = 16
    positions: int = 15
    batch: int = 1

    def __post_init__(self) -> None:
        _within("context_tokens", self.context_tokens, 1, MAX_BENCH)
        _within("positions", self.positions, 1, 4096)
        _within("batch", self.batch, 1, 64)


Message = (
    Configure
    | Ping
    | Load
    | Unload
    | Reset
    | Diag
    | BenchPrefill
    | BenchDecode
    | RedlineCapture
    | RedlineShadow
)
MESSAGES: dict[str, type[Message]] = {
    "configure": Configure,
    "ping": Ping,
    "load": Load,
    "unload": Unload,
    "reset": Reset,
    "diag": Diag,
    "bench_prefill": BenchPrefill,
    "bench_decode": BenchDecode,
    "redline_capture": RedlineCapture,
    "redline_shadow": RedlineShadow,
}


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValidationError(f"{name} is {value} but must be from {low:g} to {high:.10g}")
