"""The report of the redline harness: captures, three arms, and the verdict that follows from them.

The verdict is a pure function of the report: incomplete where evidence is missing, else fail, else pass. This
file runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hipfire.validate.harness_report import Report, Word

SCHEMA: Final = "hipfire-redline"
VERSION: Final = 1
ARMS: Final = ("eager", "prepared", "relaunched")
SURFACES: Final = ("logits", "kv", "scratch")
NONCLAIMS: Final = (
    "all arms run the same kernels: equal arms do not show that a kernel is right",
    "times are diagnostic and no measurement of speed",
    "models without recurrent layers have no recurrent state to compare",
    "only decode steps of one token for each sequence are replayed; reading a prompt is not",
)
_KEY: Final = ("launches", "kernels", "sequence_hash")


def phase(captures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the key of a step, and whether all captures of all processes agree on it."""
    keys = {tuple(each.get(name) for name in _KEY) for each in captures}
    first = captures[0] if captures else {}
    return {**{name: first.get(name) for name in _KEY}, "captures": len(captures), "stable": len(keys) == 1}


def row(batch: int, captures: Sequence[Mapping[str, Any]], shadow: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of the report: a batch size with its captures from all processes and its three arms."""
    found = {"batch": batch, "phase": phase(captures), "captures": list(captures), **shadow}
    found["pass"] = not [*row_gaps(found), *row_breaks(found)]
    return found


def judge(report: Report) -> tuple[Word, list[str]]:
    """Return the verdict and every reason for it that is no pass."""
    rows = report.get("rows") or ()
    missing = [*_identity_gaps(report), *(gap for each in rows for gap in row_gaps(each))]
    planned = (report.get("config") or {}).get("batch")
    if not rows or [each["batch"] for each in rows] != list(planned or ()):
        missing.append(f"{len(rows)} of {len(planned or ())} batch sizes were compared")
    if report.get("aborted"):
        missing.append(f"the run ended early: {report['aborted']}")
    broken = [fault for each in rows for fault in row_breaks(each)]
    return ("incomplete" if missing else "fail" if broken else "pass"), missing + broken


def row_gaps(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a row lacks for a verdict."""
    place = f"batch {row.get('batch')}"
    if not row.get("captures"):
        yield f"{place}: nothing was captured"
    for arm in ARMS:
        for surface in _surfaces(row):
            seen = (row.get("arms") or {}).get(arm, {}).get(surface) or {}
            if not seen.get("bytes") or not seen.get("hash"):
                yield f"{place}: {surface} of the {arm} arm was not seen"
        if not (row.get("guard") or {}).get(arm, {}).get("bytes"):
            yield f"{place}: the {arm} arm had no guard"
        if arm not in (row.get("route") or {}):
            yield f"{place}: the route of the {arm} arm is not known"


def _surfaces(row: Mapping[str, Any]) -> list[str]:
    """Return what was to be compared: recurrent layers have a surface of their own where a model has them."""
    return [*SURFACES, *(name for name in row.get("equal") or {} if name not in SURFACES)]


def row_breaks(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a row disproves."""
    place = f"batch {row.get('batch')}"
    if not (row.get("phase") or {}).get("stable"):
        yield f"{place}: captures differ in launches, kernels or sequence hash"
    for capture in row.get("captures") or ():
        contracts = capture.get("contracts") or {}
        if not contracts.get("kernels"):
            yield f"{place}: no kernel was checked"
        for kind in ("faults", "undeclared"):
            for fault in contracts.get(kind) or ():
                yield f"{place}: {kind}: {fault}"
    for surface in _surfaces(row):
        arms = [(row.get("arms") or {}).get(arm, {}).get(surface) for arm in ARMS]
        if (row.get("equal") or {}).get(surface) is not True or any(arm != arms[0] for arm in arms):
            where = row.get("first_divergence")
            yield f"{place}: {surface} differ" + (f", first at {where}" if where else "")
    for arm, guard in (row.get("guard") or {}).items():
        if guard.get("equal") is not True or guard.get("before") != guard.get("after"):
            yield f"{place}: the {arm} arm wrote where no step may write"
    yield from _route_breaks(place, row)
    if row.get("exact") is not True:
        yield f"{place}: the engine does not call its arms exact"


def _route_breaks(place: str, row: Mapping[str, Any]) -> Iterator[str]:
    """Yield arms that did not take their own way at every position."""
    positions = (row.get("plan") or {}).get("positions")
    for arm, route in (row.get("route") or {}).items():
        wanted = (positions if arm == "prepared" else 0, positions if arm == "relaunched" else 0)
        seen = (route.get("replays"), route.get("relaunches"))
        if route.get("fallback_reason") is not None or seen != wanted:
            reason = route.get("fallback_reason") or f"{seen[0]} replays and {seen[1]} relaunches"
            yield f"{place}: the {arm} arm did not take its way at {positions} positions: {reason}"


def summary(report: Report) -> Iterator[str]:
    """Yield a report in words."""
    for each in report.get("rows") or ():
        seen = each["phase"]
        key = f"{seen['launches']} launches, {seen['kernels']} kernels, {seen['sequence_hash']}"
        yield f"batch {each['batch']}: {key}, {seen['captures']} captures, stable {seen['stable']}"
        for arm in ARMS:
            for surface, found in ((each.get("arms") or {}).get(arm) or {}).items():
                yield f"  {arm:<10} {surface:<8} {found['bytes']:>12} bytes  {found['hash']}"
        yield f"  equal: {each.get('equal')}"
        yield f"  routes proven: {each.get('route_proven')}; pass: {each['pass']}"
    yield from report["reasons"]
    for note in report["nonclaims"]:
        yield f"not claimed: {note}"
    yield f"verdict: {report['verdict']}"


def _identity_gaps(report: Report) -> Iterator[str]:
    if report.get("schema") != SCHEMA or report.get("version") != VERSION:
        yield f"identity: this is no {SCHEMA} report of version {VERSION}"
    if not (report.get("source") or {}).get("tree_sha256"):
        yield "identity: the hash of the source tree is missing"
    for name in ("hipfire", "python", "torch"):
        if not (report.get("runtime") or {}).get(name):
            yield f"identity: the version of {name} is missing"
    models = [each for each in report.get("artifacts") or () if each.get("role") == "model"]
    if not models or not all(each.get("sha256") for each in models):
        yield "identity: the hash of the model is missing"
    if not report.get("loaded"):
        yield "identity: what was loaded is not known"
