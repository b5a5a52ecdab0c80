"""The redline harness over a small model: in this process, through the daemon, and over planted faults."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hipfire.runtime.replay import DecodeReplay, _Recorded
from hipfire.validate import identity, redline_harness
from hipfire.validate.redline_options import parse
from tiny_models import tiny_model, write_folder

SURFACES = {"logits", "kv", "scratch"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", intermediate_size=512, num_hidden_layers=1)
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", model)


@pytest.fixture(autouse=True)
def small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # a source tree that nobody edits while the tests run
    tree = tmp_path / "package"
    tree.mkdir()
    (tree / "source.py").write_text("x = 1\n")
    monkeypatch.setattr(
        identity, "source_identity", lambda package: {"tree_sha256": identity.tree_sha256(tree)}
    )
    monkeypatch.setenv("HIPFIRE_HOME", str(tmp_path / "home"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(
    folder: Path, tmp_path: Path, *words: str, through_daemon: bool = False
) -> tuple[int, dict[str, Any]]:
    place = tmp_path / "report.json"
    given = ["--model", str(folder), "--json", str(place), "--threads", "2", "--context", "20"]
    given += ["--iterations", "2", "--measures", "1", "--weights", "panels", "--processes", "1", *words]
    code = redline_harness.main(given, through_daemon=through_daemon)
    return code, json.loads(place.read_text()) if place.exists() else {}


def test_a_model_in_this_process_passes(folder: Path, tmp_path: Path) -> None:
    code, report = run(folder, tmp_path, "--batch", "1", "2")
    assert (code, report["verdict"], report["pass"], report["reasons"]) == (0, "pass", True, [])
    assert [row["batch"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        assert row["phase"]["stable"]
        assert [each["context"] for each in row["captures"]] == [20, 21]
        assert row["plan"]["positions"] == row["route"]["prepared"]["replays"] == 15
        assert set(row["arms"]["eager"]) == SURFACES
    first, second = report["rows"]
    assert first["phase"]["sequence_hash"] != second["phase"]["sequence_hash"]
    assert second["arms"]["eager"]["logits"]["bytes"] == 2 * first["arms"]["eager"]["logits"]["bytes"]
    assert report["loaded"]["slots"] == 3
    assert report["artifacts"][0]["sha256"]


def test_a_model_in_the_daemon_passes_with_the_key_of_this_process(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("redline_daemon_harness")
    assert script.main is redline_harness.main
    code, through = run(folder, tmp_path, "--positions", "3", through_daemon=True)
    assert (code, through["verdict"], through["reasons"]) == (0, "pass", [])
    assert through["config"]["through_daemon"]
    assert "verdict: pass" in capsys.readouterr().out
    # the daemon captures first, then this process: one key
    code, both = run(folder, tmp_path, "--positions", "3", "--processes", "2")
    assert code == 0
    assert [each["process"] for each in both["rows"][0]["captures"]] == [0, 0, 1, 1]
    assert both["rows"][0]["phase"] == {**through["rows"][0]["phase"], "captures": 4}
    assert both["rows"][0]["arms"] == through["rows"][0]["arms"]


def test_a_replay_that_changes_one_logit_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = _Recorded.run

    def wrong(self: _Recorded, batch: Any) -> torch.Tensor:
        logits = normal(self, batch)
        logits[0, 3] += 1e-3
        return logits

    monkeypatch.setattr(_Recorded, "run", wrong)
    code, report = run(folder, tmp_path, "--positions", "2")
    assert (code, report["verdict"]) == (1, "fail")
    assert report["rows"][0]["equal"] == {"logits": False, "kv": True, "scratch": True}
    assert any("'arm': 'prepared', 'position': 0, 'surface': 'logits'" in each for each in report["reasons"])


def test_a_replay_that_quietly_runs_eagerly_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = DecodeReplay.again
    monkeypatch.setattr(
        DecodeReplay,
        "again",
        lambda self, batch: normal(self, batch) if self.request == "relaunched" else None,
    )
    code, report = run(folder, tmp_path, "--positions", "2")
    assert code == 1
    # what is recorded anew at each step leaves the same results, in new memory with anything around them
    assert report["rows"][0]["equal"]["logits"]
    assert report["rows"][0]["equal"]["kv"]
    way = "batch 1: the prepared arm did not take its way at 2 positions"
    assert any(reason.startswith(way) for reason in report["reasons"])


def test_a_model_that_is_not_replayed_gives_no_verdict(folder: Path, tmp_path: Path) -> None:
    code, report = run(folder, tmp_path, "--weights", "decoded")
    assert (code, report["verdict"], report["pass"]) == (3, "incomplete", False)
    assert "nothing to compare" in report["aborted"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--positions", "0"], "--positions is 0 but must be from 1"),
        (["--captures", "1"], "--captures is 1 but must be from 2"),
        (["--batch", "2", "2"], "--batch names no size, or one twice"),
        (["--batch", "64"], "--batch is 64"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--json", "/proc/no/report.json"], "cannot be written"),
    ],
)
def test_what_proves_nothing_is_refused_before_anything_is_loaded(
    folder: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(folder, tmp_path, *words)
    assert (code, report) == (2, {})
    error = capsys.readouterr().err
    assert error.startswith("redline_harness: ")
    assert message in error


def test_a_load_has_room_for_what_is_fed_and_for_guards() -> None:
    options = parse(["--model", "m", "--batch", "1", "4", "--context", "100", "--iterations", "30"], "x")
    assert (options.slots, options.room) == (5, 100 + 30 + 256)
    assert options.load_fields()["max_seq"] == options.room
    assert parse(["--model", "m", "--max-seq", "77"], "x").room == 77
