"""What people are told about GPUs, as plain data. This file decides nothing."""

from __future__ import annotations

from typing import Any

import torch

from hipfire.base.errors import UnsupportedError
from hipfire.device.platform import Gpu, check_supported, find_gpu, free_memory


def gpu_facts(most: int | None = None) -> list[dict[str, Any]]:
    """Return facts about the first `most` GPUs (None: all), an empty list without one; sizes are bytes.

    `problem` says why hipfire cannot use a GPU, or is None. Asking starts the driver's work on each of them.
    Raises UnsupportedError where the driver itself does not start.
    """
    first = find_gpu()
    if first is None:
        return []
    count = torch.cuda.device_count()
    others = (find_gpu(index) for index in range(1, count if most is None else min(most, count)))
    return [_facts(gpu) for gpu in (first, *others) if gpu is not None]


def _facts(gpu: Gpu) -> dict[str, Any]:
    problem, free = None, None
    try:
        check_supported(gpu)
        free = free_memory(gpu)
    except UnsupportedError as error:
        problem = error.line()
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "arch": gpu.arch,
        "driver": gpu.driver,
        "runtime": gpu.runtime,
        "memory_bytes": gpu.total_memory,
        "free_bytes": free,
        "problem": problem,
    }
