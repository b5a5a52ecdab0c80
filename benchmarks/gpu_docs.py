"""Puts the reports of GPU benchmarks into docs/performance.md; it measures nothing and needs no GPU.

usage: gpu_docs.py REPORT.json ... [--page docs/performance.md]

Reports of kernels.py fill the block `gpu_kernels`; those of gpu_decode.py and gpu_load.py together fill
`gpu_models`. Blocks without a report stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hipfire.base.errors import HipfireError, ValidationError
from peers.page import replace_block

KERNELS, MODELS = "gpu_kernels", "gpu_models"
Json = Mapping[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    """Rewrite the blocks that there are reports for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=Path(__file__).parents[1] / "docs" / "performance.md")
    arguments = parser.parse_args(words)
    try:
        for name, block in blocks([_read(path) for path in arguments.reports]).items():
            replace_block(arguments.page, block, name)
    except HipfireError as error:
        print(f"gpu_docs: {error.line()}", file=sys.stderr)
        return 1
    return 0


def _read(path: Path) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(found["program"], str)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValidationError(f"{path.name} is not a report of a GPU benchmark") from error
    return dict(found)


def blocks(reports: Sequence[Json]) -> dict[str, str]:
    """Return the text of each block that there are reports for."""
    by_program: dict[str, list[Json]] = {}
    for report in reports:
        by_program.setdefault(Path(report["program"]).name, []).append(report)
    found = {}
    if "kernels.py" in by_program:
        found[KERNELS] = "\n\n".join(_kernels(report) for report in by_program["kernels.py"])
    models, loads = by_program.get("gpu_decode.py", []), by_program.get("gpu_load.py", [])
    parts = [*([_models(models)] if models else []), *(_load(report) for report in loads)]
    if parts:
        found[MODELS] = "\n\n".join(parts)
    return found


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> str:
    """Return a table whose columns from `numbers_from` on are aligned to the right."""
    rule = ["---" if index < numbers_from else "---:" for index in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def _facts(report: Json) -> str:
    machine, limits = report["machine"], report.get("limits")
    lines = [
        f"- Date: {report['date']}",
        f"- GPU: {machine['device']}, driver {machine['driver']}",
        f"- Software: torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}",
        f"- Command: `python {shlex.join(report['command'])}`",
    ]
    if limits is not None:
        copies = ", ".join(f"{rate:.0f} GB/s of {size}" for size, rate in limits["copy_gb_s"].items())
        lines.append(f"- Limits measured in the same run: copies {copies}; matrix products ")
        lines[-1] += f"{limits['matrix_tflop_s']:.0f} TFLOP/s"
    return "\n".join(lines)


def _kernels(report: Json) -> str:
    columns = ("kernel", "case", "µs", "GB/s", "of a copy", "TFLOP/s", "of matrix products")
    figures = (("us", 1), ("gb_s", 0), ("of_copy", 2), ("tflop_s", 0), ("of_matrix", 2))
    rows = []
    for row in report["rows"]:
        if "error" in row:
            raise ValidationError(f"{row['kernel']} {row['case']} failed: {row['error']}")
        rows.append(
            [row["kernel"], row["case"], *(_number(row.get(name), digits) for name, digits in figures)]
        )
    return f"{_facts(report)}\n\n{markdown(columns, rows, 2)}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _models(reports: Sequence[Json]) -> str:
    columns = ["measure", *(f"{each['model']['shape']} {each['model']['format']}" for each in reports)]
    values = [_figures(report) for report in reports]
    names = list(dict.fromkeys(name for each in values for name in each))
    rows = [[name, *(each.get(name, "") for each in values)] for name in names]
    return "\n\n".join([*(_facts(report) for report in reports), markdown(columns, rows)])


def _figures(report: Json) -> dict[str, str]:
    """Return what a report of gpu_decode.py found, by name."""
    found = {}
    for part in ("decode", "batch", "depth"):
        step = report.get(part)
        if step is None:
            continue
        name = f"decode, batch {step['batch']}, depth {step['depth']}"
        found[f"{name}, tok/s, fed on the device"] = f"{step['fed_tok_s']:.0f}"
        found[f"{name}, tok/s, each token read"] = f"{step['served_tok_s']:.0f}"
        if part == "decode":
            found[f"{name}, share of a copy of the weights"] = f"{step['ratio_fed']:.2f}"
            found["launches and kernels in a step"] = f"{step['launches']}, {step['kernels']}"
        for key, words in (("times_one_fed", "times batch 1"), ("of_short_fed", "share of the short depth")):
            if key in step:
                found[f"{name}, {words}"] = f"{step[key]:.2f}"
    for prompt in report.get("prefill", []):
        found[f"prompt of {prompt['tokens']} tokens, TFLOP/s"] = f"{prompt['tflop_s']:.0f}"
        found[f"prompt of {prompt['tokens']} tokens, tok/s"] = f"{prompt['tok_s']:.0f}"
    if "parity" in report:
        exact = all(each["exact"] for each in report["parity"])
        found["three ways of running a step"] = "equal in every byte" if exact else "different"
    if "hash" in report:
        found["hash of a step in two processes"] = "equal" if report["hash"]["stable"] else "different"
    return found


def _load(report: Json) -> str:
    rows = []
    if "rate" in report:
        rate = report["rate"]
        size = f"{rate['nbytes'] / 1e9:.1f} GB {rate['format']}"
        rows.append([f"load of {size}, share of the speed of a copy", f"{rate['ratio']:.2f}"])
    if "cycles" in report:
        cycles = report["cycles"]
        kept = "unchanged" if cycles["pass"] else "changed"
        rows.append([f"memory counters after {cycles['count']} loads and unloads", kept])
    if "injection" in report:
        faults = report["injection"]["rows"]
        passed = sum(bool(row["pass"]) for row in faults)
        rows.append(["injected faults that left nothing behind", f"{passed} of {len(faults)}"])
    return f"{_facts(report)}\n\n{markdown(('measure', 'result'), rows)}"


if __name__ == "__main__":
    sys.exit(main())
