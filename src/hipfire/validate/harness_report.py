"""The report of a run: its identity, rows and proofs in one JSON object, and the verdict that follows.

The verdict is a pure function of the report: incomplete where evidence is missing, else fail, else pass. A
report without identity is incomplete however good its rows are. This file starts nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from hipfire.base.errors import ValidationError

SCHEMA: Final = "hipfire-serve-harness"
VERSION: Final = 1
Word = Literal["pass", "fail", "incomplete"]
EXIT_CODES: Final[Mapping[Word, int]] = {"pass": 0, "fail": 1, "incomplete": 3}
Report = dict[str, Any]
_HEX: Final = frozenset("0123456789abcdef")
NONCLAIMS: Final = (
    "times were taken on a machine that may have had other work; they are no measurement of speed",
    "answers that look right say nothing about the equality of numbers inside the model",
)


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over all rows: `completed` are replies that the model itself ended."""
    return {
        "requests": len(rows),
        "turns": len({row["turn"] for row in rows}),
        "completed": sum(row["finish"] in ("stop", "tool_calls") and not row["fault"] for row in rows),
        "faults": sum(bool(row["fault"]) for row in rows),
        "runaway": sum(row["runaway"] for row in rows),
        "empty": sum(row["empty"] for row in rows),
        "attractor": sum(row["attractor"]["fired"] for row in rows),
        "retrieval_miss": sum(bool(row["retrieval_missing"]) for row in rows),
        "markup_leak": sum(bool(row["markup_leak"]) for row in rows),
        "tool_faults": sum(bool(row["tool_fault"]) for row in rows),
        **{name: sum(row[name] or 0 for row in rows) for name in ("ctx", "cached", "gen")},
        **{f"avg_{name}": _mean(row[name] for row in rows) for name in ("prefill_tok_s", "decode_tok_s")},
    }


def judge(report: Report) -> tuple[Word, list[str]]:
    """Return the verdict and every reason for it that is no pass."""
    missing = [*identity_faults(report), *_gaps(report)]
    broken = list(_breaks(report))
    return ("incomplete" if missing else "fail" if broken else "pass"), missing + broken


def identity_faults(report: Report) -> list[str]:
    """Return what is missing of the fields that say what was run."""
    faults = []
    if report.get("schema") != SCHEMA or report.get("version") != VERSION:
        faults.append(f"identity: this is no {SCHEMA} report of version {VERSION}")
    if not _is_hash(_at(report, "source", "tree_sha256"), 64):
        faults.append("identity: the hash of the source tree is missing")
    for name in ("hipfire", "python", "torch"):
        if not _at(report, "runtime", name):
            faults.append(f"identity: the version of {name} is missing")
    models = [each for each in report.get("artifacts") or () if each.get("role") == "model"]
    if not models or not all(_is_hash(each.get("sha256"), 64) for each in models):
        faults.append("identity: the hash of the model is missing")
    if not report.get("command") or not report.get("server_command"):
        faults.append("identity: the command is missing")
    for row in report.get("rows") or ():
        if not all(_is_hash(row.get(name), 32) for name in ("prompt_md5", "request_md5")):
            faults.append(f"identity: turn {row.get('turn')} has no hash of its prompt or request")
    return faults


def nonclaims(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a run does not show, in words."""
    capped = sum(row["runaway"] for row in rows)
    notes = [f"replies cut at max_tokens, seen but not completed: {capped}"] if capped else []
    skipped = sum(row["attractor"]["min_window_skipped"] and not row["fault"] for row in rows)
    if skipped:
        notes.append(f"replies too short to be judged for loops: {skipped}")
    return [*notes, *NONCLAIMS]


def write_report(report: Report, path: Path) -> None:
    """Write a report beside its place and rename it; ValidationError if it cannot be written."""
    text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            # half of a surrogate pair becomes the escape that it is in JSON
            *("w", -1, "utf-8"),
            errors="backslashreplace",
            dir=path.parent,
            prefix=f".{path.name}.",
            delete=False,
        ) as file:
            try:
                file.write(text)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(file.name).unlink()
                raise
    except OSError as error:
        raise ValidationError(f"--out: {path} cannot be written: {error.strerror}") from error


def check_place(path: Path) -> None:
    """Raise ValidationError if a report could not be written there, before a run is spent on it."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ValidationError(f"--out: {path} cannot be written: {error.strerror}") from error


def read_report(path: Path) -> Report:
    """Return an earlier report; ValidationError for anything else, or for one without rows."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValidationError(f"{path} cannot be read as a report: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or not _are_rows(report.get("rows")):
        raise ValidationError(f"{path} is no report of the serve harness with rows")
    return report


def _are_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _gaps(report: Report) -> Iterator[str]:
    """Yield what a verdict would need but the run did not give."""
    rows = report.get("rows") or ()
    turns = len({row["turn"] for row in rows})
    planned = report.get("planned_turns")
    if not rows or turns != planned:
        yield f"{turns} of {planned} turns were run"
    for row in rows:
        if row["fault"]:
            yield f"{_place(row)}: {row['fault']}"
        elif None in (row["ctx"], row["cached"], row["gen"]):
            yield f"{_place(row)}: the counts of tokens are missing"
    if report.get("aborted"):
        yield f"the run ended early: {report['aborted']}"
    for proof in report.get("proofs") or ():
        if proof["state"] == "unproven":
            yield f"proof {proof['name']}: {proof['evidence']}"


def _breaks(report: Report) -> Iterator[str]:
    """Yield what makes a whole run a failure."""
    for proof in report.get("proofs") or ():
        if proof["state"] == "failed":
            yield f"proof {proof['name']}: {proof['evidence']}"
    fatal = report.get("fail_on") or ()
    for row in report.get("rows") or ():
        if row["fault"]:
            continue
        place = _place(row)
        if row["empty"] and "empty" in fatal:
            yield f"{place}: empty"
        if row["runaway"] and "runaway" in fatal:
            yield f"{place}: runaway"
        loop = row["attractor"]
        if loop["fired"] and "attractor" in fatal:
            yield f"{place}: attractor, {loop['rule']} {loop['value']:.3f} in {loop['window']}"
        if row["retrieval_missing"]:
            yield f"{place}: missing {', '.join(map(repr, row['retrieval_missing']))}"
        if row["markup_leak"]:
            yield f"{place}: shows {' '.join(row['markup_leak'])}"
        if row["tool_fault"]:
            yield f"{place}: {row['tool_fault']}"


def _place(row: Mapping[str, Any]) -> str:
    return f"turn {row['turn']}" + (f" step {row['step']}" if row["step"] > 1 else "")


def _at(report: Mapping[str, Any], *names: str) -> Any:
    value: Any = report
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_hash(value: object, length: int) -> bool:
    return isinstance(value, str) and len(value) == length and set(value) <= _HEX


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value]
    return fmean(known) if known else None
