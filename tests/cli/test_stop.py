"""`hipfire stop`: the server that is proven to be ours ends, and nothing else is ever signalled."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from run_kit import one_line
from scripted_service import Script, serving
from stand_in_kit import free_port, other_program, stand_in

from hipfire.cli import background
from hipfire.cli.main import main
from hipfire.engine.lock import ProcessRecord, own_record, start_time, write_pid_file

Output = pytest.CaptureFixture[str]


@pytest.fixture
def record(home: Path) -> Path:
    """Where the server's record is."""
    home.mkdir()
    return home / "serve.pid"


def test_nothing_runs(home: Path, capsys: Output) -> None:
    assert main(["stop"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "hipfire: no server is running\n")


def test_the_server_ends_and_its_record_is_removed(record: Path, capsys: Output) -> None:
    with stand_in("polite", free_port()) as server:
        assert main(["stop"]) == 0
        assert server.wait(5) == 0
    assert capsys.readouterr().err == f"hipfire: stopped process {server.pid}\n"
    assert not record.exists()


def test_running_replies_are_waited_for(
    record: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(background, "DRAIN_SECONDS", 0.3)
    with stand_in("draining", free_port()) as server:
        assert main(["stop"]) == 1
        shown = capsys.readouterr().err.splitlines()
        assert server.poll() is None
        assert "waiting for its running replies" in shown[0]
        assert f"process {server.pid} still runs; `hipfire stop --force`" in shown[1]
        monkeypatch.setattr(background, "DRAIN_SECONDS", 10)
        # its second signal
        assert main(["stop"]) == 0
        assert server.wait(5) == 0


def test_force_does_not_wait_for_replies(record: Path) -> None:
    with stand_in("draining", free_port()) as server:
        assert main(["stop", "--force"]) == 0
        assert server.wait(5) == 0


def test_force_kills_a_server_that_ignores_it(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FORCE_SECONDS", 0.3)
    with stand_in("stubborn", free_port()) as server:
        assert main(["stop", "--force"]) == 0
        assert server.wait(5) == -9
    assert not record.exists()


@pytest.mark.parametrize("words", [["hipfire.engine.daemon"], []])
def test_force_ends_the_engine_that_a_server_left(
    record: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(background, "FORCE_SECONDS", 1.0)
    with stand_in("polite", free_port()) as server, other_program(*words) as engine:
        fields = ProcessRecord(engine.pid, start_time(engine.pid), None, None)
        write_pid_file(record.with_name("daemon.pid"), fields)
        assert main(["stop", "--force"]) == 0
        assert server.wait(5) == 0
        # only the words on its command line show that it is hipfire's
        assert (engine.poll() == -9) == bool(words)


def test_an_engine_that_a_server_left_is_named(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(background, "FORCE_SECONDS", 1.0)
    with stand_in("polite", free_port()), other_program("hipfire.engine.daemon") as engine:
        fields = ProcessRecord(engine.pid, start_time(engine.pid), None, None)
        write_pid_file(record.with_name("daemon.pid"), fields)
        assert main(["stop"]) == 0
        assert f"process {engine.pid}, still runs" in capsys.readouterr().err
        assert engine.poll() is None


def test_another_program_with_the_number_is_left_alone(record: Path, capsys: Output) -> None:
    with other_program() as other:
        began = start_time(other.pid)
        assert began is not None
        write_pid_file(record, ProcessRecord(other.pid, began - 1, free_port(), "t"))
        assert main(["stop", "--force"]) == 1
        one_line(capsys.readouterr(), "nothing was stopped", str(other.pid))
        assert other.poll() is None
    assert not record.exists()


def test_a_bare_number_proves_nothing(record: Path, capsys: Output) -> None:
    with other_program() as other:
        record.write_text(f"{other.pid}\n")
        assert main(["stop", "--force"]) == 1
        one_line(capsys.readouterr(), "nothing was stopped")
        assert other.poll() is None
    assert not record.exists()


@pytest.mark.parametrize("text", ["1", "0", "-1", "{}", '{"pid": "x"}', "\x00", "[[[[", "true"])
def test_a_record_that_names_no_process_stops_nothing(record: Path, text: str, capsys: Output) -> None:
    record.write_text(text)
    assert main(["stop", "--force"]) == 0
    assert "no server is running" in capsys.readouterr().err


def test_the_record_of_a_process_that_is_gone_is_removed(record: Path, capsys: Output) -> None:
    with other_program() as other:
        pass
    write_pid_file(record, ProcessRecord(other.pid, 1, free_port(), "t"))
    assert main(["stop"]) == 0
    assert "no server is running" in capsys.readouterr().err
    assert not record.exists()


def test_this_process_is_no_server_although_it_runs(record: Path, capsys: Output) -> None:
    mine = own_record(free_port())
    write_pid_file(record, ProcessRecord(mine.pid, (mine.start_time or 0) + 1, mine.port, mine.token))
    assert main(["stop", "--force"]) == 1
    one_line(capsys.readouterr(), "nothing was stopped", str(os.getpid()))


def test_a_port_must_be_the_servers(record: Path, capsys: Output) -> None:
    port = free_port()
    with stand_in("polite", port) as server:
        assert main(["stop", str(port + 1)]) == 1
        one_line(capsys.readouterr(), f"port {port}, not {port + 1}")
        assert server.poll() is None
        assert json.loads(record.read_text())["pid"] == server.pid
        assert main(["stop", str(port)]) == 0


def test_a_server_of_another_home_is_named_and_left_alone(home: Path, capsys: Output) -> None:
    with serving(Script()) as script:
        assert main(["stop", str(script.port)]) == 1
        one_line(capsys.readouterr(), f"127.0.0.1:{script.port}", "4242", "where it was started")


def test_a_record_that_cannot_be_removed_is_no_internal_error(
    record: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with other_program() as other:
        write_pid_file(record, ProcessRecord(other.pid, 1, free_port(), "t"))
        assert main(["stop"]) == 1
        one_line(capsys.readouterr(), "nothing was stopped", "cannot be removed")
    assert main(["stop"]) == 0
    assert capsys.readouterr().err == "hipfire: no server is running\n"
