"""Decode of a large model on one GPU and spread over several, and proof that both say the same.

usage: tensor_parallel.py [--tp 2] [--shape qwen3-32b] [--format mq4] [--parts speed,agree,loss]

Weights are random. `speed`: tokens per second of greedy decode at batch 1, each token read on the host before
the next step, by one GPU and by all, with sums made by one kernel that reads the other GPUs' memory
(`direct`) and by the communication library. `agree`: a small model's logits along the greedy text of one GPU,
and its own greedy text. `loss`: how long after a process is killed a decode fails with an error that says so.
Each GPU beyond the first has a process, started by the same code as for `hipfire --tp`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from gpu_bench_kit import Bench, find_bench, table
from gpu_random_model import FORMATS, SHAPES, NoFile, Wanted, _weights_at_random, request, tensor_infos
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint
from hipfire.device.platform import find_gpu, keep_kernels
from hipfire.quant.registry import format_of
from hipfire.runtime import gpu_load
from hipfire.runtime.crew import Crew, PartnerError
from hipfire.runtime.parallel import LeadingRunner
from hipfire.runtime.parallel_weights import Shard
from hipfire.runtime.parallel_worker import work
from hipfire.runtime.runner import Runner

WORKER = "--worker"
# what the table shows, and with how many digits
COLUMNS = {"prefill_tok_s": 0, "decode_tok_s": 1, "ratio": 2}
# models small enough for weights that are made on the host; "least" is for interpreted kernels
AGREE: Mapping[str, Mapping[str, Any]] = {
    "small": {
        **SHAPES["qwen3-8b"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "vocab_size": 4096,
    },
    "least": {
        **SHAPES["tiny"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 64,
    },
}
ALL_SHAPES = {**SHAPES, **AGREE}


@dataclass(frozen=True)
class Job:
    """Which model a process builds: `wanted` at random, or a small one that is the same in every process."""

    wanted: Wanted
    agree: bool = False

    @classmethod
    def from_task(cls, task: Mapping[str, Any]) -> Job:
        """Return what the first process wants."""
        return cls(Wanted(**task["wanted"]), task["agree"])

    def request(self) -> gpu_load.Request:
        """Return the request for the whole model."""
        fields = ALL_SHAPES[self.wanted.shape]
        asked = request(replace(self.wanted, shape="tiny"))
        config = asked.family.from_hf(fields)
        made = Encoded if self.agree else NoFile
        checkpoint = cast(Checkpoint, made(fields, tensor_infos(config, self.wanted.fmt)))
        named = NamedCheckpoint(checkpoint, asked.family.names, config.sizes.layers)
        return replace(asked, config=config, named=named)


class Encoded(NoFile):
    """A checkpoint of random weights that depend on nothing but a tensor's name."""

    def raw(self, name: str) -> memoryview:
        """Return a tensor's bytes, made when they are asked for."""
        info = self.tensors[name]
        seed = torch.Generator().manual_seed(sum(name.encode()) * 1000003 + len(name))
        values = torch.randn(info.rows_cols, generator=seed)
        values = 1.0 + 0.1 * values if len(info.shape) < 2 else values * info.shape[-1] ** -0.5
        encode = format_of(info.qtype).encode
        assert encode is not None
        data: Any = encode(values).numpy()
        return memoryview(data)

    def release(self, name: str, nbytes: int | None = None) -> None:
        """Nothing is kept."""


def bench_of(device: torch.device) -> Bench:
    """Return the device of a process."""
    if device.type == "cpu":
        return find_bench("cpu")
    gpu = find_gpu(device.index)
    if gpu is None:
        raise ValidationError("there is no GPU", hint="use --device cpu with TRITON_INTERPRET=1")
    keep_kernels()
    torch.cuda.set_device(device)
    overlapped = gpu_load._machine(gpu).overlapped
    return Bench(gpu.name, gpu.device, gpu.vendor, gpu.processors, gpu.driver, overlapped, gpu=gpu)


