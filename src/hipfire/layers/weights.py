"""Weights as layers hold them: packed for the kernels of a device, or as bytes of a file, or decoded.

Layers and models ask a `WeightSource` for matrices and vectors by canonical name; where the bytes come
from, and whether they are decoded once or at every use, is the loader's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.collective import SPREAD_OPS, Spread
from hipfire.kernels.elementwise import GATHER_ROWS
from hipfire.kernels.experts import Experts
from hipfire.kernels.fwht import INVERSE_FWHT
from hipfire.kernels.launch import Launcher
from hipfire.kernels.linear import DEQUANTIZE, LINEAR
from hipfire.kernels.packed import PACKED_LINEAR, PACKED_SELECT, PackedMatrix
from hipfire.kernels.panels import PANEL_LINEAR, PANEL_SELECT, Panels
from hipfire.quant.format import WeightFormat


@dataclass(eq=False)
class Weight:
    """A [rows, cols] matrix in its format.

    It holds one of four, all in the stored basis (rotated formats stay rotated): `panels`, packed for the
    CPU kernels; `packed`, packed for the GPU kernels; `data`, uint8 [rows, bytes of a row] in the row-safe
    layout, decoded at every use; or `resident`, a matrix of a floating type, float32 where it was decoded at
    load. With `spread` it is one process's part of a matrix, and products are those of the whole.
    """

    format: WeightFormat
    rows: int
    cols: int
    data: torch.Tensor | None = None
    resident: torch.Tensor | None = None
    panels: Panels | None = None
    packed: PackedMatrix | None = None
    spread: Spread | None = None

    def __post_init__(self) -> None:
        held = [value is not None for value in (self.data, self.resident, self.panels, self.packed)]
        if sum(held) != 1:
            raise InternalError("a weight holds panels, a packed matrix, packed bytes or a decoded matrix")

    def product(self, launcher: Launcher, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T, float32 [T, rows], for x [T, cols] in the stored basis.

        Kernels for packed matrices may return bfloat16 in prefill steps.
        """
        part = self._own_product(launcher, x)
        if self.spread is None:
            return part
        return cast(torch.Tensor, launcher.run(SPREAD_OPS[self.spread.how], part, self.spread.group))

    def _own_product(self, launcher: Launcher, x: torch.Tensor) -> torch.Tensor:
        if self.panels is not None:
            return cast(torch.Tensor, launcher.run(PANEL_LINEAR, x, self.panels))
        if self.packed is not None:
            return cast(torch.Tensor, launcher.run(PACKED_LINEAR, x, self.packed))
        return cast(torch.Tensor, launcher.run(LINEAR, x, self.matrix(launcher)))

    def matrix(self, launcher: Launcher) -> torch.Tensor:
        """Return the matrix [rows, cols] in the stored basis, decoding it now unless it is resident."""
        if self.data is None:
            return self._resident()
        return self._decoded(launcher, self.data)

    def select(self, launcher: Launcher, rows: torch.Tensor) -> torch.Tensor:
        """Return the given rows [T] in the original basis: [T, cols], float32 or the type of `resident`."""
        if self.panels is not None:
            picked = launcher.run(PANEL_SELECT, self.panels, rows)
        elif self.packed is not None:
            picked = launcher.run(PACKED_SELECT, self.packed, rows)
        elif self.data is None:
            picked = launcher.run(GATHER_ROWS, self._resident(), rows)
        else:
            picked = self._decoded(launcher, launcher.run(GATHER_ROWS, self.data, rows))
        result: torch.Tensor = launcher.run(INVERSE_FWHT, picked) if self.format.rotated else picked
        return result

    def _resident(self) -> torch.Tensor:
        if self.resident is None:
            raise InternalError("a weight lost its decoded matrix")
        return self.resident

    def _decoded(self, launcher: Launcher, packed: torch.Tensor) -> torch.Tensor:
        rows = packed.shape[0]
        decoded: torch.Tensor = launcher.run(
            DEQUANTIZE, packed.flatten(), rows, self.cols, self.format.decode
        )
        return decoded


