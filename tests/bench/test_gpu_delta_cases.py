"""What benchmarks/kernels.py times of gated DeltaNet layers."""

from __future__ import annotations

import pytest

import gpu_delta_cases
import kernels
from gpu_bench_kit import Report, find_bench
from gpu_kernel_cases import FULL, TINY
from hipfire.kernels.gpu.target import INTERPRETED

BENCH = find_bench("cpu" if INTERPRETED else "gpu", 1)


def test_every_case_runs(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("benchmarks/kernels.py", BENCH)
    kernels.measure(report, TINY, "delta net")
    rows = report.parts["rows"]
    assert [row for row in rows if "error" in row] == []
    assert [row["kernel"] for row in rows] == ["delta net step"] * 2 + ["delta net prompt"]
    assert "delta net step | 2x16 x2" in capsys.readouterr().out


def test_a_step_counts_states_and_rows_once() -> None:
    case = next(gpu_delta_cases.delta_cases(TINY))
    work = case.build(BENCH)
    heads, width = gpu_delta_cases._Heads(1, 2, 16), gpu_delta_cases.WIDTH
    state = 4 * (2 * 16 * 16 + heads.channels * (width - 1))
    assert work.nbytes == 2 * state + 4 * (heads.channels + 2 * heads.inner + 2 * heads.values)


def test_cases_are_of_the_models_that_goals_name() -> None:
    names = [f"{case.kernel} {case.name}" for case in gpu_delta_cases.delta_cases(FULL)]
    assert names[:2] == ["delta net step 48x128 x1", "delta net step 48x128 x32"]
    assert "delta net prompt 32x128 4096 tokens" in names
