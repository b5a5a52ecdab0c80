"""The command line as a whole: help, exit codes, one-line errors, odd names, no needless network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import write_gguf
from shell import spawn

from hipfire.cli import host
from hipfire.cli.main import COMMANDS, main

ESCAPE = "\x1b"


def test_help_and_local_commands_import_no_torch(home: Path) -> None:
    script = (
        "import sys; from hipfire.cli.main import main; assert main(['--help']) == 0; assert main([]) == 0;"
        "heavy = {'cyclopts', 'rich', 'torch', 'requests'} & set(sys.modules); assert not heavy, heavy;"
        "assert main(['list']) == 0; assert main(['config', 'explain']) == 0; assert main(['version']) == 0;"
        "assert 'torch' not in sys.modules; assert 'requests' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: hipfire") == 2
    for name, _, text in COMMANDS:
        assert f"  {name} " in done.stdout
        assert text in done.stdout


def test_every_command_of_this_group_has_its_own_help(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["pull"], ["list"], ["rm"], ["verify"], ["inspect"], ["config"], ["diag"], ["version"]):
        assert main([*words, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"Usage: hipfire {words[0]}")
        assert ESCAPE not in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["lst"], "did you mean 'list'"), (["zzz"], "hipfire --help"), (["pull"], "hipfire pull --help"),
        (["pull", "x", "--nope"], "--nope"), (["list", "extra"], "extra"), (["--nope"], "unknown command"),
        (["inspect", "x", "--tensors", "many"], "many"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line_and_exit_2(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("hipfire: ")
    assert part in shown.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pull", "smolm2"], "did you mean smollm2"),
        (["pull", "../x"], "refused"),
        (["rm", "nothing"], "not installed"),
        (["verify", "smollm2"], "hipfire pull smollm2:135m"),
        (["inspect", "./gone.gguf"], "no such file"),
        (["config", "get", "top_p"], "not set"),
        (["config", "get", "magic"], "unknown setting"),
        (["config", "set", "top_k", "0"], "integer in [1, 100000]"),
        (["config", "reset", "magic"], "unknown setting"),
        (["config", "set", "threads", "2", "--model", "smollm2"], "cannot differ per model"),
        (["pull", "smollm2", "--format", "mq99"], "unknown format"),
        (["pull", "qwen3.5:9b"], "--repo OWNER/NAME"),
        (["pull", "qwen3.5:9b", "--repo", "x"], "OWNER/NAME"),
        (["pull", "qwen3.5:9b", "--format", "hf4"], "own format"),
    ],
)
def test_errors_are_one_line_and_exit_1(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert main(words) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert part in shown.err.splitlines()[-1]
    assert not any(home.rglob("*.gguf"))
    assert not (home / "config.toml").exists()


@pytest.mark.parametrize("folder", ["with space", "Модели", "模型", "e\u0301 combining", "🔥", "x" * 220])
def test_odd_folders(home: Path, tmp_path: Path, folder: str) -> None:
    root = tmp_path / folder
    (root / "models").mkdir(parents=True)
    write_gguf(root / "models" / "a b é.gguf")
    for encoding in ("utf-8",) if folder != "Модели" else ("ascii", "cp1252"):
        env = {"HIPFIRE_HOME": str(root), "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "hipfire.cli", "list"],
            capture_output=True,
            env={**os.environ, **env},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "a b é".encode(encoding, errors="backslashreplace") in done.stdout
    assert spawn("inspect", "a b é", env={"HIPFIRE_HOME": str(root)}).returncode == 0


def test_dead_proxy_does_not_touch_local_commands(home: Path, tiny: bytes) -> None:
    dead = "http://127.0.0.1:9"
    env = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), dead)
    assert spawn("pull", "tiny").returncode == 0
    for words in (
        ["list", "-r"],
        ["verify", "tiny"],
        ["inspect", "tiny"],
        ["pull", "tiny"],
        ["config", "explain"],
    ):
        assert spawn(*words, env=env).returncode == 0


def test_broken_pipe_is_quiet(home: Path) -> None:
    command = [sys.executable, "-m", "hipfire.cli", "config", "schema"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


def test_unexpected_failure_is_one_line_with_a_way_to_the_traceback(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr("hipfire.cli.version.library_versions", broken)
    assert main(["version"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "internal error: RuntimeError: out of luck" in shown
    assert "HIPFIRE_DEBUG=1" in shown
    monkeypatch.setenv("HIPFIRE_DEBUG", "1")
    assert main(["version"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_version_and_diag(
    home: Path, tiny: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--version"]) == 0
    short = capsys.readouterr().out.strip()
    assert main(["version", "-j"]) == 0
    assert json.loads(capsys.readouterr().out)["hipfire"] == short
    monkeypatch.setenv("HIPFIRE_TOP_K", "many")
    (home / "models").mkdir(parents=True)
    (home / "models" / "mine.gguf").write_bytes(b"x")
    monkeypatch.setattr("hipfire.cli.host.gpu_facts", lambda: "torch could not be asked: broken driver")
    assert main(["diag", "-j"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["models"][0]["name"] == "mine"
    assert facts["cpu"]["usable_cores"] >= 1
    assert facts["memory"]["total_bytes"] > 0
    assert any("HIPFIRE_TOP_K" in line for line in facts["advice"])
    (home / "config.toml").write_text("not toml", encoding="utf-8")
    assert main(["diag"]) == 0
    assert "config.toml" in capsys.readouterr().out


def test_gpu_probe_of_a_python_without_torch_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('driver is broken')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "driver is broken" in str(host.gpu_facts())
