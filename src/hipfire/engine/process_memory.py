"""Memory of this process and of its GPU: how much there is of it, and giving back what lies free."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch


def anonymous_memory(status: Path = Path("/proc/self/status")) -> int:
    """Return the bytes of this process that no file stands behind; 0 where the system does not tell."""
    with suppress(OSError):
        for line in status.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "RssAnon":
                return int(value.split()[0]) * 1024
    return 0


def reclaim() -> None:
    """Give memory that is free back to the system, which the C library and torch keep otherwise."""
    gc.collect()
    trim_gpu()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def trim_gpu() -> None:
    """Give back what torch keeps of a GPU's memory, so that it does not count as taken."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
