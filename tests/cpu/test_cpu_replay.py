"""Recorded decode steps: the bytes of steps run one by one, for any slots, positions and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from cpu_kit import raw_bytes
from model_kit import MODELS, decode, fill, text, tiny_runner

from helpers import rms
from hipfire.base.qtypes import QType
from hipfire.kernels.cpu.engine import CpuEngine, Launch, Program, encode
from hipfire.kernels.cpu.pool import FIRST_ARGUMENT, ROW_LENGTH
from hipfire.kernels.launch import Launcher
from hipfire.layers.context import Segment, StepContext
from hipfire.runtime import replay
from hipfire.runtime.replay import DecodeReplay
from hipfire.runtime.runner import Runner

LENGTHS = (13, 1, 80, 64, 5)


def replay_of(runner: Runner) -> DecodeReplay:
    assert runner.replay is not None
    return runner.replay


def program_of(runner: Runner, batch_size: int) -> Program:
    program = replay_of(runner).program(batch_size)
    assert program is not None
    return program


def steps(slots: Sequence[Sequence[int]]) -> list[tuple[list[tuple[int, int]], list[int]]]:
    """Places and tokens of decode steps for these slots, each at its own next position."""
    positions, found = list(LENGTHS), []
    for index, chosen in enumerate(slots):
        places = []
        for slot in chosen:
            places.append((slot, positions[slot]))
            positions[slot] += 1
        found.append((places, text(len(chosen), seed=100 + index)))
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["bf16", "q8"])
@pytest.mark.parametrize("qtype", [QType.HFQ4G256, QType.MQ4G256], ids=lambda qtype: qtype.name)
def test_replayed_steps_have_the_bytes_of_steps_run_one_by_one(kind: str, mode: str, qtype: QType) -> None:
    runner, eager = (tiny_runner(kind, qtype, mode=mode) for _ in range(2))
    eager.replay = None
    for each in (runner, eager):
        fill(each, LENGTHS)
    # sizes come and go, and so do slots, in any order; 64 and 80 go over into a new chunk of keys
    slots = [[0], [2], [0], [1, 3], [3, 0], [4, 2, 0, 1], [2], [2, 1], [0, 1, 2, 4], [3]]
    for places, tokens in steps(slots):
        assert raw_bytes(decode(runner, places, tokens)) == raw_bytes(decode(eager, places, tokens))
    assert all(replay_of(runner).program(size) is not None for size in (1, 2, 4))
    assert program_of(runner, 1).barriers < program_of(runner, 1).length


def test_a_slot_may_start_again_and_go_back() -> None:
    runner, eager = tiny_runner("gemma3"), tiny_runner("gemma3")
    eager.replay = None
    for position, token in [(0, 3), (1, 4), (2, 5), (1, 6), (2, 7), (0, 8), (1, 9)]:
        assert raw_bytes(runner.decode(0, token, position)) == raw_bytes(eager.decode(0, token, position))


def test_logits_that_were_returned_are_not_changed_by_later_steps() -> None:
    runner = tiny_runner("llama")
    returned = [runner.decode(0, token, position) for position, token in enumerate(text(4))]
    kept = [raw_bytes(logits) for logits in returned]
    assert len(set(kept)) == 4
    runner.decode(0, 7, 4)
    assert [raw_bytes(logits) for logits in returned] == kept


def test_the_memory_of_logits_is_used_again_only_once_nobody_holds_a_part_of_them() -> None:
    runner = tiny_runner("llama")
    runner.decode(0, 1, 0)
    for take in (lambda row: row, lambda row: row[3:5], lambda row: row.numpy()[1:], torch.Tensor.clone):
        held, kept, places = [], [], []
        for position in range(1, replay.MOST_RESULTS + 4):
            row = runner.decode(0, position, position)
            places.append(row.data_ptr())
            held.append(take(row))
            kept.append(np.asarray(held[-1]).tobytes())
            del row
        assert [np.asarray(each).tobytes() for each in held] == kept
        assert (len(set(places)) == 1) == (take is torch.Tensor.clone)


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_with_an_operation_outside_of_the_engine_is_not_replayed(kind: str) -> None:
    engine = CpuEngine(2)
    runner = tiny_runner(kind, residency="decoded", mode="f32", launcher=Launcher(engines={"numba": engine}))
    plain = tiny_runner(kind, residency="decoded", mode="f32", launcher=Launcher())
    for position, token in enumerate(text(5)):
        assert rms(runner.decode(0, token, position), plain.decode(0, token, position)) < 1e-5
        assert replay_of(runner).program(1) is None
    assert not replay_of(runner)._possible


def test_a_step_that_fails_while_it_is_recorded_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, eager = tiny_runner("llama"), tiny_runner("llama")
    with monkeypatch.context() as patch:
        patch.setattr(type(runner.model), "logits", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            runner.decode(0, 1, 0)
    eager.replay = None
    assert replay_of(runner).program(1) is None
    for position, token in enumerate(text(3)):
        assert raw_bytes(runner.decode(0, token, position)) == raw_bytes(eager.decode(0, token, position))
    assert replay_of(runner).program(1) is not None


def test_the_program_unused_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_PROGRAMS", 2)
    runner = tiny_runner("qwen3")
    held = []
    for size in (1, 2, 1, 3, 1, 2):
        decode(runner, [(slot, 0) for slot in range(size)], text(size))
        held.append({n for n in (1, 2, 3) if replay_of(runner).program(n) is not None})
    assert held == [{1}, {1, 2}, {1, 2}, {1, 3}, {1, 3}, {1, 2}]


def test_two_tokens_of_one_slot_are_no_decode_step() -> None:
    runner, eager = tiny_runner("llama"), tiny_runner("llama")
    got = runner.step([(Segment(0, 0, 1), [3]), (Segment(0, 1, 1), [4])])
    assert replay_of(runner).program(2) is None
    assert raw_bytes(got[1]) == raw_bytes(eager.prefill(0, [3, 4]))


def span(tensor: torch.Tensor) -> range:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def meet(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    pairs = ((a, b) for a in map(span, some) for b in map(span, others))
    return any(max(a.start, b.start) < min(a.stop, b.stop) for a, b in pairs)


@pytest.mark.parametrize("kind", MODELS)
def test_threads_wait_for_all_that_a_row_depends_on(kind: str) -> None:
    runner = tiny_runner(kind, QType.MQ4G256)
    decode(runner, [(0, 0), (1, 0)], [1, 2])
    program = program_of(runner, 2)
    launches: list[Launch] = list(program._alive[0])
    waits = [bool(flag) for flag in program._rows[: program.length, 0]]
    for index, launch in enumerate(launches):
        for earlier, before in enumerate(launches[:index]):
            touched = [*before.reads, *before.writes]
            depends = meet(launch.reads, before.writes) or meet(launch.writes, touched)
            if depends and (launch.units is None or launch.units != before.units):
                assert any(waits[earlier + 1 : index + 1]), (before.kernel.name, launch.kernel.name)


def recorded(runner: Runner, engine: CpuEngine, tokens: int) -> list[Launch]:
    """The rows of a prefill of so many tokens."""
    context = StepContext(runner.launcher, runner.cache, [Segment(0, 0, tokens)], torch.device("cpu"))
    engine.record()
    runner._eager(context, text(tokens), every_row=True)
    program = engine.finish()
    assert program is not None
    return list(program._alive[0])


def contents(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    return [raw_bytes(tensor) for tensor in tensors]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tokens", [1, 40])
@torch.inference_mode()
def test_rows_read_and_write_what_they_say(kind: str, tokens: int) -> None:
    """Each launch of a step is run again by itself, with all poisoned that it does not say it reads."""
    runner = tiny_runner(kind, QType.MQ4G256)
    engine = runner.launcher.engines["numba"]
    assert isinstance(engine, CpuEngine)
    # large enough from the start, so that all rows share it
    scratch, _ = engine.scratch(1 << 22)
    launches = recorded(runner, engine, tokens)
    passed = [[value for value in launch.arguments if isinstance(value, torch.Tensor)] for launch in launches]
    changing = [tensor for launch in launches for tensor in launch.writes] + [scratch]
    for launch, tensors in zip(launches, passed, strict=True):
        said = [*launch.reads, *launch.writes]
        assert all(any(tensor is other for other in tensors) for tensor in said), launch.kernel.name
        silent = [t for t in tensors if meet([t], changing) and not any(t is other for other in said)]
        others = [t for t in tensors if not meet([t], launch.writes) and t is not scratch]
        before = contents(others)
        run = (launch.kernel, *launch.arguments)
        engine.launch(*run, reads=launch.reads, writes=launch.writes)
        result = contents(launch.writes)
        assert contents(others) == before, f"{launch.kernel.name} writes what it does not say"
        copies = [tensor.clone() for tensor in silent]
        for tensor in silent:
            tensor.view(torch.uint8).fill_(255)
        engine.launch(*run, reads=launch.reads, writes=launch.writes)
        assert contents(launch.writes) == result, f"{launch.kernel.name} reads what it does not say"
        for tensor, copy in zip(silent, copies, strict=True):
            tensor.copy_(copy)


def part_of(launch: Launch, part: int, poisoned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run one of three parts of a launch alone, with these tensors poisoned first; returns what it writes."""
    for tensor in poisoned:
        tensor.view(torch.uint8).fill_(255)
    row = np.zeros(ROW_LENGTH, np.int64)
    encode(launch, row)
    arguments = row[FIRST_ARGUMENT:].copy()
    launch.kernel(arguments.ctypes.data, part, 3)
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in launch.writes]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("qtype", "tokens"), [(QType.MQ4G256, 1), (QType.HFQ4G256, 7)])
@torch.inference_mode()
def test_kernels_of_equal_units_need_only_what_their_own_part_wrote(
    kind: str, qtype: QType, tokens: int
) -> None:
    runner = tiny_runner(kind, qtype, threads=3)
    engine = runner.launcher.engines["numba"]
    assert isinstance(engine, CpuEngine)
    launches = recorded(runner, engine, tokens)
    pairs = [
        (first, second)
        for index, second in enumerate(launches)
        for first in launches[:index]
        if first.units is not None and first.units == second.units and meet(first.writes, second.reads)
    ]
    assert len(pairs) >= 2
    for first, second in pairs:
        saved = [(tensor, tensor.clone()) for tensor in (*first.writes, *second.writes)]
        for part in range(3):
            whole = part_of(second, part, second.writes)
            part_of(first, part, first.writes)
            alone = part_of(second, part, second.writes)
            assert all(map(torch.equal, alone, whole)), (first.kernel.name, second.kernel.name)
            for tensor, copy in saved:
                tensor.copy_(copy)
