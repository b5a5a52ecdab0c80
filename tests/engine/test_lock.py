"""Pid files, the proof that a process is ours, and the lock that one daemon has."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hipfire.base.errors import ValidationError
from hipfire.engine import lock
from hipfire.engine.lock import (
    DaemonLock,
    LockHeldError,
    ProcessRecord,
    is_alive,
    own_record,
    ownership_fault,
    read_pid_file,
    remove_pid_file,
    start_time,
    write_pid_file,
)

NOBODY = 2**22 + 5  # above the largest process number that Linux gives out


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with hipfire and runs until the test ends."""
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait(30)


@pytest.fixture
def ours() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a server of hipfire."""
    child = subprocess.Popen([sys.executable, "-c", "input()", "hipfire", "serve"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate(timeout=30)


def record_of(child: subprocess.Popen[bytes]) -> ProcessRecord:
    return ProcessRecord(child.pid, start_time(child.pid), 11435, "token")


def test_a_pid_file_says_what_was_written_and_only_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "home" / "serve.pid"
    record = own_record(port=11435)
    write_pid_file(path, record)
    assert read_pid_file(path) == record
    assert (record.pid, record.port, record.start_time) == (os.getpid(), 11435, start_time(os.getpid()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["serve.pid"]
    # a token that could be guessed would prove nothing
    assert own_record().token != record.token
    assert len(record.token or "") == 64


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("4321", ProcessRecord(4321)), ("4321\n", ProcessRecord(4321)),
        ('{"pid": 4321}', ProcessRecord(4321)),
        ('{"pid": 4321, "start_time": 7, "port": 80, "token": "t"}', ProcessRecord(4321, 7, 80, "t")),
        ('{"pid": 4321, "start_time": "7", "port": true, "token": 5}', ProcessRecord(4321)),
        ("", None), ("hello", None), ("[4321]", None), ('{"port": 80}', None), ('{"pid": "4321"}', None),
        ("\x00\x00", None), ('{"pid": 43', None), ("12.5", None), ("[" * 4000, None),
        # a signal to these would reach every process, a group or the first one
        ("0", None), ("-1", None), ("1", None), ("true", None), ('{"pid": -4321}', None),
    ],
)  # fmt: skip
def test_whatever_a_pid_file_holds_is_read_safely(
    tmp_path: Path, content: str, expected: ProcessRecord | None
) -> None:
    path = tmp_path / "serve.pid"
    path.write_text(content)
    assert read_pid_file(path) == expected


def test_a_missing_pid_file_is_no_record(tmp_path: Path) -> None:
    assert read_pid_file(tmp_path / "serve.pid") is None
    assert read_pid_file(tmp_path) is None


def test_only_its_own_pid_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "serve.pid"
    mine = own_record(port=1)
    later = replace(mine, token="another")
    write_pid_file(path, later)
    remove_pid_file(path, mine)
    assert read_pid_file(path) == later
    remove_pid_file(path, later)
    assert not path.exists()
    remove_pid_file(path, later)


def test_a_process_that_ended_is_not_alive(stranger: subprocess.Popen[bytes]) -> None:
    assert is_alive(os.getpid())
    assert is_alive(stranger.pid)
    assert not is_alive(NOBODY)
    assert start_time(NOBODY) is None
    stranger.kill()
    os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)
    # its entry is still there, for its parent to read
    assert start_time(stranger.pid) is not None
    assert not is_alive(stranger.pid)


def test_a_name_with_brackets_does_not_confuse_the_start_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text(f"77 (a) R 1 (b) S {fields}\n")
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(lock, "PROC", tmp_path)
    # field 22, counted from the process number as the first
    assert start_time(77) == 22
    assert is_alive(77)


def test_without_proc_signals_tell_who_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(lock, "PROC", tmp_path)
    assert is_alive(stranger.pid)
    assert not is_alive(NOBODY)
    # what cannot be signalled is there all the same
    assert is_alive(1)
    # the server's token is then the only proof
    record = replace(record_of(stranger), token="t")
    assert ownership_fault(record) is not None
    assert ownership_fault(record, health={"pid": stranger.pid, "token": "t"}) is None


def test_a_server_is_ours_by_its_start_time(ours: subprocess.Popen[bytes]) -> None:
    record = record_of(ours)
    assert ownership_fault(record) is None
    fault = ownership_fault(replace(record, start_time=(record.start_time or 0) - 1))
    assert fault is not None
    assert "another program" in fault
    # not even the right token makes a process of another time ours
    assert ownership_fault(replace(record, start_time=1), health={"pid": ours.pid, "token": "token"}) == fault


def test_a_server_is_ours_by_its_token(stranger: subprocess.Popen[bytes]) -> None:
    record = record_of(stranger)
    assert ownership_fault(record) == f"nothing shows that process {stranger.pid} is hipfire's"
    assert ownership_fault(record, health={"pid": stranger.pid, "token": "token"}) is None
    for health in (
        {"pid": stranger.pid, "token": "other"},
        {"pid": 5, "token": "token"},
        {"token": "token"},
        {},
    ):
        assert ownership_fault(record, health=health) is not None
    # no token on both sides proves nothing
    assert (
        ownership_fault(replace(record, token=None), health={"pid": stranger.pid, "token": None}) is not None
    )


def test_a_bare_number_needs_two_witnesses(
    ours: subprocess.Popen[bytes], stranger: subprocess.Popen[bytes]
) -> None:
    assert ownership_fault(ProcessRecord(ours.pid)) is not None
    assert ownership_fault(ProcessRecord(ours.pid), health={"pid": ours.pid, "token": "t"}) is None
    assert ownership_fault(ProcessRecord(stranger.pid), health={"pid": stranger.pid}) is not None
    assert ownership_fault(ProcessRecord(NOBODY)) == f"there is no process {NOBODY}"


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "home" / "daemon.pid"
    first, second = DaemonLock(path), DaemonLock(path)
    first.acquire()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(LockHeldError, match=f"process {os.getpid()} holds") as caught:
        second.acquire()
    assert caught.value.pid == os.getpid()
    record = read_pid_file(path)
    assert record is not None
    assert (record.pid, record.start_time) == (os.getpid(), start_time(os.getpid()))
    first.release()
    assert read_pid_file(path) is None
    second.acquire()
    second.release()
    second.release()


def test_a_file_with_wide_rights_is_narrowed_and_a_long_one_cut(tmp_path: Path) -> None:
    path = tmp_path / "daemon.pid"
    path.write_text("9" * 5000)
    path.chmod(0o666)
    held = DaemonLock(path)
    held.acquire()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = read_pid_file(path)
    assert record is not None
    assert record.pid == os.getpid()
    held.release()


def test_a_holder_that_does_not_say_who_it_is_is_told_of_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "daemon.pid"
    held = DaemonLock(path)
    held.acquire()
    path.write_text("")
    with pytest.raises(LockHeldError, match="another process holds"):
        DaemonLock(path).acquire()
    held.release()


def test_a_place_where_no_lock_can_be_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValidationError, match="check HIPFIRE_HOME"):
        DaemonLock(tmp_path / "file" / "daemon.pid").acquire()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_and_leaves_the_lock_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "daemon.pid"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ValidationError, match=r"daemon\.pid cannot be written \(No space left"):
            DaemonLock(path).acquire()
    lock = DaemonLock(path)
    lock.acquire()
    lock.release()


def test_a_record_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.pid"
    write_pid_file(path, own_record(1))
    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(ValidationError, match=r"serve\.pid cannot be written"):
        write_pid_file(path, own_record(2))
    record = read_pid_file(path)
    assert record is not None
    assert record.port == 1
    assert [each.name for each in tmp_path.iterdir()] == ["serve.pid"]
