"""Every operation that the CPU engine implements against float64, on ragged shapes in poisoned memory."""

from __future__ import annotations

import pytest
from cpu_kit import digest, kernel_modules, outcome
from op_cases import op_cases

from hipfire.kernels.launch import Op

CASES = op_cases()


def implemented() -> set[str]:
    """Names of the operations of the package that have an implementation for the engine."""
    members = [value for module in kernel_modules() for value in vars(module).values()]
    return {value.name for value in members if isinstance(value, Op) and "numba" in value.kernels}


def test_every_implemented_operation_has_cases() -> None:
    assert implemented() == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_float64_on_any_number_of_threads(name: str) -> None:
    count = 0
    for case in CASES[name]():
        results = outcome(case, 1)
        case.check(results)
        for threads in (2, 3):
            assert digest(outcome(case, threads)) == digest(results), f"{case.label} on {threads} threads"
        count += 1
    assert count > 0
