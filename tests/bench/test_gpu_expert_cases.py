"""What benchmarks/kernels.py times of a mixture of experts."""

from __future__ import annotations

import pytest

import gpu_expert_cases
import kernels
from gpu_bench_kit import Report, find_bench
from gpu_kernel_cases import FULL, TINY
from hipfire.kernels.gpu.target import INTERPRETED

BENCH = find_bench("cpu" if INTERPRETED else "gpu", 1)


@pytest.mark.parametrize("kernel", ["route", "order of pairs", "experts gated", "experts down"])
def test_every_case_runs(
    kernel: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_expert_cases, "CHOICES", 2)
    report = Report("benchmarks/kernels.py", BENCH)
    kernels.measure(report, TINY, kernel)
    rows = report.parts["rows"]
    assert rows
    assert [row for row in rows if "error" in row] == []
    assert kernel in capsys.readouterr().out


def test_only_chosen_experts_count_as_read() -> None:
    case = next(case for case in gpu_expert_cases.expert_cases(TINY) if case.kernel == "experts gated")
    work = case.build(BENCH)
    # three of five experts of 32 rows, each of 32 codes and a half, and one row of activations
    assert work.nbytes == 3 * 32 * (32 + 2) + 32 * 4
    assert work.operations == 2 * 3 * 32 * 32


def test_cases_are_of_the_model_that_goals_name() -> None:
    names = [f"{case.kernel} {case.name}" for case in gpu_expert_cases.expert_cases(FULL)]
    assert names[:2] == ["route 8 of 256 x1", "route 8 of 256 x4096"]
    assert {"experts gated u4g256 1 tokens", "experts down u4g128h 4096 tokens"} <= set(names)
