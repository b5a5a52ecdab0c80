"""What benchmarks/gpu_decode.py measures of one model: decode steps, prompts, and kernels by themselves."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_bench_kit import (
    Bench,
    Limits,
    Report,
    Timing,
    captured,
    clocked,
    number,
    replayed,
    table,
    timed,
)
from gpu_random_model import RandomModel
from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.engine import GpuLaunch
from hipfire.kernels.gpu.sample import greedy
from hipfire.layers.context import Segment
from hipfire.runtime.retained import RetainedDecode, _Recorded
from hipfire.runtime.runner import Snapshot

# kernels whose launches read each byte of their tensors once
_STREAMING = ("gemv", "gemm", "dense", "dequantize")


@dataclass(frozen=True)
class Settings:
    """The sizes of a run, in tokens."""

    depth: int
    deep: int
    batch: int
    prompts: tuple[int, ...]
    tokens: int
    chunk: int
    positions: int


class Measured:
    """The measurements of one model."""

    def __init__(self, report: Report, settings: Settings, model: RandomModel, limits: Limits) -> None:
        self.report = report
        self.bench: Bench = report.bench
        self.settings = settings
        self.model = model
        self.limits = limits
        self.runner = model.runner
        # by slot and position
        self.states: dict[tuple[int, int], Snapshot] = {}

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt of so many tokens, the same each time."""
        return [(101 + 7919 * place) % self.runner.model.vocab_size for place in range(tokens)]

    def retained(self) -> RetainedDecode:
        """Return what keeps the decode steps; InternalError where they are not replayed."""
        replay = self.runner.replay
        assert isinstance(replay, RetainedDecode)
        reason = replay.route().fallback_reason
        if reason is not None:
            raise InternalError(f"decode steps are not replayed: {reason}")
        return replay

    def recorded(self, batch: int) -> _Recorded:
        """Return the prepared step of a batch size."""
        return self.retained()._steps[batch]

    def _rewind(self, batch: int, depth: int) -> None:
        """Bring the states of recurrent layers back to `depth`, where each slot stood first."""
        for slot in range(batch if self.runner.recurrent else 0):
            if self.runner.filled(slot) == depth:
                self.states[slot, depth] = self.runner.snapshot(slot)
            else:
                self.runner.restore(slot, self.states[slot, depth])

    def serve(self, batch: int, depth: int, tokens: int) -> list[list[int]]:
        """Decode greedily and read each token on the host; return the tokens of each step."""
        self._rewind(batch, depth)
        ids = [1 + slot for slot in range(batch)]
        steps = []
        for place in range(depth, depth + tokens):
            logits = self.runner.step([(Segment(slot, place, 1), (token,)) for slot, token in enumerate(ids)])
            ids = logits.argmax(dim=1).tolist()
            steps.append(ids)
        return steps

    @torch.inference_mode()
    def feeder(self, batch: int, depth: int) -> tuple[Callable[[], object], Callable[[], None]]:
        """Return what takes one greedy step on the device alone, and what goes back to the first position."""
        recorded, engine = self.recorded(batch), self.bench.engine()
        ids, rows = recorded.inputs.ids, recorded.inputs.rows

        def advance() -> None:
            engine.settle()
            ids.copy_(greedy(engine, recorded.logits))
            rows[:, 1].add_(1)

        step = recorded.graph
        assert step is not None
        if self.bench.on_gpu:
            advance = captured(self.bench, advance)

        def run() -> None:
            step.replay()
            advance()

        def back() -> None:
            rows[:, 1].fill_(depth)

        return run, back

    def speed(self, batch: int, depth: int) -> dict[str, Any]:
        """Return what decode steps of `batch` sequences of `depth` tokens take."""
        tokens = self.settings.tokens
        # recorded, captured, replayed
        for _ in range(3):
            self.serve(batch, depth, 1)
        served = clocked(self.bench, lambda: self.serve(batch, depth, tokens))
        run, back = self.feeder(batch, depth)

        def fed_round() -> None:
            back()
            for _ in range(tokens):
                run()

        with torch.inference_mode():
            fed = clocked(self.bench, fed_round)
            back()
            step = self.recorded(batch).graph
            assert step is not None
            alone = replayed(self.bench, step.replay)
        floor = self.model.step_nbytes / self.limits.copy
        facts = self.retained().facts(batch)
        assert facts is not None
        found = {
            "batch": batch,
            "depth": depth,
            "served_tok_s": batch * tokens / served.median,
            "fed_tok_s": batch * tokens / fed.median,
            "step_us": alone.median * 1e6,
            "weights_us": floor * 1e6,
            "ratio_fed": floor * tokens / fed.median,
            "ratio_served": floor * tokens / served.median,
            "ratio_step": floor / alone.median,
            "launches": facts.key.launches,
            "kernels": facts.key.kernels,
            "hash": facts.key.sequence_hash,
        }
        self.report.say(
            f"decode batch {batch} depth {depth}: fed {found['fed_tok_s']:.1f} tok/s, served "
            f"{found['served_tok_s']:.1f} tok/s, step {found['step_us']:.0f} us, weights alone "
            f"{found['weights_us']:.0f} us, ratio fed {found['ratio_fed']:.3f}, "
            f"served {found['ratio_served']:.3f}, step {found['ratio_step']:.3f}; "
            f"{facts.key.launches} launches of {facts.key.kernels} kernels"
        )
        return found

    def decode(self) -> None:
        """Measure one sequence."""
        depth = self.settings.depth
        self.runner.prefill(0, self.prompt(depth))
        self.report.parts["decode"] = self.speed(1, depth)

    def batch(self) -> None:
        """Measure many sequences against one."""
        batch, depth = self.settings.batch, self.settings.depth
        self.runner.prefill(0, self.prompt(depth))
        for slot in range(1, batch):
            state = self.runner.snapshot(0) if self.runner.recurrent else None
            self.runner.share_rows(0, slot, depth, state)
        found = self.speed(batch, depth)
        one = self.report.parts["decode"]
        for way in ("fed", "served"):
            found[f"times_one_{way}"] = found[f"{way}_tok_s"] / one[f"{way}_tok_s"]
        self.report.parts["batch"] = found
        self.report.say(
            f"batch {batch}: {found['times_one_fed']:.2f} times the tok/s of batch 1 fed, "
            f"{found['times_one_served']:.2f} served"
        )

    def depth(self) -> None:
        """Measure a long sequence against a short one."""
        deep = self.settings.deep
        self.runner.prefill(0, self.prompt(deep))
        found = self.speed(1, deep)
        one = self.report.parts["decode"]
        for way in ("fed", "served"):
            found[f"of_short_{way}"] = found[f"{way}_tok_s"] / one[f"{way}_tok_s"]
        self.report.parts["depth"] = found
        self.report.say(
            f"depth {deep}: {found['of_short_fed']:.3f} of the tok/s at depth {self.settings.depth} fed, "
            f"{found['of_short_served']:.3f} served"
        )

    def prefill(self) -> None:
        """Measure prompts, and how much of their time Python takes to start them."""
        rows = []
        for tokens in self.settings.prompts:
            prompt = self.prompt(tokens)
            whole = clocked(self.bench, lambda prompt=prompt: self.runner.prefill(0, prompt))
            began = time.perf_counter()
            self.runner.prefill(0, prompt)
            started = time.perf_counter() - began
            self.bench.synchronize()
            rate = self.model.prefill_operations(tokens) / whole.median
            rows.append(
                {
                    "tokens": tokens,
                    "ms": whole.median * 1e3,
                    "started_ms": started * 1e3,
                    "tok_s": tokens / whole.median,
                    "tflop_s": rate / 1e12,
                    "of_matrix_rate": rate / self.limits.matrix,
                }
            )
            self.report.say(
                f"prefill {tokens}: {whole.median * 1e3:.2f} ms (best {whole.best * 1e3:.2f}, started in "
                f"{started * 1e3:.2f}), {tokens / whole.median:.0f} tok/s, {rate / 1e12:.0f} TFLOP/s, "
                f"{rate / self.limits.matrix:.3f} of the matrix rate"
            )
        self.report.parts["prefill"] = rows

    def profile(self) -> None:
        """Time the launches of each kernel of a decode step by themselves."""
        found = {}
        for batch in sorted(self.retained()._steps):
            found[str(batch)] = self._profile(batch)
        self.report.parts["profile"] = found

    def _profile(self, batch: int) -> list[dict[str, Any]]:
        recorded = self.recorded(batch)
        groups: dict[str, list[GpuLaunch]] = defaultdict(list)
        for launch in recorded.tape.launches:
            groups[_label(launch)].append(launch)
        rows = []
        for label, launches in groups.items():
            timing = timed(self.bench, lambda launches=launches: [each.run() for each in launches])
            rows.append(_share(label, launches, timing, self.limits))
        rows.sort(key=lambda row: -row["us"])
        total = sum(row["us"] for row in rows)
        assert recorded.graph is not None
        step = replayed(self.bench, recorded.graph.replay).median * 1e6
        cells = [
            [
                row["kernel"],
                str(row["launches"]),
                number(row["us"], 1),
                number(row["us"] / row["launches"]),
                number(100 * row["us"] / total, 1),
                number(row["gb_s"], 0),
                number(row["of_copy"]),
            ]
            for row in rows
        ]
        names = ("kernel", "launches", "us", "us each", "%", "GB/s", "of copy")
        self.report.say(
            f"\nbatch {batch}: {total:.0f} us one kernel after the other, {step:.0f} us as a step"
        )
        self.report.say(table(names, cells))
        return rows

    def trace(self) -> None:
        """Show which kernels take the time of a prompt, as torch's profiler sees it."""
        if not self.bench.on_gpu:
            return
        activities = [torch.profiler.ProfilerActivity.CUDA]
        for tokens in self.settings.prompts:
            prompt = self.prompt(tokens)
            self.runner.prefill(0, prompt)
            self.bench.synchronize()
            with torch.profiler.profile(activities=activities) as seen:
                self.runner.prefill(0, prompt)
                self.bench.synchronize()
            events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
            total = sum(event.self_device_time_total for event in events)
            cells = [
                [
                    event.key[:70],
                    str(event.count),
                    number(event.self_device_time_total, 0),
                    number(100 * event.self_device_time_total / max(total, 1e-9), 1),
                ]
                for event in events[:25]
            ]
            self.report.say(f"\nprompt of {tokens} tokens: {total / 1e3:.2f} ms in kernels")
            self.report.say(table(("kernel", "launches", "us", "%"), cells))


def _label(launch: GpuLaunch) -> str:
    """Name a launch by its kernel and what tells its uses apart: the widths of what it reads and writes."""
    scalars = {name: launch.arguments.get(name) for name in ("rows", "cols", "units", "columns")}
    sizes = [
        str(32 * value if name == "units" else value) for name, value in scalars.items() if value is not None
    ]
    shapes = "x".join(map(str, launch.writes[0].shape)) if launch.writes else ""
    return f"{launch.name.strip('_')} {'x'.join(sizes)} -> {shapes}"


def _share(label: str, launches: Sequence[GpuLaunch], timing: Timing, limits: Limits) -> dict[str, Any]:
    rate = None
    chosen = launches[0].arguments.get("ids_ptr") is not None
    if any(word in label for word in _STREAMING) and not chosen:
        nbytes = sum(tensor.nbytes for launch in launches for tensor in (*launch.reads, *launch.writes))
        rate = nbytes / timing.median
    return {
        "kernel": label,
        "launches": len(launches),
        "us": timing.median * 1e6,
        "gb_s": None if rate is None else rate / 1e9,
        "of_copy": None if rate is None else rate / limits.copy,
    }
