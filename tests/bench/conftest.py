"""A root folder of its own for each test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a root folder of its own and a clean environment."""
    for name in [name for name in os.environ if name.startswith(("HIPFIRE_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HIPFIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
