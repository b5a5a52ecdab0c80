"""Loading models for the daemon: whether there will be room, the model with its core, and what it is.

This file knows no message on the wire and no turn.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from hipfire.base import log
from hipfire.base.errors import ContextLengthError
from hipfire.engine.core import CoreLimits, EngineCore
from hipfire.engine.daemon_parts import Progress, Resident
from hipfire.engine.wire_messages import Load, LoadParams, ProcessConfig
from hipfire.layers.context import Segment
from hipfire.runtime.admission import available_memory
from hipfire.runtime.load import LoadedModel, LoadOptions, check_load, load_model
from hipfire.text.reply_format import reply_format

# what stands for "no limit" on the number of waiting turns
UNBOUNDED: Final = 2**31


class LoadedResident:
    """A loaded model with its core. `freed` is the number of bytes that dropping it gives back."""

    def __init__(self, loaded: LoadedModel, params: LoadParams, freed: int) -> None:
        self._loaded = loaded
        self._params = params
        self.freed = freed
        self._core = EngineCore(loaded, core_limits(params))
        self._described = self._describe()

    @property
    def core(self) -> EngineCore:
        """Return what runs its turns."""
        return self._core

    def describe(self) -> dict[str, Any]:
        """Return what a client may want to know of the model; figures of `memory` are bytes."""
        return self._described

    def _describe(self) -> dict[str, Any]:
        loaded = self._loaded
        sizes, plan = loaded.config.sizes, loaded.plan
        described: dict[str, Any] = {
            "model": str(loaded.path),
            "arch": loaded.config.to_hf()["model_type"],
            "dim": sizes.hidden,
            "layers": sizes.layers,
            "vocab": sizes.vocab_size,
            "vl": False,
            "max_seq": loaded.max_seq,
            "max_seq_limit": sizes.max_positions,
            "kv_mode": loaded.runner.cache.mode.name,
            "weights": loaded.residency,
            "slots": self._params.slots,
            "threads": loaded.threads,
            "memory": {"weights": plan.weights, "caches": plan.caches, "scratch": plan.scratch},
            "chat": loaded.templates is not None,
            "cache_capable": True,
            "retry_reset_eligible": True,
            "continuous_batch_capable": self._params.slots > 1,
            "reasoning_contract": "none",
            "tools": None,
            "warnings": self._warnings(),
        }
        if loaded.templates is not None:
            chat, tools = (
                reply_format(template.source, lambda text: loaded.tokenizer.token_id(text) is not None)
                for template in (loaded.templates.chat, loaded.templates.tools)
            )
            described |= {
                "reasoning_contract": chat.thinking,
                "tools": tools.tools,
                "reasoning_effort_native": "reasoning_effort" in loaded.templates.chat.source,
            }
        return described

    def bench_prefill(self, tokens: int) -> dict[str, Any]:
        """Return the time of reading so many tokens in slot 0."""
        self._check_room(tokens)
        ids = self._tokens(tokens)
        began = time.perf_counter()
        self._loaded.runner.prefill(0, ids)
        spent = time.perf_counter() - began
        return {"tokens": tokens, "ms": round(spent * 1e3, 3), "tok_s": round(tokens / spent, 2)}

    def bench_decode(self, context: int, iterations: int) -> dict[str, Any]:
        """Return the time of so many steps of one token after a context, in slot 0."""
        self._check_room(context + iterations)
        runner, ids = self._loaded.runner, self._tokens(context + iterations)
        if context:
            runner.prefill(0, ids[:context])
        began = time.perf_counter()
        for position in range(context, context + iterations):
            runner.step([(Segment(0, position, 1), (ids[position],))])
        spent = time.perf_counter() - began
        return {
            "context_tokens": context,
            "iterations": iterations,
            "ms": round(spent * 1e3, 3),
            "tok_s": round(iterations / spent, 2),
        }

    def _check_room(self, tokens: int) -> None:
        if tokens > self._loaded.max_seq:
            raise ContextLengthError(tokens, self._loaded.max_seq, hint="measure fewer tokens")

    def _tokens(self, count: int) -> list[int]:
        """Return ids that differ from one to the next; what they mean has no part in the time."""
        vocab = self._loaded.config.sizes.vocab_size
        return [position * 7919 % vocab for position in range(count)]

    def _warnings(self) -> list[str]:
        loaded, found = self._loaded, []
        if loaded.unknown_tensors:
            listed = ", ".join(loaded.unknown_tensors[:3])
            found.append(f"{len(loaded.unknown_tensors)} tensors of the file are not used: {listed}")
        for fault in loaded.templates.faults() if loaded.templates is not None else ():
            found.append(f"the chat template cannot render every conversation: {fault}")
        return found


class ModelLoader:
    """Loads models from files."""

    def __init__(self) -> None:
        self._config = ProcessConfig()

    def configure(self, config: ProcessConfig) -> None:
        """Take the number of threads of loads that name none; show debug lines."""
        self._config = config
        log.configure(debug=config.debug)

    def admit(self, message: Load, resident: Resident | None) -> None:
        """Refuse a load that its file or the memory rules out; `resident` counts as gone."""
        freed = resident.freed if isinstance(resident, LoadedResident) else 0
        check_load(Path(message.model), self._options(message.params), freed=freed)

    def load(self, message: Load, progress: Progress) -> LoadedResident:
        """Load a model; `progress` is told of kernels that have to be compiled first."""
        options = self._options(message.params)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        # memory that lies free here would be taken first, and the model would seem smaller than it is
        self.reclaim()
        before = anonymous_memory()

        def compiling(done: int, total: int) -> None:
            progress(done, total, "compiling kernels")

        progress(0, 1, "reading weights")
        loaded = load_model(Path(message.model), options, compiling=compiling)
        progress(1, 1, "reading weights")
        # and what loading left behind is none of the model's
        self.reclaim()
        return LoadedResident(loaded, message.params, max(anonymous_memory() - before, 0))

    def reclaim(self) -> None:
        """Give memory that is free back to the system, which the C library keeps otherwise."""
        gc.collect()
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)

    def diag(self) -> dict[str, Any]:
        """Return memory figures in bytes and what computes."""
        return {
            "device": "cpu",
            "torch_version": torch.__version__,
            "memory_available": available_memory(),
            "memory_anonymous": anonymous_memory(),
            "cpus": os.cpu_count(),
        }

    def _options(self, params: LoadParams) -> LoadOptions:
        return LoadOptions(
            kv_cache=params.kv_mode,
            max_seq=params.max_seq,
            slots=params.slots,
            residency=params.weights,
            threads=params.threads if params.threads is not None else self._config.threads,
            prefill_chunk=params.prefill_chunk,
            template_file=Path(params.template_file) if params.template_file else None,
            template_dir=Path(params.template_dir) if params.template_dir else None,
        )


def core_limits(params: LoadParams) -> CoreLimits:
    """Return the limits of a core as load parameters give them, where 0 is no limit."""
    return CoreLimits(
        max_queue=params.max_queue or UNBOUNDED,
        queue_timeout_s=params.queue_timeout_s or math.inf,
        prefill_chunk=params.prefill_chunk,
        commit_timeout_s=params.commit_timeout_s,
        default_sampling=params.sampling,
        default_max_tokens=params.max_tokens,
    )


def anonymous_memory(status: Path = Path("/proc/self/status")) -> int:
    """Return the bytes of this process that no file stands behind; 0 where the system does not tell."""
    with suppress(OSError):
        for line in status.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "RssAnon":
                return int(value.split()[0]) * 1024
    return 0
