"""What the tests of the harness share: a model file, a free port, and runs against the scripted server."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from harness_kit import GOOD, SERVER, Harness, Run, Script

from hipfire.validate import identity, serve_harness


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"not read by anyone")
    return path


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that sets what the scripted server does."""
    monkeypatch.setenv("SCRIPT_FILE", str(tmp_path / "script.json"))
    # the outer home must not matter
    monkeypatch.setenv("HIPFIRE_HOME", str(tmp_path / "outer"))

    def write(*replies: dict[str, Any], **fields: Any) -> None:
        document = {"replies": replies or [{"content": GOOD}], **fields}
        (tmp_path / "script.json").write_text(json.dumps(document))

    write()
    return write


@pytest.fixture
def harness(
    tmp_path: Path,
    model: Path,
    port: int,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Harness:
    """Return a function that runs the harness with the scripted server and these flags."""
    del script
    monkeypatch.setattr(serve_harness, "PAUSE_S", 0.05)
    monkeypatch.setattr(serve_harness, "POLL_S", 0.05)
    # a small tree, which nobody edits while the tests run
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("pass\n")
    monkeypatch.setattr(identity, "PACKAGE", tree)
    command = f"{sys.executable} {SERVER}"

    def run(*words: str, out: str = "report.json") -> Run:
        path = tmp_path / out
        path.unlink(missing_ok=True)
        flags = ["--model", str(model), "--port", str(port), "--server-command", command]
        code = serve_harness.main([*flags, "--sampling", "greedy", "--out", str(path), *words])
        printed = capsys.readouterr()
        report = json.loads(path.read_text()) if path.exists() else {}
        return Run(code, report, printed.out, printed.err)

    return run
