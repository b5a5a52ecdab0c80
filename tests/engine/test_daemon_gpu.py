"""The daemon with a model on a GPU, which a stand-in for the GPU's memory plays on any machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hipfire.base.errors import InternalError, MemoryLimitError, UnsupportedError, ValidationError
from hipfire.device.platform import Gpu
from hipfire.device.pool import Pool
from hipfire.engine import daemon_model
from hipfire.engine.core import EngineCore
from hipfire.engine.daemon_model import ModelLoader, core_limits
from hipfire.engine.daemon_state import DaemonState
from hipfire.engine.wire import line_of
from hipfire.engine.wire_messages import LoadParams
from hipfire.runtime.admission import MemoryPlan
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model
from hipfire.runtime.runner import Runner
from tiny_models import tiny_model, write_folder

PARAMS = {"kv_mode": "f32", "max_seq": 64, "slots": 2, "prefill_chunk": 16}
GPU = Gpu("A card", "cuda", "sm_90", 1, 2**36, 132, "580.1", "2.13", "13.0", ())
BYTES = 5000


class OnCard:
    """Plays `runtime.gpu_load.GpuModel`: one block of a pool, and runs of the CPU."""

    name = "A card"
    kv_backend = "vmm"
    plan = MemoryPlan(1, 2, 3)

    def __init__(self, runner: Runner, pool: Pool) -> None:
        self.runner = runner
        self._pool = pool
        self._block = pool.take(BYTES)
        self.counters = pool.counters

    def held(self) -> int:
        return self._pool.counters().live_bytes

    def close(self) -> None:
        self._block.release()
        self._pool.drain()


class Card:
    """A daemon's state whose loads go to the card unless they name the CPU."""

    def __init__(self, plain: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain = plain
        self.sent: list[dict[str, Any]] = []
        self.options: list[LoadOptions] = []
        self.freed: list[int] = []
        self.pool = Pool(_aligned)
        self.reading: Callable[[Any], None] = lambda tell: None
        self.state = DaemonState(ModelLoader(), lambda line: self.sent.append(json.loads(line)))
        # a collection takes a second in a process with many libraries
        monkeypatch.setattr(daemon_model, "reclaim", lambda: None)
        monkeypatch.setattr(daemon_model, "device_of", self._choose)
        monkeypatch.setattr(daemon_model, "check_load", self._check)
        monkeypatch.setattr(daemon_model, "load_model", self._load)

    def tell(self, **record: Any) -> dict[str, Any]:
        self.state.handle(line_of(record))
        return self.sent[-1]

    def load(self, **params: Any) -> dict[str, Any]:
        return self.tell(type="load", model=str(self.plain.path), params={**PARAMS, **params})

    def _choose(self, path: Path, options: LoadOptions) -> Gpu | None:
        return None if options.device == "cpu" else GPU

    def _check(self, path: Path, options: LoadOptions, *, freed: int) -> None:
        self.freed.append(freed)

    def _load(self, path: Path, options: LoadOptions, *, compiling: Any, reading: Any) -> LoadedModel:
        self.options.append(options)
        if options.device == "cpu":
            return self.plain
        runner = copy(self.plain.runner)
        runner.site = SimpleNamespace(device=GPU.device)
        on = OnCard(runner, self.pool)
        self.reading(reading)
        return replace(self.plain, runner=runner, on_gpu=on, plan=on.plan, residency="device")


def _aligned(nbytes: int) -> torch.Tensor:
    whole = torch.empty(nbytes + 256, dtype=torch.uint8)
    start = -whole.data_ptr() % 256
    return whole[start : start + nbytes]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_folder(tmp_path_factory.mktemp("models") / "tiny", tiny_model("llama"))
    options = LoadOptions(
        device="cpu", kv_cache="f32", max_seq=64, slots=2, residency="decoded", prefill_chunk=48
    )
    return load_model(folder, options)


@pytest.fixture
def card(plain: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(plain, monkeypatch)


def test_a_model_on_a_gpu_says_so_with_its_memory(card: Card) -> None:
    told = card.load(device="gpu:1", kv_backend="vmm", activations="float")
    assert (told["device"], told["kv_backend"], told["weights"]) == ("A card", "vmm", "device")
    assert told["memory"] == {
        "weights": 1, "caches": 2, "scratch": 3, "held": BYTES,
        "blocks": {"fresh": 1, "reused": 0, "live": 1},
    }  # fmt: skip
    (options,) = card.options
    assert (options.device, options.kv_backend, options.activations) == ("gpu:1", "vmm", "float")
    answer = card.tell(type="diag")
    assert (answer["device"], answer["model_memory"]["held"]) == ("A card", BYTES)


def test_a_model_that_leaves_a_gpu_gives_its_memory_back(card: Card) -> None:
    for _ in range(3):
        card.load()
        assert card.pool.counters().live_bytes == BYTES
    assert card.tell(type="unload")["type"] == "unloaded"
    counts = card.pool.counters()
    assert (counts.live, counts.waiting, counts.fresh, counts.dropped) == (0, 0, 3, 3)
    assert card.tell(type="diag")["device"] is None


def test_only_memory_of_the_same_device_counts_as_given_back(card: Card) -> None:
    card.load()
    card.load()
    # the model on the card gives the host nothing, and one on the host gives the card nothing
    card.load(device="cpu")
    card.load()
    assert card.freed == [0, BYTES, 0, 0]


def test_a_load_that_is_cut_short_leaves_nothing_on_the_gpu(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise InternalError("no core")

    monkeypatch.setattr(daemon_model, "EngineCore", broken)
    refusal = card.load()
    assert (refusal["type"], refusal["model_loaded"]) == ("error", False)
    assert card.pool.counters().live == 0
    assert card.tell(type="diag")["model_loaded"] is False


def test_progress_of_weights_is_told_by_the_percent(card: Card) -> None:
    total = 10**9
    card.reading = lambda tell: [tell(done, total) for done in range(0, total + 1, total // 1000)]  # type: ignore
    card.load()
    told = [line for line in card.sent if line.get("what") == "reading weights to the GPU"]
    assert [line["done"] * 100 // total for line in told] == list(range(101))
    assert {line["total"] for line in told} == {total}


def test_measuring_waits_for_the_gpu(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.load()
    clock = [0.0]

    def synchronize(device: torch.device) -> None:
        assert device == GPU.device
        clock[0] += 2.0

    for name in ("prefill", "step"):
        monkeypatch.setattr(Runner, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(daemon_model, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert card.tell(type="bench_prefill", tokens=40)["ms"] == 2000.0
    # the context's own work is over before the clock is read
    assert card.tell(type="bench_decode", context_tokens=20, iterations=10)["ms"] == 2000.0


@pytest.mark.parametrize(
    "fault", [UnsupportedError("the GPU cannot be used (driver 1.2)", hint="update"), None]
)
def test_diag_tells_of_the_first_gpu(
    card: Card, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    facts = {"name": "A card", "arch": "sm_90", "driver": "580.1", "memory_bytes": 9, "free_bytes": 8}

    def found(most: int) -> list[dict[str, Any]]:
        if fault is not None:
            raise fault
        return [facts][:most]

    monkeypatch.setattr(daemon_model, "gpu_facts", found)
    told = card.tell(type="diag")["gpu"]
    assert told == facts if fault is None else "driver 1.2" in told


def test_the_chunk_of_a_prompt_is_the_runners_own_unless_it_was_chosen(plain: LoadedModel) -> None:
    assert LoadParams().prefill_chunk is None
    assert EngineCore(plain, core_limits(LoadParams()))._chunk == 48
    assert EngineCore(plain, core_limits(LoadParams(prefill_chunk=20)))._chunk == 20
    # the memory of a step is for the runner's chunk
    assert EngineCore(plain, core_limits(LoadParams(prefill_chunk=4096)))._chunk == 48


@pytest.mark.parametrize("device", ["", "GPU", "gpu:", "gpu:-1", "cuda", "gpu:1 "])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        LoadParams(device=device)


def test_a_gpu_without_room_is_told_with_both_numbers(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryLimitError(2**31, 2**30, what="this model on A card")

    card.load()
    monkeypatch.setattr(daemon_model, "check_load", full)
    refusal = card.load()
    assert (refusal["class"], refusal["model_loaded"]) == ("memory", True)
    assert card.pool.counters().live_bytes == BYTES
