"""`hipfire config`: what it writes, keeps and explains."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hipfire.cli.main import main

ESCAPE = "\x1b"


def test_config_set_get_explain_reset(home: Path, tiny: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "config.toml"
    assert main(["config", "set", "kv_cache", "Q8"]) == 0
    assert main(["config", "set", "generation.temperature", "0.25", "--model", "tiny"]) == 0
    assert tomllib.loads(path.read_text(encoding="utf-8")) == {
        "schema_version": 1,
        "memory": {"kv_cache": "q8"},
    }
    capsys.readouterr()
    assert main(["config", "get", "memory.kv_cache"]) == 0
    assert capsys.readouterr().out == "q8\n"
    assert main(["config", "explain", "temperature", "--model", "tiny", "-j"]) == 0
    found = json.loads(capsys.readouterr().out)["generation.temperature"]
    assert (found["value"], found["origin"]) == (0.25, "model")
    assert [each["origin"] for each in found["shadowed"]] == ["card", "default"]
    assert main(["config", "explain", "kv_cache"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"memory.kv_cache = q8  (global: {path})", "  hides auto  (built-in)",
    ]  # fmt: skip
    assert main(["config", "reset", "--model", "tiny"]) == 0
    assert main(["config", "reset", "kv_cache"]) == 0
    assert tomllib.loads(path.read_text(encoding="utf-8")) == {"schema_version": 1}
    assert tomllib.loads((home / "models.toml").read_text(encoding="utf-8")) == {"schema_version": 1}


def test_config_write_keeps_what_it_does_not_know(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "config.toml").write_text(
        "temperature = 0.1\nfuture = 'yes'\n[serve]\nport = 9\n", encoding="utf-8"
    )
    (home / "models.toml").write_text("[models.mine]\npath = '/x.gguf'\ntop_k = 3\n", encoding="utf-8")
    assert main(["config", "set", "temperature", "0.2"]) == 0
    assert main(["config", "reset", "--model", "mine"]) == 0
    assert tomllib.loads((home / "config.toml").read_text(encoding="utf-8")) == {
        "schema_version": 1, "future": "yes", "serve": {"port": 9}, "generation": {"temperature": 0.2},
    }  # fmt: skip
    models = tomllib.loads((home / "models.toml").read_text(encoding="utf-8"))
    assert models == {"schema_version": 1, "models": {"mine": {"path": "/x.gguf"}}}
    assert main(["config", "reset", "future"]) == 0
    assert "future" not in (home / "config.toml").read_text(encoding="utf-8")


def test_bad_settings_warn_once_and_do_not_stop(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "config.toml").write_text("[generation]\ntop_k = -1\n", encoding="utf-8")
    assert main(["list"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "top_k" in line]
    assert len(lines) == 1
    assert lines[0].startswith("hipfire: warning: ")


def test_concurrent_changes_of_settings_lose_nothing(home: Path) -> None:
    changes = [("top_k", "7"), ("min_p", "0.5"), ("max_tokens", "99"), ("kv_cache", "q8")]
    command = [sys.executable, "-m", "hipfire.cli", "config", "set"]
    running = [subprocess.Popen([*command, *change], stderr=subprocess.DEVNULL) for change in changes]
    assert [process.wait(60) for process in running] == [0] * len(changes)
    stored = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))
    assert stored["generation"] == {"top_k": 7, "min_p": 0.5, "max_tokens": 99}
    assert stored["memory"] == {"kv_cache": "q8"}
