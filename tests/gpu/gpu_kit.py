"""What tests of GPU kernels share: the engine of this machine, poisoned memory, and a measure of error.

Where no GPU is, kernels run interpreted on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine
from hipfire.kernels.gpu.target import INTERPRETED, TargetName

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TARGET: TargetName = "plain" if INTERPRETED else ("hip" if torch.version.hip else "cuda")
GUARD_BYTES = 256
GUARD = 0xA5


class Poisoned:
    """A scratch that hands out NaN-filled memory with guard bytes before and behind it."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, torch.Tensor, int]] = []

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        numel = 1
        for size in shape:
            numel *= size
        nbytes = numel * dtype.itemsize
        padded = -(-nbytes // GUARD_BYTES) * GUARD_BYTES
        memory = torch.full((2 * GUARD_BYTES + padded,), GUARD, dtype=torch.uint8, device=DEVICE)
        memory[GUARD_BYTES : GUARD_BYTES + nbytes] = 0xFF  # NaN in every floating type
        self._taken.append((name, memory, nbytes))
        body = memory[GUARD_BYTES : GUARD_BYTES + nbytes]
        return body.view(dtype).view(tuple(shape))

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Nothing is taken twice."""

    def check_guards(self) -> None:
        """Fail where something was written outside of what was handed out."""
        for name, memory, nbytes in self._taken:
            assert (memory[:GUARD_BYTES] == GUARD).all(), f"written before {name}"
            assert (memory[GUARD_BYTES + nbytes :] == GUARD).all(), f"written behind {name}"


def engine(arithmetic: Arithmetic = "int8", scratch: Poisoned | None = None) -> GpuEngine:
    """Return an engine whose results come from `scratch`, or from poisoned memory of its own."""
    return GpuEngine(
        DEVICE,
        TARGET,
        arithmetic=arithmetic,
        processors=4,
        overlapped=TARGET == "cuda" and torch.cuda.get_device_capability() >= (9, 0),
        scratch=scratch or Poisoned(),
    )


def relative_rms(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the RMS of the difference over the RMS of the reference, in float64."""
    wanted = reference.double().cpu()
    error = (value.double().cpu() - wanted).square().mean().sqrt()
    return float(error / wanted.square().mean().sqrt())
