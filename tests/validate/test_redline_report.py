"""The verdict of a redline report: a pass needs every piece of evidence, and none may speak against it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from hipfire.validate.redline_report import ARMS, SCHEMA, SURFACES, VERSION, judge, row, summary

HASH = "ab" * 32


def capture(**change: Any) -> dict[str, Any]:
    contracts = {"kernels": 3, "faults": [], "undeclared": [], "libraries": []}
    key = {"launches": 12, "kernels": 3, "sequence_hash": "0123456789abcdef"}
    return {**key, "process": 0, "context": 16, "contracts": contracts, **change}


def shadow() -> dict[str, Any]:
    return {
        "plan": {"context": 16, "positions": 15, "batch": 1},
        "arms": {arm: {name: {"bytes": 64, "hash": HASH} for name in SURFACES} for arm in ARMS},
        "equal": dict.fromkeys(SURFACES, True),
        "first_divergence": None,
        "guard": {arm: {"bytes": 32, "before": HASH, "after": HASH, "equal": True} for arm in ARMS},
        "route": {
            arm: {
                "replays": 15 * (arm == "prepared"),
                "relaunches": 15 * (arm == "relaunched"),
                "fallback_reason": None,
            }
            for arm in ARMS
        },
        "route_proven": True,
        "exact": True,
    }


def report(**rows: Any) -> dict[str, Any]:
    captures = rows.get("captures", [capture(), capture(process=1, context=17)])
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "source": {"tree_sha256": HASH},
        "runtime": {"hipfire": "1", "python": "3", "torch": "2"},
        "artifacts": [{"role": "model", "path": "m", "bytes": 1, "sha256": HASH}],
        "config": {"batch": [1]},
        "loaded": {"model": "m"},
        "rows": [row(1, captures, rows.get("shadow", shadow()))],
        "nonclaims": [],
    }


def at(document: dict[str, Any], *path: Any) -> Any:
    for name in path:
        document = document[name]
    return document


def test_complete_evidence_passes_and_is_told() -> None:
    good = report()
    assert judge(good) == ("pass", [])
    assert good["rows"][0]["pass"]
    assert good["rows"][0]["phase"] == {
        "launches": 12, "kernels": 3, "sequence_hash": "0123456789abcdef", "captures": 2, "stable": True,
    }  # fmt: skip
    good["verdict"], good["reasons"] = judge(good)
    text = "\n".join(summary(good))
    assert "12 launches, 3 kernels, 0123456789abcdef, 2 captures, stable True" in text
    assert text.endswith("verdict: pass")


@pytest.mark.parametrize(
    "path",
    [
        ("schema",), ("source",), ("source", "tree_sha256"), ("runtime", "torch"), ("artifacts",),
        ("loaded",), ("rows",), ("artifacts", 0, "sha256"),
        *(("rows", 0, "arms", arm, name) for arm in ARMS for name in SURFACES),
        ("rows", 0, "arms", "eager", "kv", "bytes"), ("rows", 0, "arms", "prepared", "logits", "hash"),
        ("rows", 0, "arms"), ("rows", 0, "guard", "prepared"), ("rows", 0, "guard"),
        ("rows", 0, "route", "relaunched"), ("rows", 0, "route"), ("rows", 0, "captures"),
    ],
    ids=lambda path: ".".join(map(str, path)),
)  # fmt: skip
def test_a_report_that_lacks_something_is_incomplete(path: tuple[Any, ...]) -> None:
    broken = copy.deepcopy(report())
    del at(broken, *path[:-1])[path[-1]]
    verdict, reasons = judge(broken)
    assert (verdict, bool(reasons)) == ("incomplete", True)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("phase", "stable"), False, "captures differ"),
        (("phase",), {}, "captures differ"),
        (("arms", "prepared", "kv", "hash"), "cd" * 32, "kv differ"),
        (("arms", "relaunched", "scratch", "bytes"), 65, "scratch differ"),
        (("equal", "logits"), False, "logits differ"),
        (("equal",), {}, "logits differ"),
        (("guard", "eager", "equal"), False, "eager arm wrote where no step may write"),
        (("guard", "prepared", "after"), "cd" * 32, "prepared arm wrote where no step may write"),
        (("route", "prepared", "replays"), 14, "14 replays and 0 relaunches"),
        (("route", "eager", "replays"), 1, "eager arm did not take its way"),
        (("route", "relaunched", "fallback_reason"), "it spilled", "it spilled"),
        (("captures", 0, "contracts", "faults"), ["k uses local memory"], "k uses local memory"),
        (("captures", 1, "contracts", "undeclared"), ["k: x_ptr"], "undeclared: k: x_ptr"),
        (("captures", 0, "contracts", "kernels"), 0, "no kernel was checked"),
        (("captures", 0, "contracts"), {}, "no kernel was checked"),
        (("exact",), False, "does not call its arms exact"),
        (("exact",), None, "does not call its arms exact"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_whatever_speaks_against_a_row_fails_it(path: tuple[Any, ...], value: Any, reason: str) -> None:
    broken = copy.deepcopy(report())
    at(broken, "rows", 0, *path[:-1])[path[-1]] = value
    verdict, reasons = judge(broken)
    assert verdict == "fail"
    assert any(reason in each for each in reasons), reasons


@pytest.mark.parametrize("change", [{"launches": 13}, {"kernels": 4}, {"sequence_hash": "0" * 16}])
def test_captures_of_all_processes_must_agree(change: dict[str, Any]) -> None:
    found = report(captures=[capture(), capture(), capture(process=1, **change)])
    assert not found["rows"][0]["phase"]["stable"]
    assert not found["rows"][0]["pass"]
    assert judge(found)[0] == "fail"


def aborted(found: dict[str, Any]) -> None:
    found["aborted"] = "the engine's process ended"


def other_size(found: dict[str, Any]) -> None:
    found["config"]["batch"] = [1, 2]


def disproved(found: dict[str, Any]) -> None:
    aborted(found)
    found["rows"][0]["exact"] = False


@pytest.mark.parametrize("change", [aborted, other_size, disproved])
def test_a_run_that_did_not_do_all_it_planned_is_incomplete(
    change: Callable[[dict[str, Any]], None],
) -> None:
    found = report()
    change(found)
    assert judge(found)[0] == "incomplete"
