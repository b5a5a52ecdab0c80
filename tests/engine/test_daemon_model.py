"""The daemon over model files: what loading admits, what a dropped model gives back, a turn end to end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import weakref
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hipfire import LLM, GenerationParams, LoadOptions
from hipfire.base.errors import MemoryLimitError
from hipfire.base.sampling import SamplingParams
from hipfire.engine import daemon_model
from hipfire.engine.client import Daemon
from hipfire.engine.daemon_model import LoadedResident, ModelLoader, core_limits
from hipfire.engine.daemon_state import DaemonState
from hipfire.engine.process_memory import anonymous_memory
from hipfire.engine.turn import Delta, Done, Event, Ready, TurnKey, TurnRequest
from hipfire.engine.wire import encode_key, encode_request, line_of
from hipfire.engine.wire_messages import LoadParams
from hipfire.runtime import load as loading
from hipfire.runtime.admission import USABLE
from hipfire.runtime.load import check_load
from tiny_models import change_config, tiny_model, write_folder

PARAMS = {"kv_mode": "f32", "max_seq": 64, "weights": "decoded", "slots": 2, "prefill_chunk": 16}
MESSAGES = ({"role": "user", "content": "Hi there"},)
GREEDY = SamplingParams(temperature=0.0)
KEY = TurnKey("a", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", tiny_model("llama"))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 50 MiB, whose coming and going shows in the memory of the process."""
    return write_folder(
        tmp_path_factory.mktemp("models") / "big", tiny_model("llama", intermediate_size=8192)
    )


class Bench:
    """A daemon's state over real models, without a process."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.state = DaemonState(ModelLoader(), lambda line: self.sent.append(json.loads(line)))

    def tell(self, **record: Any) -> dict[str, Any]:
        """Handle a message and return the last thing it was answered with at once."""
        before = len(self.sent)
        self.state.handle(line_of(record))
        return self.sent[before:][-1] if len(self.sent) > before else {}

    def reply(self, request: TurnRequest) -> list[dict[str, Any]]:
        """Run a turn and commit it; return its events."""
        before = len(self.sent)
        self.tell(**encode_request(request))
        while self.state.step():
            pass
        self.tell(**encode_key("commit", request.key))
        return self.sent[before:]


def request(name: str = "a", length: int = 8) -> TurnRequest:
    return TurnRequest(
        TurnKey(name, 1), MESSAGES, sampling=GREEDY, generation=GenerationParams(max_tokens=length)
    )


def resident_of(bench: Bench) -> LoadedResident:
    resident = bench.state._resident
    assert isinstance(resident, LoadedResident)
    return resident


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "token")


def expected(folder: Path, length: int = 8) -> str:
    llm = LLM(folder, LoadOptions(kv_cache="f32", max_seq=64, residency="decoded"))
    return llm.chat(list(MESSAGES), GREEDY, GenerationParams(max_tokens=length)).text


def test_a_turn_gives_the_text_of_the_offline_interface(folder: Path) -> None:
    bench = Bench()
    loaded = bench.tell(type="load", model=str(folder), params=PARAMS)
    facts = {
        "type": "loaded", "model": str(folder), "arch": "llama", "dim": 256, "layers": 2, "vocab": 264,
        "max_seq": 64, "max_seq_limit": 4096, "kv_mode": "f32", "weights": "decoded", "slots": 2,
        "chat": True, "continuous_batch_capable": True, "reasoning_contract": "none", "tools": None,
    }  # fmt: skip
    assert facts.items() <= loaded.items()
    first, second = bench.reply(request("a")), bench.reply(request("b"))
    assert text_of(first) == text_of(second) == expected(folder)
    assert [events[-1]["type"] for events in (first, second)] == ["done", "done"]
    # the second prompt is the first one's
    assert (first[-1]["cached_tokens"], second[-1]["cached_tokens"]) == (0, first[-1]["prompt_tokens"] - 1)
    answer = bench.tell(type="diag")
    assert (answer["integrity"], answer["turns"], answer["device"]) == ("ok", 0, "cpu")


def test_measuring_leaves_no_trace_in_later_turns(folder: Path) -> None:
    bench = Bench()
    bench.tell(type="load", model=str(folder), params=PARAMS)
    bench.reply(request("a"))
    prefill = bench.tell(type="bench_prefill", tokens=40)
    decode = bench.tell(type="bench_decode", context_tokens=20, iterations=10)
    assert prefill["tok_s"] == pytest.approx(40 / prefill["ms"] * 1e3, rel=0.01)
    assert decode["tok_s"] == pytest.approx(10 / decode["ms"] * 1e3, rel=0.01)
    after = bench.reply(request("b"))
    assert text_of(after) == expected(folder)
    assert after[-1]["cached_tokens"] == 0
    for message in ({"type": "bench_prefill", "tokens": 65},
                    {"type": "bench_decode", "context_tokens": 60, "iterations": 5}):  # fmt: skip
        refusal = bench.tell(**message)
        assert (refusal["class"], refusal["requested"], refusal["limit"]) == ("context_length", 65, 64)


@pytest.mark.parametrize("fault", ["missing", "config", "damaged", "max_seq", "kv_mode"])
def test_a_model_that_cannot_be_loaded_leaves_the_resident_one_serving(
    folder: Path, tmp_path: Path, fault: str
) -> None:
    other, params = write_folder(tmp_path / "other", tiny_model("llama")), dict(PARAMS)
    if fault == "missing":
        other = tmp_path / "nothing"
    elif fault == "config":
        change_config(other, hidden_act="tanh")
    elif fault == "damaged":
        weights = other / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        params[fault] = {"max_seq": 5000, "kv_mode": "q9"}[fault]
    bench = Bench()
    bench.tell(type="load", model=str(folder), params=PARAMS)
    refusal = bench.tell(type="load", model=str(other), params=params)
    assert (refusal["type"], refusal["model_loaded"]) == ("error", True)
    assert text_of(bench.reply(request())) == expected(folder)


def test_admission_counts_what_the_resident_model_gives_back(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LoadOptions(kv_cache="f32", max_seq=64, slots=2, residency="decoded", prefill_chunk=16)
    need = int(check_load(big, options).total / USABLE) + 1
    bench = Bench()
    bench.tell(type="load", model=str(big), params=PARAMS)
    freed = resident_of(bench).freed_on(None)
    free = need - 2 * freed
    monkeypatch.setattr(loading, "available_memory", lambda: free if bench.state._resident else need)
    refusal = bench.tell(type="load", model=str(big), params=PARAMS)
    assert (refusal["class"], refusal["model_loaded"]) == ("memory", True)
    assert text_of(bench.reply(request())) != ""
    # not enough beside the resident model, but enough in its place
    free = need - freed // 2
    with pytest.raises(MemoryLimitError):
        check_load(big, options)
    assert bench.tell(type="load", model=str(big), params=PARAMS)["type"] == "loaded"


def memory_of_a_load(big: str) -> tuple[int, int, bool, int]:
    """Return a model's weights, what it says it gives back, whether it went, and what stays: bytes."""
    bench = Bench()
    # a process's first load also brings in the compiler, which stays
    bench.tell(type="load", model=big, params=PARAMS)
    bench.tell(type="unload")
    ModelLoader().reclaim()
    before = anonymous_memory()
    bench.tell(type="load", model=big, params=PARAMS)
    resident = resident_of(bench)
    weights, freed = resident.describe()["memory"]["weights"], resident.freed_on(None)
    model = weakref.ref(resident._loaded.model)
    del resident
    bench.reply(request())
    assert bench.tell(type="unload")["type"] == "unloaded"
    return weights, freed, model() is None, anonymous_memory() - before


