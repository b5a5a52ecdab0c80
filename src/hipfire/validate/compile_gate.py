"""The compile gate: compiles all kernels for GPUs that are not there, and refuses the slow and the wrong.

usage: compile_kernels.py [--target NAME]... [--kernel PART]... [--update] [--json FILE] ...

For each entry of the kernels' `OFFLINE` tuples and each machine: nothing is spilled, no private memory is
used, shared memory fits, promised instructions are there, offsets are computed wide enough, and registers
have not drifted from the committed snapshot. Exit code 0 if all is well, 1 if anything is not, 2 for a wrong
command line. This file knows no kernel and never imports Triton.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from hipfire.base.errors import HipfireError, ValidationError
from hipfire.base.printable import one_line
from hipfire.validate.compile_gate_pool import Compilers
from hipfire.validate.compile_gate_snapshot import Registers, Snapshot
from hipfire.validate.harness_report import write_report

SCHEMA: Final = "hipfire-compile-gate"
VERSION: Final = 1
PACKAGE: Final = "hipfire.kernels.gpu"
Row = dict[str, Any]


@dataclass
class GateReport:
    """What came of a run: one row for each entry and machine, `faults` of all, and `notes` that are none."""

    triton: str
    rows: list[Row]
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def registers(self) -> Registers:
        """Return the registers of each entry that compiled, by key and machine."""
        return {(row["key"], row["target"]): row["registers"] for row in self.rows if "registers" in row}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "triton": self.triton,
            "verdict": "fail" if self.faults else "pass",
            "rows": self.rows,
            "faults": self.faults,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The flags of the gate; `targets` and `kernels` are empty for all of them."""

    snapshot: Path
    package: str = PACKAGE
    targets: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    update: bool = False
    json: Path | None = None
    cache: Path | None = None
    jobs: int = 1
    limit_s: float = 120.0

    @property
    def complete(self) -> bool:
        """Tell whether every entry is compiled for every machine."""
        return not self.targets and not self.kernels


def main(words: Sequence[str] | None = None, *, snapshot: Path) -> int:
    """Run the gate as a command, with `snapshot` as the file of registers unless a flag names another."""
    try:
        options = parse(sys.argv[1:] if words is None else words, snapshot)
        report = run(options, sys.stderr)
        sys.stdout.write("".join(f"{line}\n" for line in table(report)))
        if options.json is not None:
            write_report(report.to_json(), options.json)
    except HipfireError as error:
        sys.stderr.write(f"compile_kernels: {error.line()}\n")
        return 1
    return 1 if report.faults else 0


