"""Facts about this machine: processor, memory, disk, GPUs. Reads system files; imports no tensor library.

Limits of a container (affinity, CPU quota, memory limit) count, since they are what hipfire can use. A fact
that this system does not tell is None.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hipfire.base.cpu import cpu_limits, cpu_name

FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
    "i8mm",
)
GPU_SECONDS = 120
_GPU_PROBE = """
import json
from hipfire.base.errors import HipfireError
from hipfire.device.facts import gpu_facts
try:
    told = gpu_facts()
except HipfireError as error:
    told = error.line()
print(json.dumps(told))
"""


def cpu_facts() -> dict[str, Any]:
    """Return the processor's name and instruction sets, and its limits on threads.

    `usable_cores` are those that this process may run on, `quota_cores` the quota (None = no limit),
    `threads` what is taken unless a setting says otherwise.
    """
    flags = set(_field(_read(Path("/proc/cpuinfo")), ("flags", "Features")).split())
    limits = cpu_limits()
    return {
        "model": cpu_name(),
        "features": [name for name in FEATURES if name in flags],
        "usable_cores": limits.affinity,
        "quota_cores": limits.quota,
        "threads": limits.usable,
    }


def memory_facts() -> dict[str, int | None]:
    """Return total and available memory and the container's limit, in bytes."""
    info = _read(Path("/proc/meminfo"))
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return {
        "total_bytes": _kib(_field(info, ("MemTotal",))),
        "available_bytes": _kib(_field(info, ("MemAvailable",))),
        "limit_bytes": int(limit) if limit.isdecimal() else None,
    }


def disk_free(folder: Path) -> int | None:
    """Return the free bytes of the disk that holds `folder`, or its nearest parent that exists."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def gpu_facts() -> list[dict[str, Any]] | str:
    """Return the GPUs that torch sees, as `hipfire.device.facts` tells them, or why they are not known.

    A process of its own asks: a broken driver then cannot take this one down.
    """
    command = [sys.executable, "-c", _GPU_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"torch could not be asked: {error}"
    try:
        gpus: list[dict[str, Any]] | str = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return f"torch could not be asked: {lines[-1] if lines else 'it gave no answer'}"
    return gpus


def platform_name() -> str:
    """Return the system in words, and whether it is Linux inside Windows."""
    release = platform.release()
    note = " (WSL2)" if "microsoft" in release.lower() else ""
    return f"{platform.system()} {release} {platform.machine()}{note}"


def _field(text: str, names: tuple[str, ...]) -> str:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _kib(text: str) -> int | None:
    number = text.partition(" ")[0]
    return int(number) * 1024 if number.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
