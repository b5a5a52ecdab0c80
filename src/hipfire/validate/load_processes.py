"""The processes of a server under load: what they hold of the machine, and the end of its engine.

Only a process that is proven to be the server's own engine is ever killed. Figures come from /proc, so they
are there on Linux only. This file knows no requests.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hipfire.engine.lock import PROC, is_alive, read_pid_file

ENGINE_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds: resident memory in bytes (all, and its own pages), open files, threads."""

    pid: int
    resident: int
    private: int
    files: int
    threads: int

    def to_json(self) -> dict[str, int]:
        """Return the fields as JSON values."""
        return asdict(self)


def holdings(pid: int) -> Holdings | None:
    """Return what a process holds; None if it is gone or the system does not tell."""
    folder = PROC / str(pid)
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
        files = len(list((folder / "fd").iterdir()))
    except OSError:
        return None
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    try:
        resident, private = (int(told[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
        return Holdings(pid, resident, private, files, int(told["Threads"]))
    except (KeyError, ValueError):
        return None


def engine_pid(home: Path, server: int) -> int | None:
    """Return the process of the engine in this home, if it runs and is the child of this server."""
    record = read_pid_file(home / "daemon.pid")
    if record is None or not is_alive(record.pid) or _parent(record.pid) != server:
        return None
    return record.pid


def wait_for_engine(home: Path, server: int, *, other_than: int | None, timeout_s: float) -> int | None:
    """Return the engine's process once there is one that is not `other_than`; None if none comes in time."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        pid = engine_pid(home, server)
        if pid is not None and pid != other_than:
            return pid
        time.sleep(ENGINE_POLL_S)
    return None


def kill_engine(pid: int, home: Path, server: int) -> bool:
    """Kill the engine at once; False if the process is no longer the engine of this server."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # asked again with the handle in hand: the number cannot be another program's from here on
        if engine_pid(home, server) != pid:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _parent(pid: int) -> int | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
        # the name before the last bracket may hold anything
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
