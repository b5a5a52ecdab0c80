"""What else the machine did while something was measured, from files of the Linux kernel; None elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

# fields of a CPU's line in /proc/stat that count as work: user, nice, system, irq, softirq, steal
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
# user and system time, counted from the field behind the process's name
_OWN_FIELDS = (11, 12)


class CpuTimes:
    """CPU time in seconds, in steps of the kernel's clock (10 ms as a rule)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def busy(self) -> float | None:
        """Return the time for which the CPUs that this process may use have worked, for whomever."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        found = False
        for line in self._lines("stat"):
            name, *fields = line.split()
            if name in names:
                found = True
                ticks += sum(int(fields[index]) for index in _BUSY_FIELDS if index < len(fields))
        return ticks / _ticks_per_second() if found else None

    def process(self, pid: int) -> float | None:
        """Return the time that a process has used, all its threads together."""
        for line in self._lines(f"{pid}/stat"):
            # the name stands in parentheses and may hold anything
            fields = line.rpartition(")")[2].split()
            return sum(int(fields[index]) for index in _OWN_FIELDS) / _ticks_per_second()
        return None

    def _lines(self, name: str) -> list[str]:
        try:
            return [line for line in (self._proc / name).read_text("utf-8", "replace").splitlines() if line]
        except OSError:
            return []


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")
