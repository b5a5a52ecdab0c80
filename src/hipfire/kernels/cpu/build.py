"""Compiling the kernels that a model needs, once per machine, after a trial in a process of its own.

This file does not know what the kernels do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

from hipfire.base.errors import UnsupportedError
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.jit import Kernel
from hipfire.kernels.cpu.pool import publish, run_published, serve
from hipfire.kernels.cpu.target import PATH_VARIABLE, cpu_path, host_features, supported_paths

TRIAL_MODULE = "hipfire.kernels.cpu.trial"
TRIAL_SECONDS = 300


def compile_kernels(kernels: Sequence[Kernel], report: Callable[[int, int], None] | None = None) -> None:
    """Make all kernels ready; `report` is told how many of the missing ones are compiled, from none on."""
    missing = [kernel for kernel in kernels if not kernel.ready]
    if missing and report is not None:
        report(0, len(missing))
    for done, kernel in enumerate(missing, 1):
        kernel.compile()
        if report is not None:
            report(done, len(missing))
    for kernel in kernels:
        kernel.compile()


def start_engine(threads: int) -> CpuEngine:
    """Return an engine, on a processor that was tried out before the engine's first instruction.

    Raises UnsupportedError if the processor cannot run what it says it can. The engine's own functions are
    compiled after a trial, so where they are kept the processor has passed it.
    """
    if not all(function.ready for function in (run_published, publish, serve)):
        try_out()
    return CpuEngine(threads)


def try_out(command: Sequence[str] = (sys.executable, "-m", TRIAL_MODULE)) -> None:
    """Run a product on this path in another process; UnsupportedError if that dies or computes wrongly.

    Some machines, virtual ones above all, name features that they do not have: the first use ends the
    process.
    """
    path = cpu_path()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
        code, words = done.returncode, done.stderr.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        code, words = 0, [str(error)]
    if code != 0:
        possible = supported_paths(host_features())
        slower = possible[possible.index(path) + 1 :]
        reason = f"signal {-code}" if code < 0 else (words[-1] if words else f"status {code}")
        raise UnsupportedError(
            f"the {path} kernels fail on this processor ({reason})",
            hint=f"set {PATH_VARIABLE}={slower[0]}" if slower else "set memory.weights=packed",
        )
