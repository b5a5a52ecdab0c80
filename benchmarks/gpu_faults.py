"""Faults injected into loads on a GPU, one at a time: what each leaves behind, and what a retry finds.

This file does not know how a load is made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from gpu_bench_kit import LaunchedAgain, table
from gpu_load_kit import Loads, Passing, write_model
from hipfire.base.errors import ArtifactError
from hipfire.cache.block import block_count, block_nbytes
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint, open_checkpoint
from hipfire.device.injection import injection_table
from hipfire.device.pool import Block, Pool, device_pool
from hipfire.device.scratch import FixedScratch
from hipfire.device.staging import Owner
from hipfire.device.vmm import MemoryDriver
from hipfire.device.vmm_drivers import memory_driver
from hipfire.device.vmm_injection import growth_table
from hipfire.runtime.gpu_load import GUARD_BYTES, Request, plan_load
from hipfire.runtime.gpu_memory import GrowingCacheMemory, WholeCacheMemory
from hipfire.runtime.retained import RetainedDecode

_ROW = ("constructor", "sites", "passed", "live before and after", "fresh before and after", "failed")


class Faults:
    """The faults of the loads of one device."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    @torch.inference_mode()
    def run(self) -> None:
        """Fail every allocation, every call that maps memory, every tensor and the capture in turn."""
        path = self._loads.folder / "injected.hfq"
        fields = {
            **self._loads.sizes.small,
            "num_hidden_layers": min(2, self._loads.sizes.small["num_hidden_layers"]),
        }
        write_model(path, fields, self._loads.fmt)
        pool = device_pool(self._loads.bench.device)
        with open_checkpoint(path) as checkpoint:
            rows = self._allocations(checkpoint, pool)
            rows += self._damages(checkpoint, pool)
            rows += self._captures(checkpoint, pool)
        self._loads.report.parts["injection"] = {"rows": rows, "pass": all(row["pass"] for row in rows)}
        self._loads.report.say(table(_ROW, _summary(rows)))

    def _allocations(self, checkpoint: Checkpoint, pool: Pool) -> list[dict[str, Any]]:
        wanted = self._loads.request(checkpoint)
        plan = plan_load(wanted, self._loads.bench.machine(LaunchedAgain().capture))
        blocks = block_count(wanted.max_seq)
        block_bytes = block_nbytes(wanted.config.cache_specs(), wanted.mode)

        def load(take: Callable[[int], Block]) -> Owner:
            return _Release(self._loads.built(checkpoint, Passing(pool, take), "legacy").close)

        def scratch(take: Callable[[int], Block]) -> Owner:
            return FixedScratch(take, plan.scratch, GUARD_BYTES)

        def caches(take: Callable[[int], Block]) -> Owner:
            return WholeCacheMemory(take, wanted.slots, blocks, block_bytes)

        def growth(driver: MemoryDriver) -> Owner:
            memory = GrowingCacheMemory(driver, 2, blocks, block_bytes)
            try:
                for slot, count in ((0, 1), (1, 1), (0, blocks), (1, blocks)):
                    memory.ensure(slot, count)
            except BaseException:
                memory.release()
                raise
            return memory

        rows = injection_table("load, caches in one piece", pool, load)
        rows += injection_table("scratch", pool, scratch)
        rows += injection_table("caches in one piece", pool, caches)
        rows += growth_table("caches that grow", memory_driver(self._loads.bench.device), growth)
        return [row.as_json() for row in rows]

    def _damages(self, checkpoint: Checkpoint, pool: Pool) -> list[dict[str, Any]]:
        """Damage each tensor in turn; the load must fail, and the next one must find all memory again."""
        self._loads.built(checkpoint, Passing(pool, pool.take)).close()
        rows, names = [], list(checkpoint.tensors)
        for number, name in enumerate(names, 1):
            before = pool.counters()
            damaged = cast(Checkpoint, _Damaged(checkpoint, name))

            def change(wanted: Request, damaged: Checkpoint = damaged) -> Request:
                layers = wanted.config.sizes.layers
                return dataclasses.replace(
                    wanted, named=NamedCheckpoint(damaged, wanted.family.names, layers)
                )

            refused = False
            try:
                self._loads.built(checkpoint, Passing(pool, pool.take), change=change).close()
            except ArtifactError:
                refused = True
            live_after = pool.counters().live_bytes
            self._loads.built(checkpoint, Passing(pool, pool.take)).close()
            row = {
                "constructor": "load of a damaged tensor",
                "sites": len(names),
                "failed_at": number,
                "live_before": before.live_bytes,
                "live_after": live_after,
                "new_before": before.fresh,
                "new_after_retry": pool.counters().fresh,
                "error_kept": refused,
            }
            kept = row["live_before"] == row["live_after"] and row["new_before"] == row["new_after_retry"]
            rows.append({**row, "pass": refused and kept})
        return rows

    def _captures(self, checkpoint: Checkpoint, pool: Pool) -> list[dict[str, Any]]:
        """Fail the capture of the decode step: steps go on unreplayed, say so, and give the same logits."""
        sound = self._loads.built(checkpoint, Passing(pool, pool.take))
        expected = self._loads.use(sound.runner)
        sound.close()
        before = pool.counters()
        model = self._loads.built(checkpoint, Passing(pool, pool.take), failing=True)
        held = pool.counters().live_bytes
        found = self._loads.use(model.runner)
        grown = pool.counters().live_bytes - held
        replay = model.runner.replay
        assert isinstance(replay, RetainedDecode)
        told = replay.route().fallback_reason is not None and replay.route().selected == "eager"
        model.close()
        equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        after = pool.counters()
        row = {
            "constructor": "capture of a decode step",
            "sites": 1,
            "failed_at": 1,
            "live_before": before.live_bytes,
            "live_after": after.live_bytes,
            "new_before": before.fresh,
            "new_after_retry": after.fresh,
            "logits_equal": equal,
            "fallback_told": told,
        }
        kept = before.live_bytes == after.live_bytes and before.fresh == after.fresh and grown == 0
        return [{**row, "pass": kept and equal and told}]


class _Release:
    """An owner out of a function."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release


class _Damaged:
    """A checkpoint whose tensor `name` begins with bytes that are no finite number in any format."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self.kind = checkpoint.kind
        self.path = checkpoint.path
        self.tensors = checkpoint.tensors
        self.model_config = checkpoint.model_config
        self.release = checkpoint.release

    def raw(self, name: str) -> memoryview:
        """Return the stored bytes, or damaged ones."""
        data = self._checkpoint.raw(name)
        return data if name != self._name else memoryview(b"\xff" * 8 + bytes(data[8:]))


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each constructor."""
    lines = []
    for name, group in itertools.groupby(rows, key=lambda row: str(row["constructor"])):
        of = list(group)
        passed = Counter(bool(row["pass"]) for row in of)[True]
        first, last = of[0], of[-1]
        failed = [str(row["failed_at"]) for row in of if not row["pass"]]
        lines.append(
            [
                name,
                str(first["sites"]),
                f"{passed} of {len(of)}",
                f"{first['live_before']} = {last['live_after']}",
                f"{first['new_before']} = {last['new_after_retry']}",
                ", ".join(failed) or "none",
            ]
        )
    return lines
