"""The identity of recorded steps: what changes it, what does not, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from retained_kit import DEVICE, Steps, score_kernel

from hipfire.kernels.gpu import tape as gpu_tape
from hipfire.kernels.gpu.engine import GpuLaunch, GpuTape
from hipfire.kernels.gpu.tape import describe
from hipfire.kernels.tape import TapeKey, fnv1a64


def recorded(batch: int = 2) -> GpuTape:
    """The tape of a step of the kit's model."""
    steps = Steps()
    steps.decode([(slot, 0) for slot in range(batch)], list(range(batch)))
    assert steps.replay is not None
    return steps.replay._steps[batch].tape


def key_with(tape: GpuTape, index: int, **fields: Any) -> TapeKey:
    launches = list(tape.launches)
    launches[index] = dataclasses.replace(launches[index], **fields)
    return describe(GpuTape(launches)).key


def test_the_hash_is_fnv1a_of_64_bits() -> None:
    assert fnv1a64(b"") == 0xCBF29CE484222325
    assert fnv1a64(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a64(b"foobar") == 0x85944171F73967E8
    assert fnv1a64(b"bar", fnv1a64(b"foo")) == fnv1a64(b"foobar")


def test_two_recordings_have_one_key_and_other_sizes_another() -> None:
    first, second = describe(recorded()).key, describe(recorded()).key
    assert first == second
    assert (first.launches, first.kernels) == (3, 3)
    assert describe(recorded(3)).key.sequence_hash != first.sequence_hash


def test_a_key_does_not_depend_on_positions_and_slots() -> None:
    keys = set()
    for place in ((0, 0), (0, 17), (3, 5)):
        steps = Steps()
        steps.cache.memory.zero_()
        steps.decode([place], [place[1]])
        assert steps.replay is not None
        facts = steps.replay.facts(1)
        assert facts is not None
        keys.add(facts.key)
    assert len(keys) == 1


def test_every_part_of_a_launch_is_in_the_hash() -> None:
    tape = recorded()
    original = describe(tape).key
    enter = tape.launches[0]
    other = torch.zeros_like(enter.arguments["ids_ptr"])
    shifted = enter.arguments["rows_ptr"].view(-1)[1:]
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"kernel": tape.launches[1].kernel},
        {"grid": (3,)},
        {"constants": {"WIDTH": 8}},
        {"options": {"num_warps": 8, "num_stages": 1}},
        {"arguments": {**enter.arguments, "slot_stride": 1}},
        {"arguments": {**enter.arguments, "ids_ptr": other}},
        {"arguments": {**enter.arguments, "rows_ptr": shifted}},
        {"arguments": {**enter.arguments, "rows_ptr": None}},
        {"reads": enter.reads[:1]},
        {"writes": ()},
        {"compiled": SimpleNamespace(kernel=b"machine code")},
    ]
    hashes = [key_with(tape, 0, **change).sequence_hash for change in changes]
    assert original.sequence_hash not in hashes
    assert len(set(hashes)) == len(hashes)
    swapped = describe(GpuTape([tape.launches[1], tape.launches[0], tape.launches[2]])).key
    assert (swapped.launches, swapped.kernels) == (original.launches, original.kernels)
    assert swapped.sequence_hash != original.sequence_hash


def test_a_kernel_with_other_constants_is_another_kernel() -> None:
    tape = recorded()
    again = dataclasses.replace(tape.launches[0], grid=(5,))
    other = dataclasses.replace(tape.launches[0], constants={"WIDTH": 8})
    assert describe(GpuTape([*tape.launches, again])).key.kernels == 3
    assert describe(GpuTape([*tape.launches, other])).key.kernels == 4


def test_the_key_is_the_same_in_another_process() -> None:
    kit = Path(__file__).with_name("retained_kit.py")
    done = subprocess.run(
        [sys.executable, str(kit)], capture_output=True, text=True, env=dict(os.environ), timeout=120
    )
    assert done.stdout.strip() == str(describe(recorded()).key), done.stderr


def compiled(spills: int = 0, scratch: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        kernel=b"code", n_spills=spills, metadata=SimpleNamespace(global_scratch_size=scratch)
    )


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (compiled(spills=2), "8 bytes of local memory"),
        (compiled(scratch=64), "scratch memory that is allocated"),
        (SimpleNamespace(kernel=b"code"), "machine code of leaky is not known"),
        (None, "machine code of leaky is not known"),
    ],
    ids=["spills", "scratch", "no facts", "nothing"],
)
def test_kernels_with_local_memory_are_refused(
    made: object, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tape, "INTERPRETED", False)
    good = GpuLaunch("good", score_kernel, (1,), {}, {}, {}, (), (), compiled())
    leaky = GpuLaunch("leaky", score_kernel, (1,), {}, {}, {}, (), (), made)
    assert describe(GpuTape([good])).faults == ()
    (found,) = describe(GpuTape([good, leaky, leaky])).faults
    assert fault in found
    assert "leaky" in found


def test_a_step_with_a_leaky_kernel_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tape, "launch_faults", lambda launch: [f"{launch.name} spills"])
    steps = Steps()
    for position in range(3):
        steps.decode([(0, position)], [1])
    assert steps.replay is not None
    assert "enter_kernel spills" in str(steps.replay.route().fallback_reason)
    assert steps.graphs == []


def test_arguments_of_unknown_use_are_told() -> None:
    tape = recorded()
    assert describe(tape).undeclared == ()
    scored = tape.launches[2]
    silent = dataclasses.replace(scored, reads=())
    stray = dataclasses.replace(scored, writes=(torch.zeros(4, device=DEVICE),))
    assert describe(GpuTape([silent])).undeclared == ("score_kernel: x_ptr",)
    assert describe(GpuTape([stray])).undeclared == ("score_kernel: logits_ptr",)


def test_an_empty_tape_proves_nothing() -> None:
    assert describe(GpuTape()).faults == ("nothing was launched",)
