"""Which process is the server's or the daemon's: pid files, the daemon's lock, and proof before a signal.

A process is known by its number and its start time, as numbers are given out again. Where the system does not
tell start times, the token that the server shows at /health is the only proof. This file sends no signal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hipfire.base.errors import HipfireError, ValidationError

PROC = Path("/proc")
MAX_RECORD_BYTES = 4096


class LockHeldError(HipfireError):
    """Another process has the lock; `pid` is its number, None if it did not say."""

    kind = "transient"

    def __init__(self, path: Path, pid: int | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"an engine is running already: {who} holds {path}",
            hint="use its server, or end it with `hipfire stop`",
        )
        self.pid = pid


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What a pid file says: the process, when it started (clock ticks since boot), its port and its token."""

    pid: int
    start_time: int | None = None
    port: int | None = None
    token: str | None = None


def own_record(port: int | None = None) -> ProcessRecord:
    """Return the record of this process, with a token that nobody else knows."""
    return ProcessRecord(os.getpid(), start_time(os.getpid()), port, secrets.token_hex(32))


def write_pid_file(path: Path, record: ProcessRecord) -> None:
    """Write a record, readable by its owner only; readers see all of it or what was there before.

    Raises ValidationError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_content(record))
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def read_pid_file(path: Path) -> ProcessRecord | None:
    """Return the record in a file, or None if there is no file or it holds none.

    A file that holds only a number is accepted. Numbers that name no ordinary process are not: a signal to
    those would reach others.
    """
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    fields = value if isinstance(value, dict) else {"pid": value}
    pid = _number(fields.get("pid"))
    if pid is None or pid <= 1:
        return None
    token = fields.get("token")
    return ProcessRecord(
        pid,
        _number(fields.get("start_time")),
        _number(fields.get("port")),
        token if isinstance(token, str) and token else None,
    )


def remove_pid_file(path: Path, record: ProcessRecord) -> None:
    """Remove a file if it still holds this record; that of a later process stays."""
    if read_pid_file(path) == record:
        path.unlink(missing_ok=True)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone or the system hides it."""
    fields = _status(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be noticed does not."""
    if (PROC / "self").exists():
        fields = _status(pid)
        return fields is not None and fields[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ownership_fault(record: ProcessRecord, *, health: Mapping[str, Any] | None = None) -> str | None:
    """Return why it is not proven that a record's process is still hipfire's; None if it is proven.

    `health` is the answer of GET /health at the record's port, if there was one. It is proof that it names
    the record's process and token. So is that the process runs hipfire and started when the record says, or
    if the record does not say, that `health` names it. A process of another start time is never ours.
    """
    if not is_alive(record.pid):
        return f"there is no process {record.pid}"
    began = start_time(record.pid)
    if record.start_time is not None and began is not None and began != record.start_time:
        return f"process {record.pid} is another program, which started later"
    named = health is not None and health.get("pid") == record.pid
    if named and health is not None and record.token is not None and health.get("token") == record.token:
        return None
    # a bare number's second witness is the server that answers by it
    known = began == record.start_time if record.start_time is not None else named
    if known and _runs_hipfire(record.pid):
        return None
    return f"nothing shows that process {record.pid} is hipfire's"


class DaemonLock:
    """The lock that one daemon at a time has; it ends with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock and write this process's record into the file.

        Raises LockHeldError if another process has it, ValidationError if the file cannot be had.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValidationError(
                f"{self._path} cannot be opened ({error.strerror})", hint="check HIPFIRE_HOME"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ValidationError(f"{self._path} cannot be locked ({error.strerror})") from error
            holder = read_pid_file(self._path)
            raise LockHeldError(self._path, holder.pid if holder else None) from error
        try:
            # an older file may have been made with other rights
            os.fchmod(handle, 0o600)
            os.ftruncate(handle, 0)
            os.pwrite(handle, _content(own_record()), 0)
        except OSError as error:
            os.close(handle)
            raise _unwritable(self._path, error) from error
        self._handle = handle

    def release(self) -> None:
        """Give the lock back; the file stays, empty, as removing it could split the lock in two."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None


def _unwritable(path: Path, error: OSError) -> ValidationError:
    return ValidationError(
        f"{path} cannot be written ({error.strerror})", hint="check HIPFIRE_HOME and the space on its disk"
    )


def _content(record: ProcessRecord) -> bytes:
    return json.dumps(asdict(record)).encode("ascii") + b"\n"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _status(pid: int) -> list[str] | None:
    """Return the fields of a process from its state on; its name before them may hold anything."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _runs_hipfire(pid: int) -> bool:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"hipfire" in words
