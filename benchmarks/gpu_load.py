"""Loads onto a GPU: their rate beside a plain copy of the same bytes, and that nothing is left behind.

usage: gpu_load.py [--gigabytes 8] [--format mq4] [--parts rate,cycles,injection] [--folder DIR]

The file is synthetic: a model of Qwen3-8B's widths with as many layers as the size allows. A plain copy goes
from the mapped file through pinned memory to the device, as a load does, but packs nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_bench_kit import LaunchedAgain, Report, find_bench
from gpu_faults import Faults
from gpu_load_kit import FULL, STEPS, TINY, Loads, write_model
from gpu_random_model import FORMATS, tensor_infos
from hipfire.base.errors import HipfireError
from hipfire.checkpoint.source import open_checkpoint
from hipfire.device.pool import PoolCounters, device_pool
from hipfire.engine.process_memory import reclaim
from hipfire.models.family import family_of
from hipfire.runtime.gpu_load import build, plan_load
from hipfire.runtime.gpu_upload import PIECE_BYTES
from hipfire.runtime.weights import mapped_tensor

PARTS = ("rate", "cycles", "injection")


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for; 1 if something was left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--format", choices=sorted(FORMATS), default="mq4")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files are written and removed")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for interpreted kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    parts, sizes = arguments.parts.split(","), TINY if arguments.tiny else FULL
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}")
    try:
        bench = find_bench(arguments.device, arguments.rounds)
        report = Report("benchmarks/gpu_load.py", bench)
        report.say(f"{bench.name}, driver {bench.driver}, torch {torch.__version__}")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            loads = Measured(report, sizes, arguments.format, Path(folder))
            if "rate" in parts:
                loads.rate(int(arguments.gigabytes * 1e9))
            if "cycles" in parts:
                loads.cycles(arguments.cycles)
            if "injection" in parts:
                Faults(loads).run()
    except HipfireError as error:
        print(f"gpu_load: {error.line()}", file=sys.stderr)
        return 1
    report.write(arguments.json)
    return 0 if all(report.parts.get(part, {}).get("pass", True) for part in parts) else 1


class Measured(Loads):
    """The loads of one device, timed and counted."""

    def rate(self, nbytes: int) -> None:
        """Load a file of about so many bytes, and copy the same bytes; rounds alternate."""
        fields = dict(self.sizes.large)
        one, two = (self._file_nbytes({**fields, "num_hidden_layers": count}) for count in (1, 2))
        fields["num_hidden_layers"] = max(1, round((nbytes - one) / (two - one)) + 1)
        path = self.folder / "large.hfq"
        began = time.perf_counter()
        size = write_model(path, fields, self.fmt)
        self.report.say(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s")
        copies, loads, plans = [], [], []
        try:
            for _ in range(self.bench.rounds):
                copies.append(self._copy(path))
                seconds, planned = self._load(path)
                loads.append(seconds)
                plans.append(planned)
                self.report.say(
                    f"copy {copies[-1]:.2f} s ({size / copies[-1] / 1e9:.2f} GB/s), load {loads[-1]:.2f} s "
                    f"({size / loads[-1] / 1e9:.2f} GB/s), of which {plans[-1]:.2f} s for the plan"
                )
        finally:
            path.unlink()
        copy, load = sorted(copies)[len(copies) // 2], sorted(loads)[len(loads) // 2]
        found = {"nbytes": size, "format": self.fmt, "copy_s": copies, "load_s": loads, "plan_s": plans}
        self.report.parts["rate"] = {**found, "ratio": copy / load}
        self.report.say(f"a load has {copy / load:.3f} of the speed of a copy (medians)")

    def _file_nbytes(self, fields: Mapping[str, Any]) -> int:
        config = family_of(str(fields["model_type"])).from_hf(fields)
        return sum(info.nbytes for info in tensor_infos(config, self.fmt).values())

    def _load(self, path: Path) -> tuple[float, float]:
        """Return the seconds of a load from opening the file to the last byte, and those of its plan."""
        machine = self.bench.machine(LaunchedAgain().capture)
        began = time.perf_counter()
        with open_checkpoint(path) as checkpoint:
            wanted = self.request(checkpoint)
            plan = plan_load(wanted, machine)
            planned = time.perf_counter() - began
            model = build(wanted, machine, plan)
            self.bench.synchronize()
            seconds = time.perf_counter() - began
        model.close()
        del model
        # as the engine does after an unload: objects of a model refer to each other
        reclaim()
        return seconds, planned

    def _copy(self, path: Path) -> float:
        """Return the seconds in which the file's tensors reach the device as they are."""
        device, pinned = self.bench.device, self.bench.on_gpu
        began = time.perf_counter()
        hosts = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        events: list[torch.cuda.Event | None] = [None, None]
        with open_checkpoint(path) as checkpoint:
            for turn, (name, info) in enumerate(checkpoint.tensors.items()):
                target = torch.empty(info.nbytes, dtype=torch.uint8, device=device)
                data = mapped_tensor(checkpoint.raw(name))
                for first in range(0, info.nbytes, PIECE_BYTES):
                    self._send(data, target, first, hosts, events, turn + first // PIECE_BYTES)
                checkpoint.release(name)
        self.bench.synchronize()
        return time.perf_counter() - began

    def _send(
        self,
        data: torch.Tensor,
        target: torch.Tensor,
        first: int,
        hosts: Sequence[torch.Tensor],
        events: list[torch.cuda.Event | None],
        turn: int,
    ) -> None:
        """Copy a piece through one of two pinned buffers, once its last copy is over."""
        event = events[turn % 2]
        if event is not None:
            event.synchronize()
        part = data[first : first + PIECE_BYTES]
        host = hosts[turn % 2][: part.numel()]
        host.copy_(part)
        target[first : first + PIECE_BYTES].copy_(host, non_blocking=True)
        if target.is_cuda:
            event = events[turn % 2] = torch.cuda.Event()
            event.record()

    def cycles(self, count: int) -> None:
        """Load, run and unload a model many times; every counter must stand where it stood."""
        path = self.folder / "small.hfq"
        write_model(path, self.sizes.small, self.fmt)
        pool = device_pool(self.bench.device)
        seen, at_once = [], []
        with open_checkpoint(path) as checkpoint:
            for _ in range(count):
                model = self.built(checkpoint, pool)
                self.use(model.runner)
                held = pool.counters()
                model.close()
                del model
                at_once.append(self._device_memory())
                # as the engine does after an unload: objects of a model refer to each other
                reclaim()
                seen.append({**_pool_memory(pool.counters(), held), **self._device_memory()})
        self._plans.clear()
        # the first cycle also brings in libraries and compiles kernels
        settled = seen[min(1, count - 1) :]
        same = all(each == settled[0] for each in settled)
        returned = at_once[-1] == {name: seen[-1][name] for name in at_once[-1]}
        found = {"count": count, "cycles": seen, "returned_at_once": returned, "pass": same}
        self.report.parts["cycles"] = found
        self.report.say(
            f"{count} cycles of load, prompt, {STEPS} decode steps, unload: counters after each "
            f"{'are the same' if same else 'DIFFER'}: {seen[-1]}; right after closing "
            f"{'the same' if returned else f'DIFFERENT: {at_once[-1]}'}"
        )
        if not same:
            self.report.say(f"after the first settled cycle: {settled[0]}")

    def _device_memory(self) -> dict[str, int]:
        """Return what torch has allocated and what the device has free."""
        if not self.bench.on_gpu:
            return {}
        self.bench.synchronize()
        return {
            "torch_allocated": torch.cuda.memory_allocated(self.bench.device),
            "torch_reserved": torch.cuda.memory_reserved(self.bench.device),
            "device_free": torch.cuda.mem_get_info(self.bench.device)[0],
        }


def _pool_memory(after: PoolCounters, held: PoolCounters) -> dict[str, int]:
    return {
        "pool_live": after.live,
        "pool_live_bytes": after.live_bytes,
        "pool_waiting_bytes": after.waiting_bytes,
        "pool_live_bytes_while_loaded": held.live_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
