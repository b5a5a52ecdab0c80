"""The daemon as a process: its pipes, its lock, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_kit import Process, types

from hipfire.engine.daemon import EXIT_FAULT, EXIT_LOCKED, read_lines
from hipfire.engine.lock import read_pid_file
from hipfire.engine.turn import TurnKey
from hipfire.engine.wire import MAX_LINE, encode_key

KEY = TurnKey("a", 1)

TERMINALS = {"done", "aborted", "error"}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    running = Process(tmp_path / "home")
    yield running
    running.stop()


def lines_of(*chunks: bytes) -> list[bytes]:
    """Return the lines that a pipe gives which is filled by these chunks."""
    source, target = os.pipe()

    def fill() -> None:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]
        os.close(target)

    writer = threading.Thread(target=fill)
    writer.start()
    found = list(read_lines(source))
    writer.join()
    os.close(source)
    return found


def test_lines_are_read_however_they_arrive() -> None:
    assert lines_of(b"one\ntwo\r\n\n  \nthree", b" parts\n", b"unfinished") == [
        b"one",
        b"two\r",
        b"three parts",
    ]
    assert lines_of(b"") == []
    long = b"x" * (2 * MAX_LINE)
    kept, after = lines_of(long, b"yz\n{}\n")
    assert (len(kept), after) == (MAX_LINE + 1, b"{}")


def test_prints_of_libraries_go_to_the_log_and_not_between_the_lines(process: Process) -> None:
    process.tell({"type": "load", "model": "m", "request": 1}, b"\n", b"{broken\n", {"type": "ping"})
    assert types(process.hear_until("pong")) == ["loading", "loading", "loaded", "error", "pong"]
    assert "a library prints this" in process.log.read_text()


def test_the_daemon_serves_messages_between_the_steps_of_a_turn(process: Process) -> None:
    process.tell({"type": "load", "model": "m"})
    process.hear_until("loaded")
    words = " ".join(["say:x", "sleep:0.02"] * 500)
    process.tell({"type": "generate", "id": "a", "attempt_id": 1, "prompt": words})
    process.hear_until("token")
    process.tell({"type": "ping"})
    process.hear_until("pong")
    process.tell(encode_key("cancel", KEY))
    heard = process.hear_until("aborted")
    # the turn had seconds to go
    assert len(heard) < 100


def test_the_end_of_stdin_ends_the_daemon_and_its_turns(process: Process) -> None:
    process.tell(
        {"type": "load", "model": "m"}, {"type": "generate", "id": "a", "attempt_id": 1, "prompt": "x"}
    )
    process.hear_until("commit_ready")
    assert process.child.stdin is not None
    process.child.stdin.close()
    assert types(process.rest()) == ["aborted"]
    assert process.child.wait(30) == 0
    assert read_pid_file(process.home / "daemon.pid") is None


@pytest.mark.parametrize("model", ["m", "slow"])
def test_sigterm_ends_the_daemon_also_while_it_loads(process: Process, model: str) -> None:
    process.tell({"type": "load", "model": model})
    process.hear()
    # the server decides what Ctrl-C and a closing terminal mean
    process.child.send_signal(signal.SIGINT)
    process.child.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    assert process.child.poll() is None
    process.child.terminate()
    process.rest()
    assert process.child.wait(30) == 0


def test_a_core_that_breaks_ends_the_process_but_not_without_a_word(process: Process) -> None:
    process.tell({"type": "load", "model": "m"})
    process.hear_until("loaded")
    for name, prompt in (("a", "wait wait wait"), ("b", "say:x boom")):
        process.tell({"type": "generate", "id": name, "attempt_id": 1, "prompt": prompt})
    ends = [event for event in process.rest() if event["type"] in TERMINALS]
    assert sorted((end["id"], end["class"]) for end in ends) == [("a", "internal"), ("b", "internal")]
    assert process.child.wait(30) == EXIT_FAULT
    assert "the scripted core broke" in process.log.read_text()


def test_a_second_daemon_says_who_holds_the_lock_and_leaves(process: Process) -> None:
    process.tell({"type": "ping"})
    process.hear()
    path = process.home / "daemon.pid"
    assert path.stat().st_mode & 0o777 == 0o600
    record = read_pid_file(path)
    assert record is not None
    assert record.pid == process.child.pid
    second = Process(process.home, stderr=subprocess.PIPE)
    assert second.child.stderr is not None
    said = second.child.stderr.read().decode()
    assert second.child.wait(30) == EXIT_LOCKED
    second.child.stderr.close()
    second.stop()
    assert said.startswith("hipfire: FATAL: ")
    assert said.count("\n") == 1
    assert str(process.child.pid) in said
    # the first one is as well as before, and its record is whole
    assert read_pid_file(path) == record
    process.tell({"type": "ping"})
    assert process.hear() == {"type": "pong"}


def test_a_killed_daemons_lock_is_free_at_once(process: Process) -> None:
    process.tell({"type": "ping"})
    process.hear()
    process.child.kill()
    process.child.wait(30)
    second = Process(process.home)
    second.tell({"type": "ping"})
    assert second.hear() == {"type": "pong"}
    second.stop()


def test_a_daemon_whose_reader_is_gone_ends(process: Process) -> None:
    process.tell({"type": "ping"})
    process.hear()
    assert process.child.stdout is not None
    process.child.stdout.close()
    process.tell({"type": "ping"})
    assert process.child.wait(30) == 0


@pytest.mark.parametrize("end", ["signal", "stdin"])
def test_a_daemon_whose_reader_takes_nothing_ends_when_told_to(process: Process, end: str) -> None:
    process.tell({"type": "load", "model": "m"})
    process.hear_until("loaded")
    # more than a pipe holds
    process.tell({"type": "generate", "id": "a", "attempt_id": 1, "prompt": "say:" + "x" * 2**20})
    time.sleep(0.2)
    assert process.child.poll() is None
    if end == "signal":
        process.child.terminate()
    else:
        assert process.child.stdin is not None
        process.child.stdin.close()
    assert process.child.wait(10) == 0


def test_a_slow_reader_gets_every_byte(process: Process) -> None:
    process.tell({"type": "load", "model": "m"})
    process.hear_until("loaded")
    text = "0123456789" * 50_000
    process.tell({"type": "generate", "id": "a", "attempt_id": 1, "prompt": f"say:{text}"})
    time.sleep(0.2)
    *_, said, ready = process.hear_until("commit_ready")
    assert said["text"] == text
    assert ready["id"] == "a"
