"""Steps taken three ways: equal on both engines, and every planted difference is found."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from retained_kit import SLOTS, Steps, attend_kernel

from hipfire.base.errors import ContextLengthError, UnsupportedError, ValidationError
from hipfire.base.qtypes import QType
from hipfire.base.types import CacheSpec
from hipfire.cache.block import BLOCK_MODES, BlockCache, block_nbytes
from hipfire.cache.kv import KV_MODES, KvCache
from hipfire.kernels.gpu.engine import GpuLaunch
from hipfire.runtime.parity import capture, compare
from hipfire.runtime.parity_steps import Plan
from hipfire.runtime.retained import RetainedDecode
from hipfire.runtime.runner import Runner

PLAN = Plan(context=3, positions=2, batch=2)


@pytest.fixture
def tiny_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    """The kit of the CPU engine's tests, whose models run on its programs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cpu"))
    from model_kit import tiny_runner  # noqa: PLC0415 - a kit of another folder of tests

    yield tiny_runner
    sys.modules.pop("model_kit", None)


def compared(steps: Any, plan: Plan = PLAN) -> dict[str, Any]:
    return compare(steps, plan)


def retained_of(steps: Steps) -> RetainedDecode:
    assert steps.replay is not None
    return steps.replay


@pytest.mark.parametrize(
    ("kind", "mode", "batch"), [("llama", "bf16", 1), ("gemma3", "q8", 3), ("qwen3_5", "bf16", 2)]
)
def test_programs_of_the_cpu_engine_are_exact_at_15_positions(
    tiny_runner: Callable[..., Runner], kind: str, mode: str, batch: int
) -> None:
    runner = tiny_runner(kind, QType.MQ4G256, mode=mode)
    # the prompts end in a chunk of one token, and the steps cross the border of a chunk of keys
    found = compared(runner, Plan(context=63, positions=15, batch=batch))
    assert found["exact"], found["first_divergence"]
    state = {"state": True} if runner.recurrent else {}
    assert found["equal"] == {"logits": True, "kv": True, "scratch": True, **state}
    if runner.recurrent:
        # the step writes all of a state: 384 channels of 3 inputs and 4 matrices of 32 x 64
        assert found["arms"]["eager"]["state"]["bytes"] == batch * 4 * (384 * 3 + 4 * 32 * 64)
    assert found["arms"]["eager"] == found["arms"]["prepared"] == found["arms"]["relaunched"]
    assert found["arms"]["eager"]["logits"]["bytes"] == batch * 264 * 4
    assert all(guard["equal"] and guard["bytes"] > 10_000 for guard in found["guard"].values())
    assert [route["replays"] for route in found["route"].values()] == [0, 15, 0]
    assert [route["relaunches"] for route in found["route"].values()] == [0, 0, 15]
    # and serving goes on where it was
    assert runner.replay is not None
    assert runner.replay.request == "prepared"


def test_captures_at_several_places_have_one_key(tiny_runner: Callable[..., Runner]) -> None:
    runner = tiny_runner("qwen3", QType.HFQ4G256)
    found = [capture(runner, Plan(context=context, batch=2)) for context in (1, 2, 70)]
    keys = {(each["launches"], each["kernels"], each["sequence_hash"]) for each in found}
    assert len(keys) == 1
    assert found[0]["launches"] > found[0]["kernels"] == found[0]["contracts"]["kernels"] > 5
    assert not any(found[0]["contracts"][name] for name in ("faults", "undeclared", "libraries"))
    assert {(each["launches"], each["sequence_hash"]) for each in [capture(runner, Plan(batch=1))]} != keys


def test_graphs_of_the_gpu_engine_are_exact_with_guards() -> None:
    steps = Steps()
    found = compared(steps, Plan(context=2, positions=15, batch=2))
    assert found["exact"], found
    # the cache's rows behind the sequences and of the other slots, and both ends of two results
    rows = 40 - (2 + 15) + 40 - (3 + 15) + 2 * 40
    assert found["guard"]["prepared"]["bytes"] == rows * 16 * 4 + 4 * 64
    assert len(steps.graphs) == 1


class Wrong:
    """A graph that does something besides what was captured."""

    def __init__(self, graph: Any, extra: Callable[[], None]) -> None:
        self.graph, self.extra = graph, extra

    def replay(self) -> None:
        self.graph.replay()
        self.extra()


def planted(steps: Steps, extra: Callable[[], None]) -> Steps:
    normal = steps.capture
    retained_of(steps)._capture = lambda run: Wrong(normal(run), extra)
    return steps


def memory_of(steps: Steps, name: str) -> torch.Tensor:
    return steps.memory.memory[name, 0]


