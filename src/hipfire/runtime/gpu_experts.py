"""The experts of a checkpoint on a GPU: packed there, all experts of a projection into one matrix.

This file does not know which experts a model has, nor how kernels use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hipfire.base.errors import UnsupportedError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.stacks import StackPiece
from hipfire.kernels.experts import PackedExperts
from hipfire.kernels.packed import PackedMatrix
from hipfire.layers.weights import ExpertStack, ExpertTensors
from hipfire.quant.packing import PACKINGS, Packing, Take
from hipfire.quant.registry import format_of
from hipfire.runtime.expert_weights import FoundExperts, damaged, find_experts, misfit
from hipfire.runtime.gpu_upload import Upload


def expert_packing(info: TensorInfo) -> Packing | None:
    """Return how the matrices of experts in a stored tensor are packed; None if they cannot be."""
    whole = format_of(info.qtype).has_whole_rows(info.nbytes, *info.rows_cols)
    return PACKINGS.get(info.qtype) if whole else None


def _alike(first: TensorInfo, second: TensorInfo) -> bool:
    """Tell whether two matrices are packed alike and read activations in one basis."""
    some, other = expert_packing(first), expert_packing(second)
    if some is None or other is None or some.layout != other.layout:
        return False
    return format_of(first.qtype).rotated == format_of(second.qtype).rotated


class DeviceExperts:
    """Makes the stacks of a checkpoint on a device.

    `raw` gives the bytes of a stored tensor, uint8 on the CPU; `taker` memory on the device for a name.
    Without `upload` nothing is read.
    """

    def __init__(
        self,
        named: NamedCheckpoint,
        raw: Callable[[str], torch.Tensor],
        taker: Callable[[str], Take],
        upload: Upload | None,
    ) -> None:
        self._named = named
        self._raw = raw
        self._taker = taker
        self._upload = upload

    def stacks(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Return the projections as stacks; UnsupportedError for formats that are not packed."""
        found = find_experts(self._named, projections, _alike)
        return tuple(ExpertStack(each.format, self._stack(each), each.shared) for each in found)

    def _stack(self, found: FoundExperts) -> PackedExperts:
        packing = expert_packing(found.info)
        if packing is None:
            raise UnsupportedError(
                f"experts in {found.format.name} ({found.tensors.name}) have no kernels on a GPU",
                hint="quantize the model, or load it on the CPU",
            )
        rows = found.experts * found.tensors.rows
        matrix = packing.empty(rows, found.tensors.cols, self._taker(found.tensors.name))
        if self._upload is not None:
            for piece in found.pieces:
                own = expert_packing(piece.info)
                assert own is not None  # `find_experts` has seen to it
                self._fill(own, matrix, piece, found.tensors.rows, self._upload)
                self._named.checkpoint.release(piece.info.name)
        return PackedExperts(matrix, found.experts)

    def _fill(
        self, packing: Packing, matrix: PackedMatrix, piece: StackPiece, height: int, upload: Upload
    ) -> None:
        """Pack a piece into the rows of a stack whose experts have `height` rows each."""
        count = piece.experts * piece.rows
        data = self._raw(piece.info.name).view(count, -1)
        whole = piece.rows == height
        first = piece.expert * height + piece.row
        sound = []
        for begin, part in upload.pieces(data):
            if whole:
                sound.append(packing.fill(matrix, first + begin, part))
                continue
            index = torch.arange(begin, begin + part.shape[0], device=part.device)
            rows = first + index // piece.rows * height + index % piece.rows
            sound.append(packing.fill_rows(matrix, rows, part))
        bad = (~torch.cat(sound)).nonzero().flatten().tolist()
        if not bad:
            return
        fmt, cols = format_of(piece.info.qtype), matrix.cols
        if bool(torch.isfinite(fmt.decode(data[bad[0]].contiguous(), 1, cols)).all()):
            raise misfit(piece.info)
        raise damaged(self._named, piece.info, f"holds a value that is not finite in row {bad[0]}")
