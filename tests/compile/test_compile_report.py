"""The verdict of the gate over what processes answer: they are scripted here, so nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hipfire.validate import compile_gate
from hipfire.validate.compile_gate import GateOptions, GateReport, run
from hipfire.validate.compile_gate_snapshot import Snapshot

A, B, C = ("a.kernel", "gfx1100"), ("a.kernel", "sm_90"), ("b.kernel", "sm_90")


def answer(registers: int, **changes: Any) -> dict[str, Any]:
    """Return the answer for a kernel without faults."""
    return {"registers": registers, "faults": [], "seconds": 0.1, **changes}


class Scripted:
    """Stands for the processes that compile."""

    answers: Mapping[tuple[str, str], dict[str, Any]] = {}
    broken: Mapping[str, str] = {}

    def __init__(self, package: str, cache: Path, limit_s: float) -> None:
        assert package == compile_gate.PACKAGE

    def listing(self) -> dict[str, Any]:
        entries: dict[str, list[str]] = {}
        for key, target in self.answers:
            entries.setdefault(key, []).append(target)
        return {"triton": "3.7.1", "entries": entries, "broken": self.broken}

    def run(
        self, jobs: Sequence[tuple[str, str]], count: int, done: Callable[[int], None]
    ) -> Mapping[tuple[str, str], dict[str, Any]]:
        done(len(jobs))
        return {job: self.answers[job] for job in jobs}


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GateReport]:
    """Return a function that runs the gate over scripted answers, with one snapshot for all runs."""
    monkeypatch.setattr(compile_gate, "Compilers", Scripted)

    def judge(
        answers: Mapping[tuple[str, str], dict[str, Any]],
        broken: Mapping[str, str] | None = None,
        **flags: Any,
    ) -> GateReport:
        monkeypatch.setattr(Scripted, "answers", answers)
        monkeypatch.setattr(Scripted, "broken", broken or {})
        return run(GateOptions(snapshot=tmp_path / "registers.json", **flags))

    return judge


def test_an_update_makes_the_next_run_pass(gate: Callable[..., GateReport]) -> None:
    answers = {A: answer(10), B: answer(20)}
    assert gate(answers, update=True).faults == []
    report = gate(answers)
    assert report.faults == report.notes == []


def test_drift_is_noted_and_beyond_the_tolerance_a_fault(gate: Callable[..., GateReport]) -> None:
    gate({A: answer(10), B: answer(20)}, update=True)
    report = gate({A: answer(14), B: answer(40)})
    assert report.notes == ["a.kernel on gfx1100: 14 registers, was 10"]
    (fault,) = report.faults
    assert fault.startswith("a.kernel on sm_90: takes 40 registers, and 20 in the snapshot")


def test_what_is_new_and_what_is_gone_are_faults(gate: Callable[..., GateReport]) -> None:
    gate({A: answer(10), B: answer(20)}, update=True)
    report = gate({A: answer(10), C: answer(30)})
    assert [fault.partition(";")[0] for fault in report.faults] == [
        "b.kernel on sm_90: is not in the snapshot of registers",
        "a.kernel on sm_90: is in the snapshot but nowhere else",
    ]


def test_a_choice_does_not_miss_what_it_left_out(gate: Callable[..., GateReport]) -> None:
    gate({A: answer(10), B: answer(20), C: answer(30)}, update=True)
    assert gate({A: answer(10), B: answer(20), C: answer(30)}, targets=("sm_90",)).faults == []
    report = gate({A: answer(10), B: answer(20), C: answer(30)}, kernels=("b.",))
    assert [(row["key"], row["target"]) for row in report.rows] == [C]
    assert report.faults == []


def test_what_does_not_compile_has_one_fault_and_stays_in_the_snapshot(
    gate: Callable[..., GateReport], tmp_path: Path
) -> None:
    gate({A: answer(10), B: answer(20)}, update=True)
    failed = {A: answer(10), B: {"faults": ["does not compile"], "seconds": 1.0}}
    assert gate(failed).faults == ["a.kernel on sm_90: does not compile"]
    gate(failed, update=True)
    assert Snapshot(tmp_path / "registers.json").gone("3.7.1", {A: 10}) == [B]


def test_a_module_that_cannot_be_imported_is_a_fault(gate: Callable[..., GateReport]) -> None:
    report = gate({A: answer(10)}, broken={"hipfire.kernels.gpu.b": "cannot be imported: SyntaxError"})
    assert report.faults == ["hipfire.kernels.gpu.b: cannot be imported: SyntaxError"]


def test_scalar_registers_in_lanes_are_noted(gate: Callable[..., GateReport]) -> None:
    answers = {A: answer(10, scalar_spills=3), B: answer(20)}
    gate(answers, update=True)
    report = gate(answers)
    assert report.faults == []
    assert report.notes == [
        "a.kernel on gfx1100: keeps 3 scalar registers in lanes of vector registers, not in memory"
    ]
