"""Rotary frequencies: what a checkpoint says about them, and the tables that follow.

Scaling kinds: `default`, `linear` (positions divided by a factor) and `llama3` (low frequencies divided by a
factor, with a smooth passage). Others are refused: an ignored scaling gives fluent nonsense at long range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hipfire.base.errors import UnsupportedError, ValidationError
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

    @classmethod
    def from_hf(cls, dims: int, parameters: Mapping[str, Any]) -> RopeSpec:
        """Read a `rope_parameters` (or old `rope_scaling` plus `rope_theta`) object."""
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        theta = float(parameters.get("rope_theta", 10000.0))
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError("rope_parameters.partial_rotary_factor other than 1 is not supported")
        if kind == "default":
            return cls(dims, theta)
        if kind not in ("linear", "llama3"):
            raise UnsupportedError(
                f"rope scaling {kind!r} is not supported", hint="known: default, linear, llama3"
            )
        try:
            factor = float(parameters["factor"])
            if kind == "linear":
                return cls(dims, theta, kind, factor)
            return cls(
                dims,
                theta,
                kind,
                factor,
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(parameters["original_max_position_embeddings"]),
            )
        except KeyError as missing:
            raise ValidationError(f"rope scaling {kind!r} lacks the field {missing}") from None

    def to_hf(self) -> dict[str, Any]:
        """Return the `rope_parameters` object that `from_hf` reads."""
        parameters: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            parameters["factor"] = self.factor
        if self.kind == "llama3":
            parameters["low_freq_factor"] = self.low_factor
            parameters["high_freq_factor"] = self.high_factor
            parameters["original_max_position_embeddings"] = self.original_context
        return parameters

    def table(self, divisors: torch.Tensor | None = None) -> RopeTable:
        """Return the frequencies as a table; `divisors` [dims/2] are a GGUF file's own frequency factors."""
        exponents = torch.arange(0, self.dims, 2, dtype=torch.float32) / self.dims
        inverse = 1.0 / (self.theta**exponents)
        if divisors is not None:
            return RopeTable(inverse / divisors)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._smoothed(inverse)
        return RopeTable(inverse)

    def _smoothed(self, inverse: torch.Tensor) -> torch.Tensor:
        wavelength = 2.0 * math.pi / inverse
        turns = self.original_context / wavelength
        keep = ((turns - self.low_factor) / (self.high_factor - self.low_factor)).clamp(0.0, 1.0)
        return (1.0 - keep) * inverse / self.factor + keep * inverse
