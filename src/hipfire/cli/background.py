"""Starting a server in the background, and ending one whose record proves that it is ours.

A signal only ever goes to one process, by its number, and only after its start time was looked at again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from hipfire.base import env, log
from hipfire.base.errors import TransportError, ValidationError
from hipfire.cli.remote import Health, Remote
from hipfire.cli.remote_wire import Address
from hipfire.engine.lock import (
    ProcessRecord,
    is_alive,
    ownership_fault,
    read_pid_file,
    remove_pid_file,
    start_time,
)

START_SECONDS = 60.0
POLL_SECONDS = 0.1
# the server gives running replies 30 seconds to end
DRAIN_SECONDS = 35.0
NOTICE_SECONDS = 2.0
FORCE_SECONDS = 5.0
MAX_LOG_BYTES = 16 << 20
MAX_LINE_BYTES = 2000


class StartError(TransportError):
    """A server in the background ended or stayed silent while it started."""


def start_in_background(
    command: Sequence[str], address: Address, log_path: Path, *, seconds: float = START_SECONDS
) -> Health:
    """Start a server as a process of its own session and wait until it answers.

    Its output is appended to `log_path`. Raises StartError, with the last line that it wrote, if it ends
    first or does not answer in time; nothing is left running then.
    """
    with _open_log(log_path) as output:
        begin = output.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return _await_health(child, Remote(address), log_path, begin, seconds)
    except BaseException:
        _end_child(child)
        raise


def end_server(record: ProcessRecord, *, force: bool) -> None:
    """End the server of a proven record: it finishes running replies first, unless `force`.

    `force` sends a second signal at once, which makes it drop them, and kills it if even that does not help
    within 5 seconds. Raises ValidationError if it still runs at the end.
    """
    daemon = read_pid_file(env.daemon_lock_path())
    _send(record, signal.SIGTERM)
    if force:
        if not _gone(record, POLL_SECONDS):
            _send(record, signal.SIGTERM)
        if not _gone(record, FORCE_SECONDS):
            _send(record, signal.SIGKILL)
            _gone(record, FORCE_SECONDS)
    elif not _gone(record, NOTICE_SECONDS):
        log.logger().info("waiting for its running replies; `hipfire stop --force` drops them")
        _gone(record, DRAIN_SECONDS)
    if not _gone(record, 0):
        raise ValidationError(
            f"process {record.pid} still runs",
            hint="it cannot be killed now" if force else "`hipfire stop --force` kills it",
        )
    forget(record)
    if daemon is not None:
        _end_daemon(daemon, force=force)


def forget(record: ProcessRecord) -> bool:
    """Remove the record of the running server if it is this one; return whether that could be done."""
    try:
        remove_pid_file(env.server_record_path(), record)
    except OSError:
        return False
    return True


def _end_daemon(daemon: ProcessRecord, *, force: bool) -> None:
    """Wait until the engine of a server that ended has ended too, as it does when it is alone."""
    if _gone(daemon, FORCE_SECONDS):
        return
    if force and ownership_fault(daemon) is None:
        _send(daemon, signal.SIGKILL)
        _gone(daemon, FORCE_SECONDS)
    elif not force:
        log.logger().warning(f"its engine, process {daemon.pid}, still runs; `hipfire stop --force` kills it")


def _send(record: ProcessRecord, number: signal.Signals) -> None:
    """Send a signal to the process of a record; one that is gone meanwhile is what was wanted."""
    with contextlib.suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            os.kill(record.pid, number)
            return
        # the handle keeps its process: the number cannot come to mean another one after the look
        handle = os.pidfd_open(record.pid)
        try:
            if record.start_time is None or start_time(record.pid) == record.start_time:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _gone(record: ProcessRecord, seconds: float) -> bool:
    """Return whether the process has ended, waiting for it so long."""

    def ended() -> bool:
        again = record.start_time is not None and start_time(record.pid) != record.start_time
        return again or not is_alive(record.pid)

    return _wait(ended, seconds)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _await_health(
    child: subprocess.Popen[bytes], remote: Remote, log_path: Path, begin: int, seconds: float
) -> Health:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        code = child.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            raise StartError(_why(f"the server ended with {how}", log_path, begin), hint=f"log: {log_path}")
        health = remote.health()
        # another server may answer at this address
        if health is not None and health.pid == child.pid:
            return health
        time.sleep(POLL_SECONDS)
    raise StartError(
        _why(f"the server did not answer within {seconds:g} s", log_path, begin), hint=f"log: {log_path}"
    )


def _why(fault: str, log_path: Path, begin: int) -> str:
    """Return the fault with the last line that the server wrote since `begin`."""
    with log_path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - MAX_LINE_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return f"{fault}: {last.removeprefix('hipfire: ')}"


def _end_child(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(FORCE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _open_log(path: Path) -> BinaryIO:
    """Open the log for its owner only, to write at its end; a log that has grown long is put aside first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.old"))
        return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise ValidationError(
            f"{path} cannot be written: {error.strerror}", hint="set HIPFIRE_HOME to a folder of your own"
        ) from error
