"""Tiny models on the CPU engine: near the references, and the same bytes however the work is cut."""

from __future__ import annotations

import pytest
from cpu_kit import raw_bytes
from model_kit import MODELS, RoundingLauncher, decode, fill, text, tiny_runner

from helpers import rms
from hipfire.base.qtypes import QType
from hipfire.kernels.launch import Launcher, LaunchRecord
from hipfire.layers.context import Segment

LENGTH = 90
CODED = (QType.Q8F16, QType.HFQ4G256, QType.MQ4G256, QType.MQ6G256V2)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["f32", "bf16", "q8"])
def test_float_weights_give_the_logits_of_the_references(kind: str, mode: str) -> None:
    tokens = text(LENGTH)
    got = tiny_runner(kind, QType.F32, mode=mode).all_logits(0, tokens)
    plain = tiny_runner(kind, QType.F32, mode=mode, residency="decoded", launcher=Launcher())
    want = plain.all_logits(0, tokens)
    # caches of few bits round what differs by a last bit to neighbouring numbers
    assert rms(got, want) < {"f32": 1e-5, "bf16": 2e-3, "q8": 2e-3}[mode]


@pytest.mark.parametrize(
    ("kind", "qtype"),
    [*(("llama", qtype) for qtype in CODED), ("qwen3", QType.HFQ4G128), ("gemma3", QType.MQ4G256)],
)
def test_packed_weights_cost_only_the_rounding_of_activations(kind: str, qtype: QType) -> None:
    runner = tiny_runner(kind, qtype, mode="f32")
    exact, rounding = (
        tiny_runner(kind, qtype, mode="f32", residency="decoded", launcher=launcher)
        for launcher in (Launcher(), RoundingLauncher())
    )
    tokens = text(LENGTH)
    # over the whole model, where the engine's and the reference's weights are the same
    assert rms(runner.all_logits(0, tokens), exact.all_logits(0, tokens)) < 3e-2
    # with the same rounding, all is equal to float32 but where an activation lies so near a tie that it is
    # rounded to the other side: then that token differs, and all that follow. Few single tokens do
    errors = [rms(runner.prefill(0, [token]), rounding.prefill(0, [token])) for token in tokens[:24]]
    assert sum(error < 1e-5 for error in errors) >= 16, errors


@pytest.mark.parametrize("kind", MODELS)
def test_any_number_of_threads_and_any_chunk_give_the_same_bytes(kind: str) -> None:
    tokens = text(LENGTH)
    found = {}
    for threads, chunk in ((1, 64), (2, 64), (3, 64), (2, 1), (2, 7), (3, 7)):
        runner = tiny_runner(kind, threads=threads, chunk=chunk)
        found[threads, chunk] = raw_bytes(runner.all_logits(0, tokens))
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("qtype", [QType.F32, QType.Q8F16, QType.MQ4G256], ids=lambda qtype: qtype.name)
def test_a_batch_gives_each_sequence_the_bytes_that_it_has_alone(kind: str, qtype: QType) -> None:
    lengths, following = (13, 1, 80, 64), text(4, seed=50)
    runner, alone = tiny_runner(kind, qtype), tiny_runner(kind, qtype)
    places = list(enumerate(lengths))
    fill(runner, lengths)
    together = decode(runner, places, following)
    # and as prefills in one step
    batch = [(Segment(slot, 0, length), text(length, seed=slot)) for slot, length in places]
    started = tiny_runner(kind, qtype).step(batch)
    for index, (slot, length) in enumerate(places):
        first = alone.prefill(slot, text(length, seed=slot))
        assert raw_bytes(started[index]) == raw_bytes(first)
        assert raw_bytes(together[index]) == raw_bytes(alone.decode(slot, following[index], length))


@pytest.mark.parametrize("kind", MODELS)
def test_prefill_and_decode_in_one_step_do_not_touch_each_other(kind: str) -> None:
    runner, alone = tiny_runner(kind), tiny_runner(kind)
    tokens = text(30, seed=9)
    fill(runner, [40])
    mixed = runner.step([(Segment(0, 40, 1), [5]), (Segment(1, 0, 30), tokens)])
    fill(alone, [40])
    assert raw_bytes(mixed[0]) == raw_bytes(alone.decode(0, 5, 40))
    assert raw_bytes(mixed[1]) == raw_bytes(alone.prefill(1, tokens))


@pytest.mark.parametrize("kind", MODELS)
def test_every_operation_but_the_choice_of_rows_runs_on_the_engine(kind: str) -> None:
    tape: list[LaunchRecord] = []
    runner = tiny_runner(kind, QType.MQ4G256)
    runner.launcher.tape = tape
    runner.prefill(0, text(3))
    others = {record.op for record in tape if record.implementation != "numba"}
    assert others == {"gather_rows"}
    tape.clear()
    runner.decode(0, 1, 3)
    assert {record.implementation for record in tape} == {"numba"}
