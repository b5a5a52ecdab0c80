"""From a file to text and back to free memory on the GPU path, through the Python API and the daemon."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import DEVICE, TARGET
from gpu_model_kit import Again, machine

from hipfire import LLM, GenerationParams, LoadOptions
from hipfire.device.facts import gpu_facts
from hipfire.device.platform import Gpu, find_gpu
from hipfire.device.pool import Pool, device_pool
from hipfire.engine import daemon_model
from hipfire.engine.daemon_model import ModelLoader
from hipfire.engine.daemon_state import DaemonState
from hipfire.engine.wire import line_of
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.runtime import devices, gpu_load
from tiny_models import tiny_model, write_folder

PROMPTS = ["Hello", "Hello you"]
OPTIONS = LoadOptions(kv_cache="f32", max_seq=64, slots=2, activations="float", device="gpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", num_hidden_layers=1, intermediate_size=256)
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", model)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Let this machine pass for a GPU if it has none; give the pools of all loads."""
    made: list[Pool] = []
    gpu = find_gpu() or Gpu("Plain", "cuda", "sm_90", 0, 2**40, 1, "1.0", torch.__version__, "13.0", ())

    def on(found: Gpu) -> gpu_load.Machine:
        made.append(device_pool(DEVICE))
        again = Again()
        graphs.append(again)
        return replace(machine(made[-1], again), name=found.name)

    graphs: list[Again] = []
    build = gpu_load.build

    def built(*args: Any, **named: Any) -> gpu_load.GpuModel:
        model = build(*args, **named)
        engine = model.runner.launcher.engines["triton"]
        assert isinstance(engine, GpuEngine)
        graphs[-1].engine = engine
        return model

    def choose(options: LoadOptions) -> Gpu | None:
        return None if options.device == "cpu" else gpu

    monkeypatch.setattr(devices, "choose_gpu", choose)
    if TARGET == "plain":
        monkeypatch.setattr(gpu_load, "free_memory", lambda _: 2**40)
        monkeypatch.setattr(gpu_load, "keep_kernels", lambda: None)
    monkeypatch.setattr(gpu_load, "_machine", on)
    monkeypatch.setattr(gpu_load, "build", built)
    return made


def right(folder: Path, length: int) -> list[str]:
    llm = LLM(folder, LoadOptions(kv_cache="f32", max_seq=64, residency="decoded", device="cpu"))
    return [each.text for each in llm.generate(PROMPTS, None, GenerationParams(max_tokens=length))]


def test_a_file_becomes_text_and_the_memory_comes_back(folder: Path, pools: list[Pool]) -> None:
    told: list[tuple[int, int]] = []
    llm = LLM(folder, OPTIONS, reading=lambda done, total: told.append((done, total)))
    assert llm.loaded.on_gpu is not None
    assert llm.loaded.memory()["held"] == llm.loaded.on_gpu.held() > 0
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0
    # of the steps after the prompt one is recorded, one captured, one replayed
    reply = llm.generate(PROMPTS[0], None, GenerationParams(max_tokens=4))
    assert reply.text == right(folder, 4)[0]
    llm.close()
    assert llm.loaded.on_gpu.held() == 0
    counts = pools[-1].counters()
    assert (counts.live, counts.waiting) == (0, 0)


def test_the_daemon_serves_from_a_gpu_and_gives_it_back(
    folder: Path, pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(daemon_model, "reclaim", lambda: None)
    state = DaemonState(ModelLoader(), lambda line: sent.append(json.loads(line)))

    def tell(**record: Any) -> dict[str, Any]:
        state.handle(line_of(record))
        return sent[-1]

    params = {"kv_mode": "f32", "max_seq": 64, "slots": 2, "device": "gpu", "activations": "float"}
    loaded = tell(type="load", model=str(folder), params=params)
    assert (loaded["type"], loaded["weights"], loaded["kv_backend"]) == ("loaded", "device", "vmm")
    assert any(line.get("what") == "reading weights to the GPU" for line in sent)
    greedy = {"temperature": 0.0, "max_tokens": 2}
    for name, prompt in zip("ab", PROMPTS, strict=True):
        tell(type="generate", id=name, attempt_id=1, prompt=prompt, **greedy)
    while state.step():
        pass
    for name in "ab":
        tell(type="commit", id=name, attempt_id=1)
    # both are read and decoded together
    texts = ["".join(e["text"] for e in sent if e["type"] == "token" and e["id"] == name) for name in "ab"]
    assert texts == right(folder, 2)
    assert tell(type="diag")["integrity"] == "ok"
    assert tell(type="unload")["type"] == "unloaded"
    assert pools[-1].counters().live == 0


def test_facts_of_a_gpu_are_those_of_the_driver() -> None:
    found = gpu_facts(most=1)
    assert len(found) == int(torch.cuda.is_available())
    for facts in found:
        free, total = torch.cuda.mem_get_info(0)
        assert facts["name"] == torch.cuda.get_device_name(0)
        assert facts["memory_bytes"] >= total >= facts["free_bytes"] > 0
        assert abs(facts["free_bytes"] - free) < 2**30
