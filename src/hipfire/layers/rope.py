"""Rotary frequencies: what a checkpoint says about them, and the tables that follow.

Scaling kinds: `default`, `linear` (positions divided by a factor) and `llama3` (low frequencies divided by a
factor, with a smooth passage). Others do not exist here: an ignored scaling gives
fluent nonsense at long range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hipfire.layers.context import RopeTable


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding of one kind of layer.

    `dims` rotated dims, base `theta`, scaling `kind` with its `factor`; the last three fields belong to
    llama3: wavelengths over original_context / low_factor are scaled in full, those under original_context
    / high_factor not at all.
    """

    dims: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 1.0
    original_context: int = 0

    def to_hf(self) -> dict[str, Any]:
        """Return the `rope_parameters` object of a Hugging Face config."""
        parameters: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            parameters["factor"] = self.factor
        if self.kind == "llama3":
            parameters["low_freq_factor"] = self.low_factor
            parameters["high_freq_factor"] = self.high_factor
            parameters["original_max_position_embeddings"] = self.original_context
        return parameters

    def table(self, divisors: torch.Tensor | None = None, *, device: torch.device | str = "cpu") -> RopeTable:
        """Return the frequencies as a table on `device`; they are computed on the CPU.

        `divisors` [dims/2] are the frequency factors that a GGUF file carries instead of llama3 parameters; a
        linear scaling applies on top of them.
        """
        exponents = torch.arange(0, self.dims, 2, dtype=torch.float32) / self.dims
        inverse = 1.0 / (self.theta**exponents)
        if divisors is not None:
            inverse = inverse / divisors.cpu()
        elif self.kind == "llama3":
            inverse = self._smoothed(inverse)
        if self.kind == "linear":
            inverse = inverse / self.factor
        return RopeTable(inverse.to(device))

    def _smoothed(self, inverse: torch.Tensor) -> torch.Tensor:
        wavelength = 2.0 * math.pi / inverse
        turns = self.original_context / wavelength
        keep = ((turns - self.low_factor) / (self.high_factor - self.low_factor)).clamp(0.0, 1.0)
        return (1.0 - keep) * inverse / self.factor + keep * inverse
