"""hipfire's worker: loads models, times prefills and decode steps, and looks into the recorded step.

The timed loops are those of `hipfire bench`. This file does not know what its times are compared with.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hipfire
from hipfire.bench.measure import time_decode, time_prefill
from hipfire.checkpoint.source import open_checkpoint
from hipfire.cli.version import library_versions
from hipfire.kernels.cpu.target import cpu_path, host_features
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model
from hipfire.runtime.weights import resident_nbytes
from peers.files import read_whole
from peers.serve import serve

# far more than any cache of a processor holds
READ_BYTES = 256 << 20
READS = 3
# what tells one kind of processor from another in a report
FEATURES = ("avx2", "fma", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "neon", "dotprod", "i8mm")


class Models:
    """The loaded models by their keys, and the answers to requests."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._loaded: dict[str, LoadedModel] = {}
        self._memory = torch.empty(0, dtype=torch.int64)
        torch.set_num_threads(threads)

    def info(self) -> dict[str, Any]:
        """Return versions, and which instructions the kernels are made of."""
        features = host_features()
        return {
            "version": hipfire.__version__,
            "python": platform.python_version(),
            "libraries": {name: found for name, found in library_versions().items() if found},
            "path": cpu_path(),
            "features": [name for name in FEATURES if name in features],
        }

    def load(self, key: str, path: str, n_ctx: int, slots: int) -> dict[str, Any]:
        """Load a model; returns the size of its vocabulary and the bytes of its weights in memory.

        `step_bytes` are those that every step reads.
        """
        options = LoadOptions(threads=self._threads, max_seq=n_ctx, slots=slots)
        loaded = self._loaded[key] = load_model(Path(path), options)
        with open_checkpoint(Path(path)) as checkpoint:
            held = [resident_nbytes(info, loaded.residency) for info in read_whole(checkpoint.tensors)]
        return {
            "vocab": loaded.runner.model.vocab_size,
            "memory_bytes": loaded.plan.weights,
            "step_bytes": sum(held),
        }

    def unload(self, key: str) -> dict[str, Any]:
        """Release a model."""
        del self._loaded[key]
        # a model and its recorded steps refer to each other
        gc.collect()
        return {}

    def pp(self, key: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Time a prefill into an empty slot."""
        return {"seconds": time_prefill(self._loaded[key].runner, tokens, time.perf_counter)}

    def tg(self, key: str, context: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Time decode steps of one or more sequences, each after `context`."""
        runner = self._loaded[key].runner
        for slot in range(len(rows)):
            runner.prefill(slot, context)
        return {"seconds": time_decode(runner, rows, len(context), time.perf_counter)}

    def read(self) -> dict[str, Any]:
        """Return the bytes per second at which all threads together read memory."""
        if not self._memory.numel():
            self._memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        seconds = []
        for _ in range(READS):
            began = time.perf_counter()
            self._memory.sum()
            seconds.append(time.perf_counter() - began)
        return {"bytes_per_second": READ_BYTES / statistics.median(seconds)}

    def profile(self, key: str, context: Sequence[int], token: int, repeats: int) -> dict[str, Any]:
        """Return where a decode step after `context` spends its time.

        `kernels` holds (name, rows of the program, seconds in all of them); `program` is the whole program
        in one call, `step` the same through the runner. Without a recorded program there are no kernels.
        """
        runner = self._loaded[key].runner
        runner.prefill(0, context)
        runner.decode(0, token, len(context))
        program = runner.replay.program(1) if runner.replay is not None else None
        if program is None:
            return {"kernels": [], "barriers": 0, "program": 0.0, "step": 0.0}
        kernels = program.time_by_kernel(repeats)
        whole, steps = [], []
        # in turn, so that a machine that drifts slows both alike
        for _ in range(repeats):
            began = time.perf_counter()
            program.run()
            whole.append(time.perf_counter() - began)
            steps.append(time_decode(runner, [[token]], len(context), time.perf_counter))
        return {
            "kernels": [(name, rows, seconds) for name, (rows, seconds) in kernels.items()],
            "barriers": program.barriers,
            "program": statistics.median(whole),
            "step": statistics.median(steps),
        }


def main() -> None:
    """Serve with as many threads as the command line says."""
    models = Models(int(sys.argv[1]))
    names = ("info", "load", "unload", "pp", "tg", "read", "profile")
    serve({name: getattr(models, name) for name in names})


if __name__ == "__main__":
    main()
