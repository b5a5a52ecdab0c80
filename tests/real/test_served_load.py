"""A real server under a small load, whose engine is killed once; scripts/serve_load.py does more of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from hipfire.checkpoint.library import open_library
from hipfire.validate import load, load_requests

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
MODEL = "smollm2:135m"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def test_every_request_has_one_end_although_the_engine_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if open_library().find(MODEL) is None:
        pytest.skip(f"not run: {MODEL} is not installed (hipfire pull {MODEL})")
    # less to compare and to warm up, which is most of the time of so small a load
    monkeypatch.setattr(load, "WARM_ROUNDS", 2)
    monkeypatch.setattr(load_requests, "QUESTIONS", load_requests.QUESTIONS[:2])
    out = tmp_path / "load.json"
    words = ["--model", MODEL, "--clients", "8", "--requests", "60", "--kills", "1"]
    load.main([*words, "--port", str(free_port()), "--out", str(out)])
    report = json.loads(out.read_text())
    proofs = {each["name"]: each for each in report["proofs"]}
    # whether somebody edits the source meanwhile says nothing about the server
    del proofs["source"]
    assert [each for each in proofs.values() if each["state"] != "ok"] == []
    assert {"one_end", "no_hang", "kills", "slots", "same_under_load", "same_after_load"} <= set(proofs)
    assert {"server_memory", "engine_memory", "idle", "books", "stopped"} <= set(proofs)
    assert len(report["rows"]) == 60
    assert len(report["kills"]) == 1
