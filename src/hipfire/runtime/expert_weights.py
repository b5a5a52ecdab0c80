"""The experts of a checkpoint: which stored tensors make up their stacks, and the stacks in a CPU's memory.

This file does not know which experts a model has, nor how kernels use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hipfire.base.errors import ArtifactError, InternalError, UnsupportedError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.stacks import StackPiece
from hipfire.kernels.cpu.engine import CpuEngine, aligned_bytes
from hipfire.kernels.cpu.pack_kernels import MISFIT, SOUND
from hipfire.kernels.experts import Experts, FloatExperts, PanelExperts, StoredExperts
from hipfire.layers.weights import ExpertStack, ExpertTensors
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of
from hipfire.runtime.panels import PLAIN, pack_floats, pack_rows, packer_of

Residency = Literal["panels", "decoded", "packed"]
# a stored matrix of a stack, and one of the shared expert -> whether both can be in one stack
Alike = Callable[[TensorInfo, TensorInfo], bool]


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """The stored tensors of one projection, all of one format; those of a shared expert come last."""

    tensors: ExpertTensors
    pieces: tuple[StackPiece, ...]
    shared: bool

    @property
    def info(self) -> TensorInfo:
        """Return the first stored tensor."""
        return self.pieces[0].info

    @property
    def format(self) -> WeightFormat:
        """Return the format of the experts."""
        return format_of(self.info.qtype)

    @property
    def experts(self) -> int:
        """Return the number of experts, a shared one in the stack included."""
        return self.tensors.experts + self.shared


def find_experts(
    named: NamedCheckpoint, projections: Sequence[ExpertTensors], alike: Alike
) -> list[FoundExperts]:
    """Return where projections are stored.

    Raises ArtifactError for what is missing or has another shape, UnsupportedError for experts of a
    projection that differ in their formats.
    """
    stacks = [_pieces(named, tensors) for tensors in projections]
    added = [_shared_pieces(named, tensors) for tensors in projections]
    together = all(
        pieces and all(alike(stack[0].info, piece.info) for piece in pieces)
        for stack, pieces in zip(stacks, added, strict=True)
    )
    return [
        FoundExperts(tensors, (*stack, *(pieces if together else ())), together)
        for tensors, stack, pieces in zip(projections, stacks, added, strict=True)
    ]


def _pieces(named: NamedCheckpoint, tensors: ExpertTensors) -> tuple[StackPiece, ...]:
    pieces = named.require(tensors.name, (tensors.experts, tensors.rows, tensors.cols)).pieces
    if not pieces:
        raise InternalError(f"{tensors.name} has no rule that says how stacks are stored")
    formats = sorted({format_of(piece.info.qtype).name for piece in pieces})
    if len(formats) > 1:
        raise UnsupportedError(
            f"the experts of {tensors.name} have the formats {', '.join(formats)}, but kernels take one",
            hint="convert the model again with one format for all experts of a layer",
        )
    for piece in pieces:
        info = piece.info
        if not format_of(info.qtype).has_whole_rows(info.nbytes, *info.rows_cols):
            raise UnsupportedError(
                f"blocks of {info.name} run over the ends of rows, which kernels for experts do not take",
                hint="convert the model again",
            )
    return pieces


def _shared_pieces(named: NamedCheckpoint, tensors: ExpertTensors) -> tuple[StackPiece, ...]:
    rows = tensors.rows // tensors.sections
    return tuple(
        StackPiece(named.require(name, (rows, tensors.cols)).info, tensors.experts, 1, number * rows, rows)
        for number, name in enumerate(tensors.shared)
    )


def same_format(first: TensorInfo, second: TensorInfo) -> bool:
    """Tell whether two matrices have one format and whole rows."""
    whole = format_of(second.qtype).has_whole_rows(second.nbytes, *second.rows_cols)
    return first.qtype == second.qtype and whole


class HostExperts:
    """Makes the stacks of a checkpoint in a CPU's memory; `raw` gives the bytes of a stored tensor, uint8."""

    def __init__(
        self,
        named: NamedCheckpoint,
        raw: Callable[[str], torch.Tensor],
        residency: Residency,
        engine: CpuEngine | None,
    ) -> None:
        self._named = named
        self._raw = raw
        self._residency = residency
        self._engine = engine

    def stacks(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Return the projections as stacks."""
        found = find_experts(self._named, projections, same_format)
        return tuple(ExpertStack(each.format, self._stack(each), each.shared) for each in found)

    def _stack(self, found: FoundExperts) -> Experts:
        if self._residency == "packed":
            return self._stored(found)
        if self._residency == "decoded":
            return self._decoded(found)
        return self._panels(found)

    def _stored(self, found: FoundExperts) -> StoredExperts:
        parts: list[list[torch.Tensor]] = [[] for _ in range(found.experts)]
        for piece in found.pieces:
            data = self._raw(piece.info.name).view(piece.experts, piece.rows, -1)
            for index in range(piece.experts):
                parts[piece.expert + index].append(data[index])
                self._decode(found.format, piece, data[index])
        held = tuple(tuple(part) for part in parts)
        return StoredExperts(held, found.tensors.cols, found.format.decode)

    def _decoded(self, found: FoundExperts) -> FloatExperts:
        tensors = found.tensors
        values = torch.empty(found.experts, tensors.rows, tensors.cols)
        for piece in found.pieces:
            data = self._raw(piece.info.name).view(piece.experts, piece.rows, -1)
            for index in range(piece.experts):
                taken = values[piece.expert + index, piece.row : piece.row + piece.rows]
                taken.copy_(self._decode(found.format, piece, data[index]))
            self._named.checkpoint.release(piece.info.name)
        return FloatExperts(values)

    def _panels(self, found: FoundExperts) -> PanelExperts:
        if self._engine is None:
            raise InternalError("panels are packed by an engine")
        tensors, info = found.tensors, found.info
        packer = packer_of(found.format, info.nbytes, *info.rows_cols)
        layout = (packer or PLAIN).layout
        empty = PanelExperts(
            layout, found.experts, tensors.sections, tensors.rows, tensors.cols, torch.empty(0)
        )
        data = aligned_bytes(found.experts * empty.expert_bytes)
        stack = PanelExperts(layout, found.experts, tensors.sections, tensors.rows, tensors.cols, data)
        height = tensors.rows // tensors.sections
        for piece in found.pieces:
            _check_sections(piece, height)
            stored = self._raw(piece.info.name).view(piece.experts, piece.rows // height, height, -1)
            for index in range(piece.experts):
                for number in range(piece.rows // height):
                    rows = stored[index, number]
                    target = stack.section(piece.expert + index, piece.row // height + number)
                    if packer is None:
                        pack_floats(self._engine, self._decode(found.format, piece, rows), target)
                        continue
                    fault = pack_rows(self._engine, packer, rows, tensors.cols, target)
                    if fault != SOUND:
                        block = index * piece.rows + number * height, fault
                        raise self._fault(found, piece, *block)
            self._named.checkpoint.release(piece.info.name)
        return stack

    def _decode(self, fmt: WeightFormat, piece: StackPiece, rows: torch.Tensor) -> torch.Tensor:
        """Return stored rows as float32; ArtifactError names the tensor where they are damaged."""
        try:
            values = fmt.decode(rows.flatten(), rows.shape[0], piece.info.shape[-1])
        except ArtifactError as error:
            raise self._damaged(piece.info, error.message) from error
        if not bool(torch.isfinite(values).all()):
            raise self._damaged(piece.info, "holds a value that is not finite")
        return values

    def _fault(self, found: FoundExperts, piece: StackPiece, row: int, fault: int) -> Exception:
        if fault == MISFIT:
            return misfit(piece.info)
        blocks = -(-found.tensors.cols // found.format.group)
        place = f"row {row + fault // blocks}, block {fault % blocks}"
        return self._damaged(piece.info, f"holds a value that is not finite in {place}")

    def _damaged(self, info: TensorInfo, problem: str) -> ArtifactError:
        return damaged(self._named, info, problem)


def _check_sections(piece: StackPiece, height: int) -> None:
    if piece.row % height or piece.rows % height:
        raise UnsupportedError(
            f"{piece.info.name} holds {piece.rows} rows of every expert, not whole sections of {height}",
            hint="convert the model again",
        )


def damaged(named: NamedCheckpoint, info: TensorInfo, problem: str) -> ArtifactError:
    """Return the error for a tensor whose bytes cannot be used."""
    return ArtifactError(
        problem,
        path=named.checkpoint.path,
        field=f"tensor {info.name}",
        hint="the file is damaged; download or convert it again",
    )


def misfit(info: TensorInfo) -> UnsupportedError:
    """Return the error for experts whose scales their kernels' layout cannot hold."""
    return UnsupportedError(
        f"the scales of {info.name} are too large for the kernels of its format",
        hint="convert the model to another format",
    )
