"""A kernel whose compilation never ends, one that shares its name, and a sound one after them."""

import os
import subprocess
import time
from pathlib import Path

import triton
import triton.language as tl

from hipfire.kernels.gpu.offline import Offline

PIDS = "HIPFIRE_TEST_PIDS"


@triton.jit
def copy_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


class Endless(Offline):
    """Never comes back, and has started a program as compilers start assemblers."""

    def compile(self, target):
        started = subprocess.Popen(["sleep", "600"])
        Path(os.environ[PIDS]).write_text(f"{os.getpid()} {started.pid}")
        time.sleep(600)


_COPY = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
_ON = frozenset({"gfx1100"})

OFFLINE = (
    Endless(copy_kernel, _COPY, {}, name="a", on=_ON),
    Offline(copy_kernel, _COPY, {}, name="b", on=_ON),
    Offline(copy_kernel, _COPY, {}, name="b", on=_ON, warps=2),
)
