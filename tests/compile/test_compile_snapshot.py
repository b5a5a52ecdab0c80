"""The snapshot of registers: what counts as drift, and what an update keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hipfire.base.errors import ValidationError
from hipfire.validate.compile_gate_snapshot import Drift, Snapshot

A, B = ("a.kernel", "sm_90"), ("b.kernel", "gfx1100")


@pytest.mark.parametrize(
    ("was", "now", "faulty"),
    [
        (40, 48, False),  # 8 more are little for a small kernel
        (40, 49, True),
        (200, 230, False),  # and 15 % for a large one
        (200, 231, True),
        (200, 100, False),  # fewer are never wrong
        (None, 10, True),
    ],
)
def test_drift_beyond_the_tolerance_is_a_fault(was: int | None, now: int, faulty: bool) -> None:
    assert (Drift("a.kernel", "sm_90", was, now).fault is not None) == faulty


def test_figures_come_back_by_version(tmp_path: Path) -> None:
    path = tmp_path / "registers.json"
    Snapshot(path).update("3.7.1", {A: 10, B: 20}, complete=True)
    Snapshot(path).update("3.8.0", {A: 11}, complete=True)
    snapshot = Snapshot(path)
    assert snapshot.knows("3.7.1")
    assert not snapshot.knows("3.9.0")
    assert snapshot.drifts("3.7.1", {A: 10, B: 20}) == []
    assert snapshot.drifts("3.8.0", {A: 10}) == [Drift(*A, 11, 10)]


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "registers.json"
    Snapshot(path).update("3.7.1", {A: 10, B: 20}, complete=True)
    assert Snapshot(path).gone("3.7.1", {A: 10}) == [B]
    assert Snapshot(path).gone("3.7.1", {A: 10, B: 20}) == []


def test_a_part_updates_only_its_own_figures(tmp_path: Path) -> None:
    path = tmp_path / "registers.json"
    Snapshot(path).update("3.7.1", {A: 10, B: 20}, complete=True)
    Snapshot(path).update("3.7.1", {A: 12}, complete=False)
    assert json.loads(path.read_text()) == {"3.7.1": {"gfx1100": {"b.kernel": 20}, "sm_90": {"a.kernel": 12}}}
    Snapshot(path).update("3.7.1", {A: 13}, complete=True)
    assert json.loads(path.read_text()) == {"3.7.1": {"sm_90": {"a.kernel": 13}}}


@pytest.mark.parametrize("text", ["[]", "{", '{"3.7.1": 3}', '{"3.7.1": {"sm_90": {"a": "many"}}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "registers.json"
    path.write_text(text)
    with pytest.raises(ValidationError, match="is no snapshot of registers"):
        Snapshot(path)