def build(job: Job, shard: Shard | None, device: torch.device) -> gpu_load.GpuModel:
    """Build a model, or the part of it that a process has, as a load does."""
    asked, machine = job.request(), bench_of(device).machine()
    if device.type == "cpu":
        # graphs are not needed: steps stay eager
        machine = replace(machine, capture=lambda run: run())  # type: ignore[arg-type, return-value]
    if shard is not None:
        asked = shard.of(asked)
    plan = gpu_load.plan_load(asked, machine)
    if job.agree:
        loaded = gpu_load.build(asked, machine, plan)
    else:
        with _weights_at_random():
            loaded = gpu_load.build(asked, machine, plan)
    if device.type == "cpu" and loaded.runner.replay is not None:
        loaded.runner.replay.request = "eager"
    return loaded


def load_part(
    task: Mapping[str, Any], shard: Shard, device: torch.device
) -> tuple[Runner, Callable[[], None]]:
    """Build the part of a process that another one started."""
    loaded = build(Job.from_task(task), shard, device)
    return loaded.runner, loaded.close


@contextmanager
def running(job: Job, tp: int, device: str, *, direct: bool = True) -> Iterator[tuple[Runner, str]]:
    """Yield the runner of a model on `tp` devices, and how sums are made."""
    names = ["cpu" if device == "cpu" else f"cuda:{rank}" for rank in range(tp)]
    first = torch.device(names[0])
    if tp == 1:
        loaded = build(job, None, first)
        try:
            yield loaded.runner, "none"
        finally:
            loaded.close()
        return
    task = {"wanted": asdict(job.wanted), "agree": job.agree}
    command = [sys.executable, str(Path(__file__).resolve()), WORKER]
    with Crew(names, task, command=command, direct=direct) as crew:
        loaded = build(job, crew.shard, first)
        crew.wait()
        runner = LeadingRunner(loaded.runner, crew)
        loaded.runner = runner
        if device == "cpu" and runner.replay is not None:
            runner.replay.request = "eager"
        try:
            yield runner, "direct" if crew.group.reads_peers else "library"
        finally:
            loaded.close()
            crew.close()


