"""What a quantization did, in figures: tensors, bytes, bits per weight and error of every format."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hipfire.base.qtypes import qtype_name


class ProgressSink(Protocol):
    """Receives the progress of a quantization; the command line draws a bar from it."""

    def start(self, total_bytes: int, tensors: int) -> None:
        """Work begins: `total_bytes` of source data in `tensors` tensors."""

    def tensor(self, name: str, nbytes: int) -> None:
        """`nbytes` more of the source data of tensor `name` are done."""

    def done(self) -> None:
        """The work ended, well or not."""


class NoProgress:
    """A `ProgressSink` that shows nothing."""

    def start(self, total_bytes: int, tensors: int) -> None:
        """Show nothing."""

    def tensor(self, name: str, nbytes: int) -> None:
        """Show nothing."""

    def done(self) -> None:
        """Show nothing."""


@dataclass(slots=True)
class FormatFigures:
    """Sums over all tensors of one format; errors compare with the source's own values."""

    tensors: int = 0
    weights: int = 0
    nbytes: int = 0
    squared_error: float = 0.0
    squared_source: float = 0.0

    @property
    def bits_per_weight(self) -> float:
        """Return stored bits per weight."""
        return 8.0 * self.nbytes / self.weights if self.weights else 0.0

    @property
    def relative_rms(self) -> float:
        """Return the relative RMS error, 0 where nothing changed."""
        return math.sqrt(self.squared_error / self.squared_source) if self.squared_source else 0.0


@dataclass(slots=True)
class QuantizeReport:
    """The result of one run; `skipped` names source tensors that the model has no use for.

    `mtp` names those of a head that predicts further tokens; they are among the skipped, unless `keeps_mtp`.
    """

    source: Path
    output: Path
    format: str
    seconds: float = 0.0
    file_bytes: int = 0
    formats: dict[int, FormatFigures] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    mtp: list[str] = field(default_factory=list)
    keeps_mtp: bool = False

    @property
    def total(self) -> FormatFigures:
        """Return the sums over all formats."""
        total = FormatFigures()
        for figures in self.formats.values():
            total.tensors += figures.tensors
            total.weights += figures.weights
            total.nbytes += figures.nbytes
            total.squared_error += figures.squared_error
            total.squared_source += figures.squared_source
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "source": str(self.source),
            "output": str(self.output),
            "format": self.format,
            "seconds": round(self.seconds, 3),
            "file_bytes": self.file_bytes,
            "formats": {qtype_name(q): _figures(self.formats[q]) for q in sorted(self.formats)},
            "total": _figures(self.total),
            "skipped": self.skipped,
            "mtp": {"tensors": self.mtp, "kept": self.keeps_mtp},
        }


def _figures(figures: FormatFigures) -> dict[str, Any]:
    return {
        "tensors": figures.tensors,
        "weights": figures.weights,
        "bytes": figures.nbytes,
        "bits_per_weight": round(figures.bits_per_weight, 4),
        "relative_rms": figures.relative_rms,
    }
