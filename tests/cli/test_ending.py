"""Signals and a standard output that cannot be written: nothing half done stays, one line says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hipfire.cli import main as command
from hipfire.cli.progress import is_live
from hipfire.cli.signals import EndedBySignal, Endings

# no file may grow, so that every write to one fails as on a full disk
NO_BYTES = "ulimit -f 0;"
# a command that writes a container and stops in the middle of it
SCRIPT = """
import sys, time
from pathlib import Path
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.hfq_writer import write_hfq
from hipfire.cli import main

def payload():
    yield b"1234"
    print("ready", flush=True)
    time.sleep(60)
    yield b"5678"

def quantize(words):
    write_hfq(Path(sys.argv[1]), 1, {}, [TensorInfo("w", 2, (2,), 8)], [payload()])

main._dispatch = quantize
sys.exit(main.main([]))
"""


def stopped(folder: Path, number: int, *, ignored: bool = False) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder / "x.hfq")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # the tests themselves may run under nohup
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(list(folder.iterdir())) == 1
    process.send_signal(number)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cleans_up(home: Path, tmp_path: Path, number: int, code: int) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    _, err = (process := stopped(folder, number)).communicate(timeout=60)
    assert process.returncode == code
    assert err == "hipfire: interrupted\n"
    assert list(folder.iterdir()) == []


def test_nohup_is_respected(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    process = stopped(folder, signal.SIGHUP, ignored=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EndedBySignal) as caught, (endings := Endings()):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == endings.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def run(redirection: str, *words: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    line = f'{limit} exec "$0" -m hipfire.cli "$@" {redirection}'
    return subprocess.run(
        ["/bin/sh", "-c", line, sys.executable, *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["config", "schema"], ["version", "-j"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_output(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = run(f">{tmp_path}/out", *words, limit=NO_BYTES)
    assert done.returncode == 1
    assert done.stderr == "hipfire: standard output cannot be written: File too large\n"


def test_a_failure_keeps_its_own_line_on_a_full_output(home: Path, tmp_path: Path) -> None:
    done = run(f">{tmp_path}/out", "inspect", "./gone.gguf", limit=NO_BYTES)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no such file" in done.stderr


def test_closed_output(home: Path) -> None:
    done = run(">&-", "--version")
    assert done.returncode == 1
    assert done.stderr.startswith("hipfire: standard output is closed")
    assert done.stderr.count("\n") == 1


def test_closed_standard_error_still_gives_the_code(home: Path) -> None:
    assert run("2>&-", "nonsense").returncode == 2


def test_notices_without_a_standard_error_are_no_failure(home: Path) -> None:
    assert run("2>&-", "stop").returncode == 0


def test_drawing_needs_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert not is_live({})


def test_another_os_error_is_not_blamed_on_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: list[str]) -> int:
        raise OSError(5, os.strerror(5), "\x1b[31m")

    monkeypatch.setattr(command, "_dispatch", broken)
    assert command.main([]) == 1
    shown = capsys.readouterr().err
    assert "internal error: OSError" in shown
    assert "\x1b" not in shown


def test_a_signal_decides_the_code_also_when_the_last_words_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_words(_: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGHUP)
        except KeyboardInterrupt:
            raise OSError(5, os.strerror(5)) from None
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        monkeypatch.setattr(command, "_dispatch", last_words)
        assert command.main([]) == 129
    finally:
        signal.signal(signal.SIGHUP, before)