def greedy(runner: Runner, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return a greedy text, and the logits of its every token, on the host."""
    logits = runner.prefill(0, prompt)
    text, rows = [], []
    for place in range(count):
        rows.append(logits.float().cpu())
        text.append(int(logits.argmax()))
        if place + 1 < count:
            logits = runner.decode(0, text[-1], len(prompt) + place)
    return text, torch.stack(rows)


def forced(runner: Runner, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Return the logits of every token of a given text."""
    rows = [runner.prefill(0, prompt).float().cpu()]
    for place, token in enumerate(text[:-1]):
        rows.append(runner.decode(0, token, len(prompt) + place).float().cpu())
    return torch.stack(rows)


def speed(runner: Runner, depth: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return tokens per second of prefill and of greedy decode from `depth` on, medians of rounds."""
    vocabulary = runner.model.vocab_size
    prompt = [17 * place % vocabulary for place in range(depth)]
    runner.prefill(0, prompt)
    prefills, decodes = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        token = int(runner.prefill(0, prompt).argmax())
        prefills.append(depth / (time.perf_counter() - began))
        # the first steps compile, record and capture
        for place in range(4):
            token = int(runner.decode(0, token, depth + place).argmax())
        began = time.perf_counter()
        for place in range(4, 4 + tokens):
            token = int(runner.decode(0, token, depth + place).argmax())
        decodes.append(tokens / (time.perf_counter() - began))
    return {
        "prefill_tok_s": statistics.median(prefills),
        "decode_tok_s": statistics.median(decodes),
        "decode_best": max(decodes),
        "decode_worst": min(decodes),
    }


def measure_speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the speeds of one device and of all, and print them."""
    room = arguments.depth + arguments.tokens + 8
    wanted = Wanted(arguments.shape, arguments.format, arguments.kv, max_seq=room, arithmetic="int8")
    arms = [(1, True), (arguments.tp, True), (arguments.tp, False)]
    found: list[dict[str, Any]] = []
    for tp, direct in arms if arguments.device != "cpu" else arms[:2]:
        with running(Job(wanted), tp, arguments.device, direct=direct) as (runner, sums):
            figures = speed(runner, arguments.depth, arguments.tokens, arguments.rounds)
            route = None if runner.replay is None else runner.replay.route()
        steps = "eager" if route is None or route.selected == "eager" else f"{route.replays} replayed"
        ratio = figures["decode_tok_s"] / (found[0]["decode_tok_s"] if found else figures["decode_tok_s"])
        found.append({"tp": tp, "sums": sums, **figures, "ratio": ratio, "steps": steps})
        print(json.dumps(found[-1]), flush=True)
    rows = [
        [str(each["tp"]), each["sums"], *(f"{each[key]:.{digits}f}" for key, digits in COLUMNS.items())]
        for each in found
    ]
    print(table(["GPUs", "sums", "prefill tok/s", "decode tok/s", "decode ratio"], rows, numbers_from=2))
    return found


def measure_agreement(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how far one device and several agree on a small model, and print it."""
    count, prompt = arguments.agree_tokens, [11 + 7 * place for place in range(arguments.agree_prompt)]
    room = count + len(prompt)
    found: list[dict[str, Any]] = []
    for arithmetic in ("float", "int8"):
        wanted = Wanted(arguments.agree_shape, arguments.format, "f32", max_seq=room, arithmetic=arithmetic)
        job = Job(wanted, agree=True)
        with running(job, 1, arguments.device) as (runner, _):
            text, rows = greedy(runner, prompt, count)
        for direct in (True, False) if arguments.device != "cpu" else (True,):
            with running(job, arguments.tp, arguments.device, direct=direct) as (runner, sums):
                mine, _ = greedy(runner, prompt, count)
                others = forced(runner, prompt, text)
            error = float(
                (others - rows).double().square().mean().sqrt() / rows.double().square().mean().sqrt()
            )
            same = next(
                (i for i, pair in enumerate(zip(text, mine, strict=True)) if pair[0] != pair[1]), count
            )
            found.append(
                {"arithmetic": arithmetic, "sums": sums, "tokens": count, "same": same, "logits_rms": error}
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def measure_loss(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the time from the end of a process to the error that decodes get, and print it."""
    found: list[dict[str, Any]] = []
    for direct in (True, False) if arguments.device != "cpu" else (True,):
        wanted = Wanted(arguments.agree_shape, arguments.format, "f32", max_seq=1 << 15)
        with running(Job(wanted, agree=True), arguments.tp, arguments.device, direct=direct) as (
            runner,
            sums,
        ):
            assert isinstance(runner, LeadingRunner)
            token, position = int(runner.prefill(0, [1, 2, 3]).argmax()), 3
            killed: list[float] = []

            def kill(pid: int = runner.partners.pids[0], killed: list[float] = killed) -> None:
                killed.append(time.perf_counter())
                os.kill(pid, signal.SIGKILL)

            threading.Timer(1.0, kill).start()
            try:
                while True:
                    token, position = int(runner.decode(0, token, position).argmax()), position + 1
            except PartnerError as error:
                seconds = time.perf_counter() - killed[0]
                found.append({"sums": sums, "seconds": seconds, "error": error.line(), "steps": position - 3})
        print(json.dumps(found[-1]), flush=True)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="qwen3-32b")
    parser.add_argument("--format", choices=sorted(FORMATS), default="mq4")
    parser.add_argument("--kv", choices=("q8", "bf16", "f32"), default="bf16")
    parser.add_argument("--parts", default="speed,agree")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="decode steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agree-tokens", type=int, default=64)
    parser.add_argument("--agree-prompt", type=int, default=20)
    parser.add_argument("--agree-shape", choices=sorted(AGREE), default="small")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    report: dict[str, Any] = {"command": sys.argv, "torch": str(torch.__version__), "tp": arguments.tp}
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "loss": measure_loss,
        "agree": measure_agreement,
        "speed": measure_speed,
    }
    try:
        for part in arguments.parts.split(","):
            report[part] = parts[part](arguments)
    except HipfireError as error:
        print(f"tensor_parallel: {error.line()}", file=sys.stderr)
        return 1
    finally:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(work(load_part) if WORKER in sys.argv[1:] else main())
