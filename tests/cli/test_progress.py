"""What progress looks like: alive on a terminal, plain and short everywhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from fault_server import Behaviour, serving
from samples import card, registry_text

from hipfire.base import log
from hipfire.cli.progress import PLAIN_SECONDS, PlainProgress, TensorProgress

BODY = bytes(range(256)) * 4096


def pull_on_a_terminal(tmp_path: Path, **variables: str) -> str:
    """Run a pull whose stderr is a pseudo-terminal; return everything that was drawn there."""
    source = [{"kind": "hf", "repo": "me/tiny", "file": "tiny.mq4"}]
    registry = tmp_path / "registry.json"
    registry.write_text(registry_text({"tiny:1m": card("tiny.mq4", BODY, source)}), encoding="utf-8")
    master, slave = pty.openpty()
    with serving(Behaviour(BODY)) as base:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CLICOLOR")}
        env |= {
            "HIPFIRE_HOME": str(tmp_path / "home"),
            "HIPFIRE_REGISTRY_FILE": str(registry),
            "HIPFIRE_HF_BASE": base,
            "HF_HOME": str(tmp_path / "hub"),
            "TERM": "xterm",
            **variables,
        }
        command = [sys.executable, "-m", "hipfire.cli", "pull", "tiny:1m"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=env) as process:
            os.close(slave)
            shown = b""
            while chunk := _read(master):
                shown += chunk
            assert process.stdout is not None
            out = process.stdout.read().decode()
    os.close(master)
    assert process.returncode == 0, shown
    assert out == f"{tmp_path / 'home' / 'models' / 'tiny.mq4'}\n"
    return shown.decode()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the other side of the terminal is closed
        return b""


def test_terminal_gets_a_live_bar(tmp_path: Path) -> None:
    assert "\x1b[" in pull_on_a_terminal(tmp_path)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CLICOLOR": "0"}])
def test_plain_terminals_get_few_plain_lines(tmp_path: Path, variables: dict[str, str]) -> None:
    shown = pull_on_a_terminal(tmp_path, **variables)
    assert "\x1b" not in shown
    assert "\r" not in shown.replace("\r\n", "\n")
    assert 2 <= len(shown.splitlines()) <= 6


def test_plain_progress_speaks_every_few_seconds_only(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    now = [0.0]
    progress = PlainProgress(clock=lambda: now[0])
    progress.start("tiny", 1000)
    for position in range(0, 1001, 10):
        now[0] += PLAIN_SECONDS / 20
        progress.update(position, 1000)
    progress.finish()
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert lines[0] == "hipfire: tiny: starting (1000 B)"
    assert lines[-1] == "hipfire: tiny: 100% of 1000 B"


def test_tensor_progress_adds_up_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    progress = TensorProgress(PlainProgress(clock=lambda: 0.0), "tiny-hf4")
    progress.start(2048, 2)
    progress.tensor("a", 1024)
    progress.tensor("b", 1024)
    progress.done()
    assert capsys.readouterr().err.splitlines() == [
        "hipfire: tiny-hf4 (2 tensors): starting (2.0 KiB)",
        "hipfire: tiny-hf4 (2 tensors): 100% of 2.0 KiB",
    ]