def parse(words: Sequence[str], snapshot: Path) -> GateOptions:
    """Return the flags; a wrong command line ends the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="compile_kernels.py",
        description="Compile every GPU kernel where no GPU is, and check the result.",
    )
    parser.add_argument(
        "--target", action="append", default=[], metavar="NAME", help="only this machine; may be repeated"
    )
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="PART", help="only entries with this in their name"
    )
    parser.add_argument("--update", action="store_true", help="write the registers found into the snapshot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="keep what was compiled; default: do not"
    )
    parser.add_argument(
        "--snapshot", type=Path, default=snapshot, metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--package", default=PACKAGE, help="where kernels are; default: %(default)s")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; default: cores"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds for one entry on one machine"
    )
    found = parser.parse_args(words)
    if found.jobs < 1 or found.limit <= 0:
        parser.error("--jobs and --limit must be positive")
    return GateOptions(
        snapshot=found.snapshot,
        package=found.package,
        targets=tuple(found.target),
        kernels=tuple(found.kernel),
        update=found.update,
        json=found.json,
        cache=found.cache,
        jobs=found.jobs,
        limit_s=found.limit,
    )


def run(options: GateOptions, progress: TextIO | None = None) -> GateReport:
    """Compile what the options choose and return what came of it; the snapshot is written if they say so.

    Raises ValidationError if they choose nothing, InternalError if no process can compile.
    """
    snapshot = Snapshot(options.snapshot)
    with tempfile.TemporaryDirectory(prefix="hipfire-compile-") as private:
        cache = options.cache or Path(private)
        compilers = Compilers(options.package, cache, options.limit_s)
        listing = compilers.listing()
        jobs = _chosen(listing["entries"], options)
        told = _Progress(progress, len(jobs))
        answers = compilers.run(jobs, options.jobs, told)
    rows = [{"key": key, "target": target, **answers[key, target]} for key, target in jobs]
    report = GateReport(listing["triton"], rows)
    report.faults += [f"{name}: {fault}" for name, fault in listing["broken"].items()]
    report.faults += _joined(rows, lambda row: row["faults"])
    report.notes += _joined(rows, _remarks)
    if options.update:
        complete = options.complete and not report.faults
        snapshot.update(report.triton, report.registers, complete=complete)
    _compare(report, snapshot, complete=options.complete)
    return report


def table(report: GateReport) -> Iterator[str]:
    """Yield the lines of a table of all rows, then all notes and faults, then the verdict."""
    width = max((len(row["key"]) for row in report.rows), default=0)
    yield f"{'kernel':{width}}  target   registers  spills  scratch  shared  dot4  matrix      s"
    for row in report.rows:
        known: Mapping[str, int] = row.get("instructions", {})
        cells = [row.get(name, "-") for name in ("registers", "spills", "scratch", "shared")]
        cells += [known.get(name, "-") for name in ("dot4", "matrix")]
        figures = "{:>9}  {:>6}  {:>7}  {:>6}  {:>4}  {:>6}".format(*cells)
        verdict = "  FAULT" if row["faults"] else ""
        yield f"{row['key']:{width}}  {row['target']:7}  {figures}  {row['seconds']:5.1f}{verdict}"
    for note in report.notes:
        yield f"note: {one_line(note)}"
    for fault in report.faults:
        yield f"fault: {one_line(fault)}"
    entries = len({row["key"] for row in report.rows})
    yield (
        f"{entries} entries, {len(report.rows)} compiled with Triton {report.triton}: "
        f"{f'{len(report.faults)} faults' if report.faults else 'all is well'}"
    )


class _Progress:
    """Says on a terminal how far the work is."""

    def __init__(self, stream: TextIO | None, total: int) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._total = total
        self._said = -1

    def __call__(self, done: int) -> None:
        if self._stream is None or done == self._said:
            return
        self._said = done
        end = "\n" if done == self._total else ""
        self._stream.write(f"\rcompiled {done} of {self._total}{end}")
        self._stream.flush()


def _chosen(entries: Mapping[str, Sequence[str]], options: GateOptions) -> list[tuple[str, str]]:
    known = {target for targets in entries.values() for target in targets}
    for target in options.targets:
        if target not in known:
            hint = f"known are {', '.join(sorted(known)) or 'none'}"
            raise ValidationError(f"--target: no kernel is compiled for {target}", hint=hint)
    jobs = [
        (key, target)
        for key, targets in sorted(entries.items())
        for target in targets
        if target in (options.targets or (target,))
        and (not options.kernels or any(part in key for part in options.kernels))
    ]
    if not jobs:
        raise ValidationError("no entry of any OFFLINE tuple has such a name", hint="leave out --kernel")
    return jobs


def _joined(rows: Sequence[Row], told: Callable[[Row], Sequence[str]]) -> list[str]:
    """Return a line for everything that is told of an entry, with the machines that it is told of."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for text in told(row):
            found.setdefault((row["key"], text), []).append(row["target"])
    return [f"{key} on {', '.join(targets)}: {text}" for (key, text), targets in found.items()]


def _remarks(row: Row) -> list[str]:
    spills = row.get("scalar_spills", 0)
    return [f"keeps {spills} scalar registers in lanes of vector registers, not in memory"] if spills else []


def _compare(report: GateReport, snapshot: Snapshot, *, complete: bool) -> None:
    hint = "run this with --update if that is meant"
    if not snapshot.knows(report.triton):
        report.notes.append(
            f"the snapshot has no registers for Triton {report.triton}: nothing to compare with"
        )
        return
    for drift in snapshot.drifts(report.triton, report.registers):
        if drift.fault is not None:
            report.faults.append(f"{drift.key} on {drift.target}: {drift.fault}; {hint}")
        else:
            report.notes.append(f"{drift.key} on {drift.target}: {drift.now} registers, was {drift.was}")
    if complete:
        failed = {(row["key"], row["target"]) for row in report.rows}
        for key, target in snapshot.gone(report.triton, report.registers):
            if (key, target) not in failed:
                report.faults.append(f"{key} on {target}: is in the snapshot but nowhere else; {hint}")
