"""Median, mean, extremes and spread of repeated figures. This file does not know what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hipfire.base.errors import InternalError, ValidationError


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of `samples`, in their unit; `stdev` (of a sample, n - 1) is None for a single one."""

    samples: tuple[float, ...]
    median: float
    mean: float
    low: float
    high: float
    stdev: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the statistics and every sample as plain JSON values."""
        return {
            "median": self.median,
            "mean": self.mean,
            "min": self.low,
            "max": self.high,
            "stdev": self.stdev,
            "samples": list(self.samples),
        }


def summarize(samples: Sequence[float]) -> Summary:
    """Return the statistics of at least one finite figure; ValidationError for anything else."""
    if not samples:
        raise ValidationError("there is nothing to summarize", hint="measure at least once")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValidationError("a figure to summarize is NaN or infinite")
    return Summary(
        samples=tuple(samples),
        median=statistics.median(samples),
        mean=statistics.fmean(samples),
        low=min(samples),
        high=max(samples),
        stdev=statistics.stdev(samples) if len(samples) > 1 else None,
    )


def rates(count: int, seconds: Sequence[float]) -> Summary:
    """Return the statistics of `count` things per second, one rate for each of the wall times `seconds`.

    Raises InternalError for a time that is not above zero, which only a broken clock gives.
    """
    if any(not each > 0 for each in seconds):
        raise InternalError("the clock did not move on while something was measured")
    return summarize([count / each for each in seconds])
