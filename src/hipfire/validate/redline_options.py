"""The flags of the redline harness, checked. This file starts nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hipfire.runtime.parity_steps import GUARD_ROWS
from hipfire.validate.harness_options import KV_MODES, UsageError

POSITIONS, CONTEXT, CAPTURES, PROCESSES = 15, 128, 2, 2
MEASURES, ITERATIONS = 5, 100
TIMEOUT_S: Final = 600.0
PREFILL_CHUNK: Final = 64
WEIGHTS: Final = ("auto", "panels", "decoded", "packed")


@dataclass(frozen=True, slots=True)
class RedlineOptions:
    """What to prove: `positions` steps after `context` tokens, for each number of sequences in `batch`.

    Each key is captured `captures` times, at another context each time, in each of `processes` processes.
    UsageError for values that prove nothing.
    """

    model: str
    positions: int = POSITIONS
    context: int = CONTEXT
    batch: tuple[int, ...] = (1,)
    captures: int = CAPTURES
    processes: int = PROCESSES
    measures: int = MEASURES
    iterations: int = ITERATIONS
    kv_mode: str = "auto"
    weights: str = "auto"
    threads: int | None = None
    max_seq: int | None = None
    timeout: float = TIMEOUT_S
    json: Path | None = None
    log: Path | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("--positions", self.positions, 1, 4096),
            ("--context", self.context, 1, 2**20),
            ("--captures", self.captures, 2, 100),
            ("--processes", self.processes, 1, 8),
            ("--measures", self.measures, 0, 1000),
            ("--iterations", self.iterations, 1, 100_000),
            ("--threads", self.threads, 1, 4096),
            ("--max-seq", self.max_seq, 2, 2**20),
            ("--timeout", self.timeout, 1, 86_400),
            *(("--batch", size, 1, 63) for size in self.batch),
        ):
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value:g} but must be from {low:g} to {high:g}")
        if not self.batch or len(set(self.batch)) < len(self.batch):
            raise UsageError("--batch names no size, or one twice")

    @property
    def slots(self) -> int:
        """Return the slots of a load: one of them takes part in no step."""
        return max(self.batch) + 1

    @property
    def room(self) -> int:
        """Return the positions of a load: what is fed, and rows behind it that must not change."""
        if self.max_seq is not None:
            return self.max_seq
        fed = max(self.positions + self.captures + max(self.batch), self.iterations)
        return self.context + fed + GUARD_ROWS

    def load_fields(self) -> dict[str, Any]:
        """Return the load's parameters as a message to the daemon has them."""
        return {
            "kv_mode": self.kv_mode,
            "weights": self.weights,
            "threads": self.threads,
            "max_seq": self.room,
            "slots": self.slots,
            "prefill_chunk": PREFILL_CHUNK,
        }


def parse(words: Sequence[str], program: str) -> RedlineOptions:
    """Return what the words of a command line say; UsageError for anything else than flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Prove that replayed decode steps leave the bytes of steps run operation by operation.",
        epilog="exit codes: 0 pass, 1 fail, 2 refused, 3 incomplete, 130 interrupted",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="path, tag or installed name of the model")
    add("--positions", type=int, default=POSITIONS, help=f"steps that are compared; {POSITIONS}")
    add("--context", type=int, default=CONTEXT, help=f"tokens read before them; {CONTEXT}")
    add("--batch", type=int, nargs="+", default=[1], help="numbers of sequences in a step; 1")
    add("--captures", type=int, default=CAPTURES, help=f"recordings whose keys must agree; {CAPTURES}")
    add("--processes", type=int, default=PROCESSES, help=f"processes whose keys must agree; {PROCESSES}")
    add("--measures", type=int, default=MEASURES, help=f"timed runs, no proof of speed; {MEASURES}")
    add("--iterations", type=int, default=ITERATIONS, help=f"steps of a timed run; {ITERATIONS}")
    add("--kv-mode", choices=KV_MODES, default="auto", help="how caches are stored; auto")
    add("--weights", choices=WEIGHTS, default="auto", help="how weights are held; auto")
    add("--threads", type=int, help="CPU threads")
    add("--max-seq", type=int, help="positions of the load; as many as are needed")
    add("--timeout", type=float, default=TIMEOUT_S, help=f"seconds for one answer; {TIMEOUT_S:g}")
    add("--json", type=Path, metavar="FILE", help="where the report is written")
    add("--log", type=Path, metavar="FILE", help="where the engine's log is appended")
    given = vars(parser.parse_args(list(words)))
    given["batch"] = tuple(given["batch"])
    return RedlineOptions(**given)
