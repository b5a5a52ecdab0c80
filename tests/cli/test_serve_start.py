"""`hipfire serve` and `restart`: taken addresses, servers in the background, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_kit import one_line
from stand_in_kit import command, free_port, other_program, stand_in

from hipfire.base.errors import ValidationError
from hipfire.cli import background
from hipfire.cli.background import StartError, start_in_background
from hipfire.cli.main import main
from hipfire.cli.remote_wire import Address
from hipfire.engine.lock import is_alive, start_time
from hipfire.server.options import ServeOptions

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that a program listens at which is no server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("more", [[], ["-d"]])
def test_a_port_in_use_has_its_own_code_and_advice(
    home: Path, listener: int, started: list[ServeOptions], more: list[str], capsys: Output
) -> None:
    assert main(["serve", str(listener), *more]) == 3
    one_line(capsys.readouterr(), f"another program listens at 127.0.0.1:{listener}", str(listener + 1))
    assert started == []


def test_the_program_that_has_the_port_is_named_if_it_is_a_server(home: Path, capsys: Output) -> None:
    home.mkdir()
    port = free_port()
    with stand_in("unrecorded", port) as server:
        assert main(["serve", str(port)]) == 3
    one_line(capsys.readouterr(), f"a hipfire server, process {server.pid}, listens")


def test_a_second_server_of_one_home_is_refused(
    home: Path, started: list[ServeOptions], capsys: Output
) -> None:
    home.mkdir()
    with stand_in("polite", free_port()) as server:
        assert main(["serve", str(free_port())]) == 3
        one_line(capsys.readouterr(), f"process {server.pid}", "hipfire restart")
        assert server.poll() is None
    assert started == []


@pytest.mark.parametrize("behaviour", ["polite", "draining"])
def test_restart_ends_the_first_server(
    home: Path, started: list[ServeOptions], behaviour: str, capsys: Output
) -> None:
    home.mkdir()
    port = free_port()
    with stand_in(behaviour, port) as server:
        assert main(["restart", str(port)]) == 0
        # the second signal may come when it has already begun to end
        assert server.wait(5) in (0, -signal.SIGTERM)
    assert started[0].port == port
    assert f"stopped process {server.pid}" in capsys.readouterr().err


def test_restart_keeps_the_server_if_the_new_one_could_not_start(
    home: Path, started: list[ServeOptions], listener: int, capsys: Output
) -> None:
    home.mkdir()
    with stand_in("polite", free_port()) as server:
        assert main(["restart", str(listener)]) == 3
        one_line(capsys.readouterr(), f"listens at 127.0.0.1:{listener} already")
        assert main(["restart", "--model", "nonsense"]) == 1
        one_line(capsys.readouterr(), "unknown model 'nonsense'")
        assert main(["restart", f"0.0.0.0:{free_port()}"]) == 1
        one_line(capsys.readouterr(), "0.0.0.0 can be reached from other machines, and there is no token")
        assert server.poll() is None
    assert started == []


def test_a_log_that_cannot_be_written_is_named(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.mkdir()
    with pytest.raises(ValidationError, match=r"serve\.log cannot be written: Is a directory") as caught:
        begin("polite", free_port(), log)
    assert "HIPFIRE_HOME" in caught.value.hint


def test_restart_starts_where_nothing_runs(home: Path, started: list[ServeOptions]) -> None:
    assert main(["restart", str(free_port())]) == 0
    assert len(started) == 1


def test_restart_leaves_other_programs_alone(home: Path, started: list[ServeOptions]) -> None:
    home.mkdir()
    with other_program() as other:
        fields = {"pid": other.pid, "start_time": (start_time(other.pid) or 0) - 1, "port": 1, "token": "t"}
        (home / "serve.pid").write_text(json.dumps(fields))
        assert main(["restart", str(free_port())]) == 0
        assert other.poll() is None


def test_an_address_of_another_machine_is_refused(home: Path, capsys: Output) -> None:
    assert main(["serve", "192.0.2.1:8080"]) == 1
    one_line(capsys.readouterr(), "192.0.2.1:8080 is no address of this machine")


def begin(behaviour: str, port: int, log: Path, seconds: float = 20.0) -> int | None:
    return start_in_background(command(behaviour, port), Address("127.0.0.1", port), log, seconds=seconds).pid


def test_a_background_server_outlives_the_command(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "new" / "serve.log"
    pid = begin("polite", free_port(), log)
    assert pid is not None
    try:
        assert os.getsid(pid) == pid
        assert log.read_text() == "hipfire: starting\n"
        assert log.stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_an_early_end_is_told_with_its_last_words(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("hipfire: words of an earlier run\n")
    with pytest.raises(StartError, match="ended with code 1: no room for the model") as caught:
        begin("dead", free_port(), log)
    assert str(log) in caught.value.hint
    assert log.read_text().startswith("hipfire: words of an earlier run\nhipfire: starting\n")


def test_a_server_that_stays_silent_is_ended(home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    pids: list[int] = []
    end = background._end_child
    monkeypatch.setattr(background, "_end_child", lambda child: (pids.append(child.pid), end(child)))
    with pytest.raises(StartError, match="did not answer within 2 s: starting"):
        begin("mute", free_port(), tmp_path / "log", seconds=2)
    assert not is_alive(pids[0])


def test_ctrl_c_while_it_starts_leaves_nothing_behind(home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    pids: list[int] = []
    end = background._end_child

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(background, "_end_child", lambda child: (pids.append(child.pid), end(child)))
    monkeypatch.setattr(background, "_await_health", interrupt)
    with pytest.raises(KeyboardInterrupt):
        begin("mute", free_port(), tmp_path / "log")
    assert not is_alive(pids[0])


def test_another_server_at_the_address_is_not_taken_for_ours(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    port = free_port()
    with stand_in("unrecorded", port), pytest.raises(StartError):
        begin("mute", port, tmp_path / "log", seconds=0.6)


def test_a_long_log_is_put_aside(home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(background, "MAX_LOG_BYTES", 10)
    log = tmp_path / "serve.log"
    log.write_text("a long history\n")
    with pytest.raises(StartError):
        begin("dead", free_port(), log)
    assert (tmp_path / "serve.log.old").read_text() == "a long history\n"
    assert log.read_text().startswith("hipfire: starting\n")


def test_a_server_is_started_found_and_stopped(home: Path, capsys: Output, monkeypatch: Patch) -> None:
    port = free_port()
    monkeypatch.setenv("HIPFIRE_PORT", str(port))
    assert main(["serve", "-d"]) == 0
    try:
        assert f"serving at http://127.0.0.1:{port} as process" in capsys.readouterr().err
        assert main(["ps", "-j"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["server"]["address"] == f"127.0.0.1:{port}"
        assert facts["server"]["tracked"] is True
        pids = [facts["server"]["pid"], facts["daemon"]["pid"]]
        assert len(set(pids)) == 2
    finally:
        assert main(["stop", "--force"]) == 0
    until = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no server is running\n"
