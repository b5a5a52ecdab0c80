"""Loading models for the daemon: whether there will be room, the model with its core, and what it is.

This file knows no message on the wire and no turn.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from hipfire.base import log
from hipfire.base.errors import ContextLengthError, HipfireError
from hipfire.device.facts import gpu_facts
from hipfire.device.platform import Gpu
from hipfire.engine.core import CoreLimits, EngineCore
from hipfire.engine.daemon_parts import Progress, Resident
from hipfire.engine.process_memory import anonymous_memory, reclaim, trim_gpu
from hipfire.engine.wire_messages import Load, LoadParams, ProcessConfig
from hipfire.layers.context import Segment
from hipfire.runtime import parity
from hipfire.runtime.admission import available_memory
from hipfire.runtime.load import LoadedModel, LoadOptions, check_load, device_of, load_model
from hipfire.runtime.parity_steps import Plan
from hipfire.runtime.waiting import finish
from hipfire.text.reply_format import reply_format

# what stands for "no limit" on the number of waiting turns
UNBOUNDED: Final = 2**31


class LoadedResident:
    """A loaded model with its core. On the CPU `freed` is the number of bytes that dropping it gives back."""

    def __init__(self, loaded: LoadedModel, params: LoadParams, freed: int) -> None:
        self._loaded = loaded
        self._params = params
        self._freed = freed
        self._core = EngineCore(loaded, core_limits(params))
        self._described = self._describe()

    @property
    def core(self) -> EngineCore:
        """Return what runs its turns."""
        return self._core

    def describe(self) -> dict[str, Any]:
        """Return what a client may want to know of the model.

        Figures of `memory` are bytes: as planned, and on a GPU `held`, those that are taken by now, with the
        `blocks` that its pool has handed out.
        """
        return {**self._described, "memory": self._memory()}

    def close(self) -> None:
        """Give the memory of a GPU back."""
        self._loaded.close()

    def freed_on(self, gpu: Gpu | None) -> int:
        """Return the bytes of a GPU's memory, or of the host's for None, that dropping it gives back."""
        on_gpu = self._loaded.on_gpu
        if on_gpu is None:
            return self._freed if gpu is None else 0
        here = gpu is not None and gpu.device == self._loaded.runner.site.device
        return on_gpu.held() if here else 0

    def _describe(self) -> dict[str, Any]:
        loaded = self._loaded
        sizes = loaded.config.sizes
        described: dict[str, Any] = {
            "model": str(loaded.path),
            "arch": loaded.config.to_hf()["model_type"],
            "dim": sizes.hidden,
            "layers": sizes.layers,
            "vocab": sizes.vocab_size,
            "vl": False,
            "max_seq": loaded.max_seq,
            "max_seq_limit": sizes.max_positions,
            "device": loaded.device,
            "kv_mode": loaded.runner.cache.mode.name,
            "kv_backend": loaded.kv_backend,
            "weights": loaded.residency,
            "slots": self._params.slots,
            "tp": self._params.tp,
            "threads": loaded.threads,
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

    def _memory(self) -> dict[str, Any]:
        on_gpu = self._loaded.on_gpu
        figures: dict[str, Any] = dict(self._loaded.memory())
        if on_gpu is not None:
            counts = on_gpu.counters()
            figures["blocks"] = {"fresh": counts.fresh, "reused": counts.reused, "live": counts.live}
        return figures

    def bench_prefill(self, tokens: int) -> dict[str, Any]:
        """Return the time of reading so many tokens in slot 0."""
        self._check_room(tokens)
        runner, ids = self._loaded.runner, self._tokens(tokens)
        began = time.perf_counter()
        runner.prefill(0, ids)
        finish(runner.site.device)
        spent = time.perf_counter() - began
        return {"tokens": tokens, "ms": round(spent * 1e3, 3), "tok_s": round(tokens / spent, 2)}

    def bench_decode(self, context: int, iterations: int) -> dict[str, Any]:
        """Return the time of so many steps of one token after a context, in slot 0."""
        self._check_room(context + iterations)
        runner, ids = self._loaded.runner, self._tokens(context + iterations)
        if context:
            runner.prefill(0, ids[:context])
            finish(runner.site.device)
        began = time.perf_counter()
        for position in range(context, context + iterations):
            runner.step([(Segment(0, position, 1), (ids[position],))])
        finish(runner.site.device)
        spent = time.perf_counter() - began
        return {
            "context_tokens": context,
            "iterations": iterations,
            "ms": round(spent * 1e3, 3),
            "tok_s": round(iterations / spent, 2),
        }

    def redline_capture(self, context: int, batch: int) -> dict[str, Any]:
        """Return what a decode step of `batch` sequences is known by once it is recorded."""
        return parity.capture(self._loaded.runner, Plan(context, 1, batch))

    def redline_shadow(self, context: int, positions: int, batch: int) -> dict[str, Any]:
        """Return how so many steps of `batch` sequences compare that are taken three ways."""
        return parity.compare(self._loaded.runner, Plan(context, positions, batch))

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
        # blocks of a load that failed would count as taken
        trim_gpu()
        options, freed = self._options(message.params), 0
        if isinstance(resident, LoadedResident):
            freed = resident.freed_on(device_of(Path(message.model), options))
        check_load(Path(message.model), options, freed=freed)

    def load(self, message: Load, progress: Progress) -> LoadedResident:
        """Load a model; `progress` is told of weights on their way to a GPU, and of kernels to compile first.

        The load ends with what `progress` raises.
        """
        options = self._options(message.params)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        # memory that lies free here would be taken first, and the model would seem smaller than it is
        self.reclaim()
        before = anonymous_memory()

        def compiling(done: int, total: int) -> None:
            progress(done, total, "compiling kernels")

        progress(0, 1, "reading weights")
        reading = _by_percent(progress, "reading weights to the GPU")
        loaded = load_model(Path(message.model), options, compiling=compiling, reading=reading)
        try:
            progress(1, 1, "reading weights")
            # and what loading left behind is none of the model's
            self.reclaim()
            return LoadedResident(loaded, message.params, max(anonymous_memory() - before, 0))
        except Exception:
            loaded.close()
            raise

    def reclaim(self) -> None:
        """Give memory of what was dropped back to the system."""
        reclaim()

    def diag(self) -> dict[str, Any]:
        """Return memory figures in bytes and what computes; `gpu` is the first one, or why it cannot."""
        return {
            "gpu": _first_gpu(),
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
            device=params.device,
            kv_backend=params.kv_backend,
            activations=params.activations,
            tp=params.tp,
            threads=params.threads if params.threads is not None else self._config.threads,
            prefill_chunk=params.prefill_chunk,
            template_file=Path(params.template_file) if params.template_file else None,
            template_dir=Path(params.template_dir) if params.template_dir else None,
        )


def _first_gpu() -> dict[str, Any] | str | None:
    try:
        return next(iter(gpu_facts(most=1)), None)
    except HipfireError as error:
        return error.line()


def _by_percent(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Return what tells `progress` of bytes, but not of every piece."""
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        percent = 100 * done // total if total else 100
        if percent > told:
            told = percent
            progress(done, total, what)

    return tell


def core_limits(params: LoadParams) -> CoreLimits:
    """Return the limits of a core as load parameters give them, where 0 is no limit."""
    return CoreLimits(
        max_queue=params.max_queue or UNBOUNDED,
        queue_timeout_s=params.queue_timeout_s or math.inf,
        prefill_chunk=params.prefill_chunk,
        commit_timeout_s=params.commit_timeout_s,
        default_sampling=params.sampling,
        default_max_tokens=params.max_tokens,
        state_budget=params.state_budget << 20,
        state_interval=params.state_interval,
    )
