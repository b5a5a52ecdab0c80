"""Whole models on the GPU path against the references: prefill, decode, batches, replay, memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from gpu_kit import DEVICE, relative_rms
from gpu_model_kit import load, machine, reference, request

from hipfire.base.errors import UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.device.pool import device_pool
from hipfire.device.vmm import MemoryDriver
from hipfire.layers.context import Segment
from hipfire.runtime.gpu_load import build, plan_load
from tiny_models import KINDS

TEXT = [3, 17, 5, 90]


@pytest.mark.parametrize("kind", list(KINDS))
def test_exact_arithmetic_gives_the_numbers_of_the_references(kind: str) -> None:
    wanted = request(kind, QType.MQ4G256 if kind == "qwen3" else QType.HFQ4G128)
    model, right = load(wanted), reference(wanted)
    assert relative_rms(model.runner.prefill(0, TEXT), right.prefill(0, TEXT)) < 1e-5
    for position, token in enumerate((8, 9, 10), len(TEXT)):
        # the first step is recorded, the second captured, the third replayed
        found, wants = model.runner.decode(0, token, position), right.decode(0, token, position)
        assert relative_rms(found, wants) < 1e-5
    assert model.runner.replay is not None
    assert model.runner.replay.route().replays == 2
    model.close()


def test_int8_activations_and_q8_caches_stay_close() -> None:
    wanted = request("llama", QType.HFQ4G128, mode="q8", arithmetic="int8")
    model, right = load(wanted), reference(wanted)
    assert relative_rms(model.runner.prefill(1, TEXT), right.prefill(1, TEXT)) < 3e-2
    found, wants = model.runner.decode(1, 5, len(TEXT)), right.decode(1, 5, len(TEXT))
    assert relative_rms(found, wants) < 3e-2
    model.close()


def test_a_long_prompt_takes_the_library_and_a_batch_steps_ragged_sequences() -> None:
    wanted = request("gemma3", QType.HFQ4G128)
    model, right = load(wanted), reference(wanted)
    long = [(7 * index) % 120 for index in range(132)]
    assert relative_rms(model.runner.prefill(0, long), right.prefill(0, long)) < 1e-5
    assert relative_rms(model.runner.prefill(1, TEXT), right.prefill(1, TEXT)) < 1e-5
    batch = [(Segment(1, len(TEXT), 1), (4,)), (Segment(0, len(long), 1), (5,))]
    assert relative_rms(model.runner.step(batch), right.step(batch)) < 1e-5
    mixed = [(Segment(1, len(TEXT) + 1, 3), (4, 5, 6)), (Segment(0, len(long) + 1, 1), (7,))]
    assert relative_rms(model.runner.step(mixed), right.step(mixed)) < 1e-5
    model.close()


def test_every_row_of_a_text_and_shared_rows() -> None:
    wanted = request("llama", QType.Q8F16)
    model, right = load(wanted), reference(wanted)
    assert relative_rms(model.runner.all_logits(0, TEXT), right.all_logits(0, TEXT)) < 1e-5
    for runner in (model.runner, right):
        runner.share_rows(0, 1, 4)
    assert relative_rms(model.runner.decode(1, 3, 4), right.decode(1, 3, 4)) < 1e-5
    model.close()


def test_logits_of_a_step_are_not_changed_by_later_ones() -> None:
    model = load(request("llama", QType.HFQ4G128))
    first = model.runner.prefill(0, TEXT)
    kept = [first] + [model.runner.decode(0, token, len(TEXT) + token) for token in range(4)]
    copies = [each.clone() for each in kept]
    model.runner.decode(0, 99, len(TEXT) + 4)
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
    model.close()


@pytest.mark.parametrize("backend", ["vmm", "legacy"])
def test_closing_gives_everything_back_and_the_plan_says_what_a_load_takes(backend) -> None:
    pool, wanted = device_pool(DEVICE), request("llama", QType.HFQ4G128, backend=backend)
    model = load(wanted, pool)
    taken = model.counters()
    assert taken.live_bytes > 0
    model.runner.prefill(0, TEXT)
    assert model.counters() == taken
    assert model.runner.replay is not None
    held = weakref.ref(model.runner.model)
    model.close()
    assert pool.counters().live_bytes == 0
    # nothing but its holder keeps a closed model, so its memory does not wait for a collection of garbage
    gc.disable()
    try:
        del model
        assert held() is None
    finally:
        gc.enable()


def test_without_a_driver_caches_take_their_memory_at_once_unless_that_is_refused() -> None:
    def missing() -> MemoryDriver:
        raise UnsupportedError("no driver here")

    on = replace(machine(), driver=missing)
    wanted = request("llama", QType.HFQ4G128, backend="auto")
    model = build(wanted, on, plan_load(wanted, on))
    assert model.kv_backend == "legacy"
    model.close()
    with pytest.raises(UnsupportedError, match="legacy"):
        build(replace(wanted, kv_backend="vmm"), on, plan_load(wanted, on))
    assert on.pool.counters().live == 0


def test_the_cache_grows_under_a_recorded_step_without_moving() -> None:
    wanted = request("llama", QType.HFQ4G128)
    model, right = load(wanted), reference(wanted)
    buffer = model.runner.cache._memory.buffer()
    with torch.inference_mode():
        buffer[0, 0].zero_()
        for kept in (*right.cache._keys, *right.cache._values):
            kept.zero_()
    for position in range(3):
        assert relative_rms(model.runner.decode(0, 3, position), right.decode(0, 3, position)) < 1e-5
    # position 259 lies in the second block, which has no memory yet; the positions before it hold zeros
    model.runner.cache.ensure(0, 260)
    assert model.runner.cache._memory.buffer().data_ptr() == buffer.data_ptr()
    with torch.inference_mode():
        buffer[0, 1].zero_()
    for runner in (model.runner, right):
        runner._filled[0] = 259
    found, wants = model.runner.decode(0, 9, 259), right.decode(0, 9, 259)
    assert relative_rms(found, wants) < 1e-5
    assert found.device.type == DEVICE.type
    assert model.runner.replay is not None
    assert model.runner.replay.route().replays == 3
    model.close()