def test_a_dropped_model_gives_its_memory_back(big: Path) -> None:
    # in a process of its own: what lies free in this one would be taken first, and not be counted
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        weights, freed, gone, stays = process.submit(memory_of_a_load, str(big)).result()
    assert 0.8 * weights < freed < 2 * weights
    assert gone
    assert stays < 0.2 * weights


def test_zero_is_no_limit() -> None:
    limits = core_limits(
        LoadParams(max_queue=0, queue_timeout_s=0, commit_timeout_s=5, sampling=GREEDY, max_tokens=9)
    )
    assert limits.max_queue > 2**20
    assert limits.queue_timeout_s == float("inf")
    assert (limits.commit_timeout_s, limits.default_sampling, limits.default_max_tokens) == (5, GREEDY, 9)
    some = core_limits(LoadParams(max_queue=3, queue_timeout_s=4))
    assert (some.max_queue, some.queue_timeout_s) == (3, 4)


def test_threads_come_from_the_load_or_else_from_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(daemon_model.torch, "set_num_threads", chosen.append)
    bench = Bench()
    bench.tell(type="configure", config={"threads": 3})
    bench.tell(type="load", model=str(folder), params=PARAMS)
    bench.tell(type="load", model=str(folder), params={**PARAMS, "threads": 2})
    assert chosen == [3, 2]


def test_memory_is_unknown_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert anonymous_memory(tmp_path / "status") == 0
    (tmp_path / "status").write_text("Name:\tx\nRssAnon:\t    12 kB\nRssFile:\t 9 kB\n")
    assert anonymous_memory(tmp_path / "status") == 12 * 1024


def test_the_daemon_runs_as_a_module_and_answers_a_client(folder: Path, tmp_path: Path) -> None:
    async def work() -> list[Event]:
        command = [sys.executable, "-m", "hipfire.engine.daemon"]
        log = tmp_path / "daemon.log"
        daemon = await Daemon.start(command, {**os.environ, "HIPFIRE_HOME": str(tmp_path)}, log)
        try:
            await daemon.request("load", model=str(folder), params=PARAMS)
            events = []
            async for event in daemon.generate(request()):
                events.append(event)
                if isinstance(event, Ready):
                    daemon.commit(event.key)
            return events
        finally:
            await daemon.close()

    events = asyncio.run(asyncio.wait_for(work(), 120))
    assert isinstance(events[-1], Done)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == expected(folder)
