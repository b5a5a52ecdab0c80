"""Speed of whole models on a GPU, with random weights of real sizes, and the proof that replays are exact.

usage: gpu_decode.py [--shape qwen3-8b] [--format hf4] [--parts decode,prefill,batch,depth,parity,profile]

Greedy decode is measured in two ways: `fed` feeds the largest logit to the next step on the device, `served`
also reads each token on the host, as a server does. Both are set against the time in which a copy, measured
in the same run, would move the weights of a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpu_bench_kit import (
    Limits,
    Report,
    find_bench,
    measure_limits,
)
from gpu_random_model import FORMATS, SHAPES, Wanted, build_random
from gpu_speeds import Measured, Settings
from hipfire.base.errors import HipfireError
from hipfire.runtime.parity import capture, compare
from hipfire.runtime.parity_steps import Plan

PARTS = ("decode", "prefill", "batch", "depth", "parity", "tape", "hash", "profile", "trace")
DEFAULT_PARTS = "decode,prefill,batch,depth,parity,profile"
_PROOFS = {"parity", "tape", "hash"}


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    arguments = _parse(words)
    try:
        report = Report("benchmarks/gpu_decode.py", find_bench(arguments.device, arguments.rounds))
    except HipfireError as error:
        print(f"gpu_decode: {error.line()}", file=sys.stderr)
        return 1
    try:
        _run(arguments, report)
    except HipfireError as error:
        report.parts.setdefault("failed", {})["run"] = error.line()
        print(f"gpu_decode: {error.line()}", file=sys.stderr)
    finally:
        # what was measured until then is kept
        report.write(arguments.json)
    return 1 if "failed" in report.parts else 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--format", choices=sorted(FORMATS), default="hf4")
    parser.add_argument("--parts", default=DEFAULT_PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--kv", choices=("q8", "bf16", "f32"), default="q8")
    parser.add_argument("--activations", choices=("int8", "float"), default="int8")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--deep", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps in a round")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--positions", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=4 << 30, help="bytes of the copy that is the limit")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    arguments.parts = arguments.parts.split(",")
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}")
    return arguments


def _run(arguments: argparse.Namespace, report: Report) -> None:
    bench, began = report.bench, time.perf_counter()
    settings = Settings(
        arguments.depth,
        arguments.deep,
        arguments.batch,
        tuple(int(each) for each in arguments.prompts.split(",")),
        arguments.tokens,
        arguments.chunk,
        arguments.positions,
    )
    parts = set(arguments.parts)
    report.parts["model"] = {
        name: getattr(arguments, name) for name in ("shape", "format", "kv", "activations")
    }
    versions = f"driver {bench.driver}, torch {torch.__version__}"
    report.say(f"{arguments.shape} {arguments.format} on {bench.name}, {versions}")
    if parts - _PROOFS:
        size = arguments.limit
        limits = measure_limits(bench, (size // 4, size), 8192 if size >= 1 << 30 else 64)
        report.parts["limits"] = limits.as_json()
        report.say(f"copy limit {limits.copy / 1e9:.0f} GB/s, matrix rate {limits.matrix / 1e12:.0f} TFLOP/s")
        _speeds(arguments, settings, parts, report, limits)
    if parts & _PROOFS:
        _proofs(arguments, settings, parts, report)
    report.parts["seconds"] = time.perf_counter() - began
    report.say(f"{report.parts['seconds']:.0f} s in all")


def _wanted(arguments: argparse.Namespace, **sizes: Any) -> Wanted:
    return Wanted(
        shape=arguments.shape,
        fmt=arguments.format,
        kv=arguments.kv,
        arithmetic=arguments.activations,
        **sizes,
    )


def _speeds(
    arguments: argparse.Namespace, settings: Settings, parts: set[str], report: Report, limits: Limits
) -> None:
    """Measure all that one model with many slots can show."""
    longest = [settings.depth, *settings.prompts] if parts & {"prefill", "trace"} else [settings.depth]
    if "depth" in parts:
        longest.append(settings.deep)
    slots = settings.batch if "batch" in parts else 1
    room = max(longest) + 3 * settings.tokens + 16
    wanted = _wanted(arguments, slots=slots, max_seq=room, chunk=settings.chunk)
    model = build_random(report.bench, wanted)
    report.parts["memory"] = asdict(model.loaded.plan)
    planned = model.loaded.plan.total
    report.say(f"weights of a step {model.step_nbytes / 1e9:.3f} GB, plan {planned / 1e9:.1f} GB")
    try:
        run = Measured(report, settings, model, limits)
        if parts & {"decode", "batch", "depth", "profile"}:
            run.decode()
        for part in ("batch", "profile", "prefill", "trace", "depth"):
            if part in parts:
                _attempt(report, part, getattr(run, part))
    finally:
        model.close()


def _attempt(report: Report, part: str, run: Callable[[], None]) -> None:
    """Run a part; its failure is told and does not hide what the others find."""
    try:
        run()
    except (HipfireError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        report.parts.setdefault("failed", {})[part] = reason
        report.say(f"{part} FAILED: {reason}")


def _proofs(arguments: argparse.Namespace, settings: Settings, parts: set[str], report: Report) -> None:
    """Compare eager, replayed and relaunched steps, and the tape's hash in several processes."""
    # small steps have little scratch to compare
    chunk = min(32, settings.chunk)
    room = settings.depth + settings.positions + 16
    # the second one crosses into the next block of the cache at the usual depth
    long = max(1, settings.depth - 8)
    plans = [
        Plan(context=min(16, long), positions=settings.positions),
        Plan(context=long, positions=settings.positions, batch=2),
    ]
    model = build_random(report.bench, _wanted(arguments, slots=2, max_seq=room, chunk=chunk))
    try:
        keys = [capture(model.runner, plan) for plan in plans]
        if "parity" in parts:
            found = [compare(model.runner, plan) for plan in plans]
            report.parts["parity"] = found
            for plan, each in zip(plans, found, strict=True):
                report.say(_verdict(plan, each))
    finally:
        model.close()
    report.parts["tape"] = keys
    for plan, key in zip(plans, keys, strict=True):
        report.say(
            f"tape of batch {plan.batch} after {plan.context} tokens: {key['launches']} launches of "
            f"{key['kernels']} kernels, hash {key['sequence_hash']}, faults {key['contracts']['faults']}, "
            f"undeclared {key['contracts']['undeclared']}"
        )
    if "hash" in parts:
        _same_elsewhere(arguments, [key["sequence_hash"] for key in keys], report)


