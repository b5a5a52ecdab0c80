"""How many threads a compute pool should take on this machine, and what its processor is called.

One thread for each physical core of the fast kind, no more than a container's quota and the process's set of
CPUs allow: a second thread on a core, a slow core among fast ones, and threads beyond a quota make every step
wait. All facts are files of the Linux kernel; where they are missing (other systems, bare containers) the
CPUs that Python counts are taken for cores. This file does not know thread pools, settings or instruction
sets.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hipfire.base.printable import one_line

_READ_BYTES = 1 << 18
# above what any kernel numbers; a range in a damaged file must not fill the memory
_CPU_LIMIT = 1 << 14
_NUMBER_DIGITS = 18
_CONTROLLERS = frozenset({"cpu", "cpuset"})
# where a system mounts its control groups, relative to their folder: version 2 alone, both, version 1
_MOUNTS = ("", "unified", "cpu", "cpu,cpuacct", "cpuset")
_CPUSET_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
_SIBLING_FILES = ("core_cpus_list", "thread_siblings_list")
_CORE_IDS = ("physical_package_id", "die_id", "cluster_id", "core_id")
# a file in a CPU's folder that tells its speed, and the share of the fastest from which a CPU counts as fast.
# Slow cores have about half the capacity or less; a phone's fastest core and its other fast ones lie closer.
_SPEED_FILES = (("cpu_capacity", 0.6), ("cpufreq/cpuinfo_max_freq", 0.8))
_NAME_FIELDS = ("model name", "Model Name", "Model", "Hardware", "Processor", "cpu model", "cpu")


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """What bounds the threads of this process.

    `affinity` counts the logical CPUs that it may run on and `physical` the fast cores among them; `quota` is
    the CPU time of its control group in CPUs (None = no limit). `usable` is the number of threads to take, at
    least 1, and `reason` says in a few words what decided it.
    """

    affinity: int
    quota: float | None
    physical: int
    usable: int
    reason: str


def cpu_limits(
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    affinity: frozenset[int] | None = None,
) -> CpuLimits:
    """Return the limits of this process. A file that is missing or damaged tells nothing; nothing is raised.

    `affinity` holds the numbers of the CPUs that the process may run on; None asks the system.
    """
    groups = _groups(proc, cgroup)
    allowed = _own_cpus() if affinity is None else affinity
    for group in groups:
        for name in _CPUSET_FILES:
            # an empty set means "as the parent", and one without any of our CPUs is out of date
            allowed = allowed & _cpu_list(_read(group / name)) or allowed
    fast = _fast_cpus(sys, allowed)
    physical = max(1, len({_core(sys, cpu) for cpu in fast}))
    quota = min((quota for group in groups for quota in _quotas(group)), default=None)
    usable = physical if quota is None else min(physical, max(1, int(quota)))
    if usable < physical:
        reason = f"a quota of {quota:g} CPUs"
    else:
        kind = "cores" if len(fast) == len(allowed) else "fast cores"
        reason = f"the number of {kind} among {len(allowed)} CPUs"
    return CpuLimits(len(allowed), quota, physical, usable, reason)


def usable_threads() -> int:
    """Return the number of threads that a compute pool of this process should take, at least 1."""
    return cpu_limits().usable


def cpu_name(proc: Path = Path("/proc")) -> str:
    """Return what the processor (or else the board or the architecture) is called, as one printable line."""
    fields: dict[str, str] = {}
    for line in _read(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    board = _read(proc / "device-tree" / "model").strip("\0")
    told = (fields.get(name, "") for name in _NAME_FIELDS)
    names = (*told, board, platform.processor(), platform.machine())
    return next((text for name in names if (text := one_line(name))), "unknown processor")


def _own_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _groups(proc: Path, cgroup: Path) -> tuple[Path, ...]:
    """Return the folders of the process's control groups and of all their parents, without repeats.

    The root of each mount is always among them: in a container it is the container's own group, while the
    path in `proc` may be the host's and lead nowhere.
    """
    folders = [cgroup / mount for mount in _MOUNTS]
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = names.split(",")
        if not names:
            mounts = ["", "unified"]
        elif _CONTROLLERS.isdisjoint(controllers):
            continue
        else:
            mounts = [names, *controllers]
        for mount in mounts:
            folders.extend(_upwards(cgroup / mount, path))
    return tuple(dict.fromkeys(folders))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    # a group outside what this container sees is shown with "..": it has no folder here
    if ".." not in parts:
        for depth in range(len(parts), 0, -1):
            yield mount.joinpath(*parts[:depth])


def _quotas(group: Path) -> Iterator[float]:
    """Yield the CPU quota that each version's files in one group set, in CPUs."""
    both = _read(group / "cpu.max").split()
    one = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    for pair in (both, one):
        if len(pair) == 2:
            quota, period = _number(pair[0]), _number(pair[1])
            if quota and period:
                yield quota / period


def _fast_cpus(sys: Path, allowed: frozenset[int]) -> frozenset[int]:
    """Return the CPUs of the fast kind among `allowed`; all of them where there is one kind only."""
    # hybrid Intel processors name their performance CPUs
    if named := allowed & _cpu_list(_read(sys / "devices" / "cpu_core" / "cpus")):
        return named
    for name, share in _SPEED_FILES:
        speeds = {cpu: speed for cpu in allowed if (speed := _number(_read(_cpu_folder(sys, cpu) / name)))}
        floor = share * max(speeds.values(), default=0)
        fast = frozenset(cpu for cpu in allowed if speeds.get(cpu, floor) >= floor)
        if fast != allowed:
            return fast
    return allowed


def _core(sys: Path, cpu: int) -> tuple[str, ...]:
    """Return what the CPUs of one physical core have in common and no other core has."""
    folder = _cpu_folder(sys, cpu) / "topology"
    for name in _SIBLING_FILES:
        siblings = _cpu_list(_read(folder / name))
        if cpu in siblings:
            return ("first sibling", str(min(siblings)))
    ids = tuple(_read(folder / name).strip() for name in _CORE_IDS)
    return ("ids", *ids) if _number(ids[-1]) is not None else ("cpu", str(cpu))


def _cpu_folder(sys: Path, cpu: int) -> Path:
    return sys / "devices" / "system" / "cpu" / f"cpu{cpu}"


def _cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs in a list such as `0-3,8`; a list that is damaged anywhere is empty."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        low = _number(first)
        high = _number(last) if dash else low
        if low is None or high is None or not low <= high < _CPU_LIMIT:
            return frozenset()
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def _number(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _NUMBER_DIGITS else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        # a path taken from a damaged file may hold what no path can hold
        return ""