@pytest.mark.parametrize(
    ("surface", "spoil"),
    [
        ("logits", lambda steps: memory_of(steps, "logits")[64:68].add_(1)),
        ("kv", lambda steps: steps.cache.memory[1, 4, 3].add_(1e-6)),
        ("scratch", lambda steps: memory_of(steps, "attended")[64:68].add_(1)),
        ("scratch", lambda steps: memory_of(steps, "attended")[-65:-64].add_(1)),
    ],
    ids=["logits", "kv", "scratch", "scratch that no one reads"],
)
def test_one_byte_that_differs_is_found_and_placed(surface: str, spoil: Callable[[Steps], None]) -> None:
    steps = Steps()
    found = compared(planted(steps, lambda: spoil(steps)))
    assert not found["exact"]
    assert not found["equal"][surface]
    place = found["first_divergence"]
    assert (place["arm"], place["position"]) == ("prepared", 0)
    # logits lie in the memory of results too, which comes first
    assert place["surface"] == ("scratch" if surface == "logits" else surface)
    assert found["equal"]["kv"] == (surface != "kv")
    assert found["arms"]["eager"] == found["arms"]["relaunched"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda steps: steps.cache.memory[0, PLAN.context + PLAN.positions, 0].fill_(1.0),
        lambda steps: steps.cache.memory[SLOTS - 1, 0, 0].fill_(1.0),
        lambda steps: memory_of(steps, "logits")[-1:].fill_(1),
        lambda steps: memory_of(steps, "attended")[63:64].fill_(1),
    ],
    ids=["next row", "another slot", "behind a result", "before a result"],
)
def test_a_write_where_no_step_may_write_is_found(spoil: Callable[[Steps], None]) -> None:
    steps = Steps()
    found = compared(planted(steps, lambda: spoil(steps)))
    assert not found["exact"]
    assert [found["guard"][arm]["equal"] for arm in ("eager", "prepared")] == [True, False]


def test_a_graph_that_lacks_a_launch_is_found() -> None:
    steps = Steps()
    normal = steps.capture

    def lossy(run: Callable[[], object]) -> Any:
        graph = normal(run)
        graph.launches = [each for each in graph.launches if each.kernel is not attend_kernel]
        return graph

    retained_of(steps)._capture = lossy
    found = compared(steps)
    assert found["equal"] == {"logits": False, "kv": True, "scratch": False}
    assert found["first_divergence"]["region"] == "attended[0]"


def test_a_tape_that_was_changed_is_found() -> None:
    steps = Steps()
    normal, changed = steps.capture, []

    def capturing(run: Callable[[], object]) -> Any:
        graph = normal(run)
        tape = retained_of(steps)._steps[2].tape
        launch: GpuLaunch = tape.launches[0]
        changed.append(launch)
        tape.launches[0] = dataclasses.replace(launch, arguments={**launch.arguments, "slot_stride": 16})
        return graph

    retained_of(steps)._capture = capturing
    found = compared(steps)
    assert changed
    assert found["route_proven"]
    assert found["first_divergence"]["arm"] == "relaunched"
    assert found["arms"]["eager"] == found["arms"]["prepared"] != found["arms"]["relaunched"]


def test_arms_that_are_all_eager_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetainedDecode, "again", lambda self, batch: None)
    monkeypatch.setattr(RetainedDecode, "_start", lambda self, recorded, batch: None)
    found = compared(Steps())
    assert not found["route_proven"]
    assert not found["exact"]


def test_a_replay_that_fails_is_no_parity() -> None:
    steps = Steps()
    retained_of(steps)._fault = "a replay failed: earlier"
    found = compared(steps)
    assert all(found["equal"].values())
    assert not found["route_proven"]
    assert not found["exact"]
    assert found["route"]["prepared"]["fallback_reason"] == "a replay failed: earlier"


def test_a_surface_that_nobody_saw_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetainedDecode, "scratch", lambda self, batch: [])
    found = compared(Steps())
    assert found["equal"] == {"logits": True, "kv": True, "scratch": False}
    assert not found["exact"]


def test_what_cannot_be_compared_is_refused() -> None:
    plain: Any = Steps(replaying=False)
    with pytest.raises(UnsupportedError, match="nothing to compare"):
        compare(plain, PLAN)
    with pytest.raises(ValidationError, match="5 sequences do not fit into 4 slots"):
        compared(Steps(), Plan(1, 1, SLOTS + 1))
    with pytest.raises(ContextLengthError) as caught:
        compared(Steps(), Plan(30, 10, 2))
    assert (caught.value.requested, caught.value.limit) == (41, 40)
    with pytest.raises(ValidationError, match="at least 1"):
        Plan(0)
    spoiled = Steps()
    spoiled.before = lambda: spoiled.engine.spoil("mystery")
    runner: Any = spoiled
    with pytest.raises(UnsupportedError, match="operation mystery ran outside"):
        capture(runner, PLAN)


class Memory:
    """Memory of two slots with two blocks each."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.zeros(2, 2, nbytes, dtype=torch.uint8)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def ensure(self, slot: int, blocks: int) -> None:
        assert (slot < 2, blocks <= 2) == (True, True)


@pytest.mark.parametrize(("start", "stop", "sizes"), [(0, 5, [5]), (250, 260, [6, 4]), (256, 512, [256])])
def test_rows_of_caches_are_seen_where_they_lie(start: int, stop: int, sizes: list[int]) -> None:
    specs, mode = [CacheSpec(2, 32), CacheSpec(1, 64)], BLOCK_MODES["f32"]
    blocked = BlockCache(specs, mode=mode, max_seq=512, memory=Memory(block_nbytes(specs, mode)))
    plain = KvCache(specs, mode=KV_MODES["f32"], slots=2, max_seq=512)
    for cache in (blocked, plain):
        for plane in (*cache._keys, *cache._values):
            plane.zero_()
        views = cache.views(1, start, stop)
        for _, view in views:
            view.fill_(1.0)
        for plane in (*cache._keys, *cache._values):
            rows = plane.reshape(2, 512, 64)
            assert (rows[1, start:stop] == 1).all()
            assert rows.sum() == 64 * (stop - start)
    assert [
        view.shape[0] for name, view in blocked.views(1, start, stop) if name == "keys of layer 0"
    ] == sizes
    assert [view.shape[0] for name, view in plain.views(1, start, stop)] == [stop - start] * 4