def _verdict(plan: Plan, found: Mapping[str, Any]) -> str:
    sizes = {name: each["bytes"] for name, each in found["arms"]["eager"].items()}
    guards = all(each["equal"] for each in found["guard"].values())
    return (
        f"three arms, batch {plan.batch}, {plan.positions} positions from {plan.context}: "
        f"{'exact' if found['exact'] else 'DIFFERENT'}; equal {found['equal']} (bytes {sizes}), "
        f"guards {'kept' if guards else 'CHANGED'}, routes proven {found['route_proven']}, "
        f"first divergence {found['first_divergence']}"
    )


def _same_elsewhere(arguments: argparse.Namespace, hashes: list[str], report: Report) -> None:
    """Record the same steps in a process of their own and compare the hashes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "tape.json")
        words = {
            "shape": arguments.shape,
            "format": arguments.format,
            "kv": arguments.kv,
            "activations": arguments.activations,
            "depth": arguments.depth,
            "positions": arguments.positions,
            "chunk": arguments.chunk,
            "device": arguments.device,
            "json": found,
        }
        command = [sys.executable, __file__, "--parts", "tape"]
        command += [part for name, value in words.items() for part in (f"--{name}", str(value))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        other = [key["sequence_hash"] for key in json.loads(found.read_text(encoding="utf-8"))["tape"]]
    report.parts["hash"] = {"here": hashes, "elsewhere": other, "stable": hashes == other}
    report.say(f"hashes in another process: {'the same' if hashes == other else f'DIFFERENT: {other}'}")


if __name__ == "__main__":
    sys.exit(main())
