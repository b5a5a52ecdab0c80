"""What tests of the compile gate share: a run of the gate over planted kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hipfire.validate.compile_gate import GateOptions, GateReport, run


def planted(package: str, snapshot: Path, **flags: Any) -> GateReport:
    """Run the gate over one module of planted kernels."""
    return run(GateOptions(snapshot=snapshot, package=package, **flags))


def faults_of(report: GateReport, key: str, target: str) -> list[str]:
    """Return the faults in the row of one entry and machine."""
    (row,) = (row for row in report.rows if row["key"] == key and row["target"] == target)
    faults: list[str] = row["faults"]
    return faults


def row_of(rows: Iterable[dict[str, Any]], key: str, target: str) -> dict[str, Any]:
    """Return the row of one entry and machine."""
    (row,) = (row for row in rows if row["key"] == key and row["target"] == target)
    return row
