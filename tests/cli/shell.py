"""Running the command line in a process of its own, with a registry of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from samples import registry_text


def use_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Any]) -> None:
    path = tmp_path / "registry.json"
    path.write_text(
        registry_text(models, {"tiny": "tiny:1m"} if "tiny:1m" in models else {}), encoding="utf-8"
    )
    monkeypatch.setenv("HIPFIRE_REGISTRY_FILE", str(path))


def spawn(
    *words: str, env: dict[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from hipfire.cli.main import main; sys.exit(main())", *words],
        capture_output=True, text=True, encoding="utf-8", env={**os.environ, **(env or {})}, input=stdin,
        timeout=120, check=False,
    )  # fmt: skip