@dataclass(eq=False)
class Joined:
    """Several matrices that read the same activations, in their order.

    With `matrix` they are also there as one whole, their rows one below the other and all in one basis; the
    parts are views of it then.
    """

    parts: tuple[Weight, ...]
    matrix: PackedMatrix | None = None

    def __post_init__(self) -> None:
        if self.matrix is None:
            return
        rows = sum(part.rows for part in self.parts)
        if rows != self.matrix.rows or len({part.format.rotated for part in self.parts}) != 1:
            raise InternalError("joined weights are not the parts of their matrix")

    @property
    def rotated(self) -> bool:
        """Tell whether any of them reads activations in the basis of rotated weights."""
        return any(part.format.rotated for part in self.parts)


def split_matrix(matrix: PackedMatrix, fmt: WeightFormat, rows: Sequence[int]) -> Joined:
    """Return a packed matrix as the whole of parts that have so many `rows` each, without copying.

    Raises InternalError unless the rows add up.
    """
    parts, first = [], 0
    for count in rows:
        taken = slice(first, first + count)
        part = PackedMatrix(
            matrix.layout,
            count,
            matrix.cols,
            matrix.codes[taken],
            matrix.scales[taken],
            None if matrix.minima is None else matrix.minima[taken],
            None if matrix.high is None else matrix.high[taken],
        )
        parts.append(Weight(fmt, count, matrix.cols, packed=part))
        first += count
    return Joined(tuple(parts), matrix)


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """One projection of all experts: the canonical tensor `name` of [experts, rows, cols].

    An expert's rows are `sections` of equal length, one below the other, such as gate and up. `shared` names
    the matrices of the same sections of a shared expert of equal size, if there is one.
    """

    name: str
    experts: int
    rows: int
    cols: int
    sections: int = 1
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """One projection of all experts, in the stored basis of its format (rotated formats stay rotated).

    With `shared` the shared expert is the last of the stack.
    """

    format: WeightFormat
    stack: Experts
    shared: bool = False

    @property
    def rotated(self) -> bool:
        """Tell whether products are made in the basis of rotated weights."""
        return self.format.rotated


class WeightSource(Protocol):
    """Where a model gets its tensors, under canonical names, all on one device."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """Return the matrix `name`; ArtifactError if it is missing or not [rows, cols]."""

    def joined(self, parts: Sequence[tuple[str, int]], cols: int) -> Joined:
        """Return matrices (name, rows) that read the same activations [T, cols]; raises as `matrix`."""

    def experts(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Return projections of the same experts, each in one stack; raises as `matrix`.

        The shared expert is in all of the stacks, or in none where its formats are not theirs. Raises
        UnsupportedError where the experts of a projection differ in their formats, or have one that this
        device's kernels for experts do not take.
        """

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """Return the small tensor `name` as float32 of this shape; raises as `matrix`."""

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint holds a tensor of this canonical name."""


def row_order(change: str, rows: int, *, heads: int, kv_heads: int) -> torch.Tensor | None:
    """Return the row indices [rows] that undo a matrix's `Change`; None where its rows are in order."""
    if change == "gate_rows":
        return gate_row_order(rows, heads)
    if change in ("q_rows", "k_rows"):
        return rope_row_order(rows, heads if change == "q_rows" else kv_heads)
    return None


def gate_row_order(rows: int, heads: int) -> torch.Tensor:
    """Return the row indices [rows] that put the query rows of all heads before the gate rows of all heads.

    Checkpoints store the queries of a head and then its gates, head by head.
    """
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(0, 1).reshape(-1)


def rope_row_order(rows: int, heads: int) -> torch.Tensor:
    """Return the row indices [rows] that turn interleaved rotary rows into half-split ones.

    GGUF files of the llama architecture store row 2 j + p of a head where Hugging Face stores row
    j + p * head_dim / 2 (p = 0, 1); indexing the former by this gives the latter.
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
