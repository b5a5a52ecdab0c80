"""Each GPU kernel as a share of what the device does at best: of a copy's bandwidth, or of matrix products.

usage: kernels.py [--only REGEX] [--json FILE] [--device cpu --tiny]

Products are timed as a model runs them: over many different matrices, one after the other in one graph, so
that none waits in a cache. Bytes are those that a kernel must read and write, counted as a copy's are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_bench_kit import (
    Bench,
    Limits,
    Report,
    find_bench,
    measure_limits,
    number,
    replayed,
    table,
    timed,
)
from gpu_delta_cases import delta_cases
from gpu_expert_cases import expert_cases
from gpu_kernel_cases import FULL, TINY, Case, Sizes, kernel_cases
from hipfire.base.errors import HipfireError, InternalError

COLUMNS = ("kernel", "case", "us", "GB/s", "of copy", "TFLOP/s", "of matrix")


def main(words: Sequence[str] | None = None) -> int:
    """Time the cases that were asked for and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression on kernel and case")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for interpreted kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    try:
        bench = find_bench(arguments.device, arguments.rounds)
    except HipfireError as error:
        print(f"kernels: {error.line()}", file=sys.stderr)
        return 1
    report = Report("benchmarks/kernels.py", bench)
    try:
        measure(report, TINY if arguments.tiny else FULL, arguments.only)
    finally:
        # what was measured until then is kept
        report.write(arguments.json)
    return 1 if any("error" in row for row in report.parts["rows"]) else 0


def cases(sizes: Sizes) -> Iterator[Case]:
    """Return all cases, in the order of the table."""
    yield from kernel_cases(sizes)
    yield from delta_cases(sizes)
    yield from expert_cases(sizes)


@torch.inference_mode()
def measure(report: Report, sizes: Sizes, only: str = "") -> None:
    """Time the cases of these sizes whose names match, and add their rows to the report."""
    bench = report.bench
    limits = measure_limits(bench, *(((1 << 12,), 16) if sizes is TINY else ()))
    report.parts["limits"] = limits.as_json()
    report.parts["rows"] = rows = []
    report.say(f"{bench.name}, driver {bench.driver}, torch {torch.__version__}, {bench.rounds} rounds")
    rates = ", ".join(f"{size >> 20} MiB {rate / 1e9:.0f} GB/s" for size, rate in limits.copies.items())
    report.say(f"copies: {rates}; matrix products {limits.matrix / 1e12:.0f} TFLOP/s")
    for case in cases(sizes):
        if re.search(only, f"{case.kernel} {case.name}") is None:
            continue
        row = timed_case(bench, case, limits)
        rows.append(row)
        report.say(" | ".join(cells(row)))
        if bench.on_gpu:
            torch.cuda.empty_cache()
    report.say("\n" + table(COLUMNS, [cells(row) for row in rows], numbers_from=2))


def timed_case(bench: Bench, case: Case, limits: Limits) -> dict[str, Any]:
    """Return the row of a case; one that fails has its error instead of times."""
    row: dict[str, Any] = {"kernel": case.kernel, "case": case.name}
    try:
        work = case.build(bench)
        try:
            timing = timed(bench, work.run)
        except InternalError:
            # libraries may allocate at every call, which no graph allows
            timing = replayed(bench, work.run)
            row["case"] += " (no graph)"
    except Exception as error:
        # a kernel that does not run must not hide what the others do
        return {**row, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    each = timing.median / work.count
    rate, speed = work.nbytes / each, work.operations / each
    row |= {"us": each * 1e6, "best_us": timing.best / work.count * 1e6, "gb_s": rate / 1e9}
    row |= {"of_copy": rate / limits.copy, "count": work.count, "nbytes": work.nbytes}
    if work.operations:
        row |= {"tflop_s": speed / 1e12, "of_matrix": speed / limits.matrix}
    return row


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row as text."""
    if "error" in row:
        return [row["kernel"], row["case"], row["error"], "-", "-", "-", "-"]
    figures = [("us", 2), ("gb_s", 0), ("of_copy", 3), ("tflop_s", 1), ("of_matrix", 3)]
    return [row["kernel"], row["case"], *(number(row.get(name), digits) for name, digits in figures)]


if __name__ == "__main__":
    sys.exit(main())
