"""What the host waits for: the end of a device's work, and results that it has to look at itself.

Launches on a GPU return before they have run, so whoever reads a clock or a value comes here first.
"""

from __future__ import annotations

import torch


def finish(device: torch.device) -> None:
    """Return once everything that was started on a device has run; on the CPU that is so already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fetch(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in memory of the host, computed to the end; what is there already is not copied."""
    if not values.is_cuda:
        return values
    # pinned, as a copy through pageable memory takes several times as long; torch keeps it for the next one
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return host
