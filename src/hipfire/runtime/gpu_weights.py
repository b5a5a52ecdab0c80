"""Weights out of a checkpoint on a GPU: packed there for its kernels, or as floats where no packing exists.

The same source also describes weights without any memory, for rehearsals. This file knows checkpoints and
formats; it does not know which tensors a model wants or in what order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.names import Change, NamedCheckpoint
from hipfire.device.pool import ALIGNMENT
from hipfire.kernels.packed import PackedMatrix
from hipfire.layers.weights import (
    ExpertStack,
    ExpertTensors,
    Joined,
    Weight,
    row_order,
    split_matrix,
)
from hipfire.quant.format import WeightFormat
from hipfire.quant.packing import PACKINGS, Packing
from hipfire.quant.registry import format_of
from hipfire.runtime.gpu_experts import DeviceExperts, expert_packing
from hipfire.runtime.gpu_upload import Upload
from hipfire.runtime.weights import mapped_tensor, undo_change

# a name for messages and a number of bytes -> uint8 memory of at least that size, aligned
Take = Callable[[str, int], torch.Tensor]
# decoded at a time where a format has no packing, in weights
DECODED_ELEMENTS = 1 << 22


def packing_of(info: TensorInfo) -> Packing | None:
    """Return how a matrix is packed; None if it is kept as floats."""
    rows, cols = info.rows_cols
    packing = PACKINGS.get(info.qtype)
    whole = format_of(info.qtype).has_whole_rows(info.nbytes, rows, cols)
    return packing if whole and len(info.shape) == 2 else None


def dense_type(info: TensorInfo) -> torch.dtype:
    """Return the type that a matrix without packing is kept in: its own if it is one of 16 bits."""
    name = format_of(info.qtype).name
    return {"F16": torch.float16, "GGUF_F16": torch.float16, "F32": torch.float32}.get(
        name, torch.float32 if name == "GGUF_F32" else torch.bfloat16
    )


def device_nbytes(info: TensorInfo) -> int:
    """Return the bytes that a tensor takes on a GPU."""
    if len(info.shape) < 2:
        return _aligned(4 * info.numel)
    packing, (rows, cols) = packing_of(info), info.rows_cols
    if len(info.shape) == 3:
        # the weights of a convolution are of three dimensions too, and kept as a vector is
        packing = expert_packing(info)
        if packing is None:
            return _aligned(4 * info.numel)
    if packing is None:
        return _aligned(info.numel * dense_type(info).itemsize)
    sizes: list[int] = []

    def note(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes.append(_aligned(torch.Size(shape).numel() * dtype.itemsize))
        return torch.empty(0, dtype=dtype, device="meta")

    packing.empty(rows, cols, note)
    return sum(sizes)


class UnprovenError(Exception):
    """A matrix that was packed on trust does not fit its layout, or is not finite: nobody knows which."""


class GpuWeights:
    """The `WeightSource` of a checkpoint on a device.

    `take` gives memory there. Without `upload` nothing is read: tensors have their shapes and no contents.
    `heads` and `kv_heads` are those of the model, for sources that order rotary rows in pairs. A `trusting`
    source does not wait for each matrix to be packed: whether all could be is told at the end, by `prove`.
    """

    def __init__(
        self,
        named: NamedCheckpoint,
        *,
        heads: int,
        kv_heads: int,
        device: torch.device,
        take: Take,
        upload: Upload | None,
        trusting: bool = False,
    ) -> None:
        self.named = named
        self._device = device
        self._take = take
        self._upload = upload
        self._trusting = trusting
        self._unproven: list[torch.Tensor] = []
        self._row_order = partial(row_order, heads=heads, kv_heads=kv_heads)

    @property
    def device(self) -> torch.device:
        """Return where the tensors are."""
        return self._device

    def prove(self) -> None:
        """Wait for what was packed on trust; UnprovenError unless all of it fits its layout and is finite."""
        if self._unproven and not bool(torch.cat(self._unproven).all()):
            raise UnprovenError

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint holds a tensor of this canonical name."""
        return self.named.find(name) is not None

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """Return the matrix `name`; ArtifactError if it is missing, of another shape, or not finite."""
        info, change = self._find(name, (rows, cols))
        fmt, packing = format_of(info.qtype), packing_of(info)
        if packing is not None:
            matrix = packing.empty(rows, cols, self._taker(name))
            if self._fill(packing, matrix, 0, info, change):
                return Weight(fmt, rows, cols, packed=matrix)
        return Weight(fmt, rows, cols, resident=self._dense(info, change))

    def joined(self, parts: Sequence[tuple[str, int]], cols: int) -> Joined:
        """Return matrices that read the same activations, as one where their formats allow; as `matrix`."""
        found = [self._find(name, (rows, cols)) for name, rows in parts]
        packings = [packing_of(info) for info, _ in found]
        formats = [format_of(info.qtype) for info, _ in found]
        first = packings[0]
        alike = len({fmt.rotated for fmt in formats}) == 1
        if first is None or not alike or any(p is None or p.layout != first.layout for p in packings):
            return Joined(tuple(self.matrix(name, rows, cols) for name, rows in parts))
        counts = [rows for _, rows in parts]
        whole = first.empty(sum(counts), cols, self._taker(" + ".join(name for name, _ in parts)))
        start = 0
        for (info, change), packing, rows in zip(found, packings, counts, strict=True):
            if packing is None or not self._fill(packing, whole, start, info, change):
                return Joined(tuple(self.matrix(name, rows, cols) for name, rows in parts))
            start += rows
        return split_matrix(whole, formats[0], counts)

    def experts(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Return projections of the same experts, each in one stack; see `WeightSource.experts`."""

        def raw(name: str) -> torch.Tensor:
            return mapped_tensor(self.named.checkpoint.raw(name))

        return DeviceExperts(self.named, raw, self._taker, self._upload).stacks(projections)

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """Return the small tensor `name` as float32 of this shape; raises as `matrix`."""
        info, change = self._find(name, shape)
        target = self._taker(name)(shape, torch.float32)
        if self._upload is not None:
            data = mapped_tensor(self.named.checkpoint.raw(info.name))
            values = self._named(info, lambda: format_of(info.qtype).dense(data, 1, info.numel))
            values = undo_change(values, change)
            if not bool(torch.isfinite(values).all()):
                raise self._damaged(info, 0)
            target.copy_(values.view(shape))
            self._upload.passed(info.nbytes)
        return target

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[TensorInfo, Change]:
        stored = self.named.require(name, shape)
        return stored.info, stored.change

    def _taker(self, name: str) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
        def take(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            return self._take(name, _aligned(nbytes))[:nbytes].view(dtype).view(shape)

        return take

    def _fill(
        self, packing: Packing, target: PackedMatrix, first: int, info: TensorInfo, change: Change
    ) -> bool:
        """Pack a matrix into rows of `target`; False if its scales do not fit the layout."""
        if self._upload is None:
            return True
        data = self._rows(info, change)
        sound = [packing.fill(target, first + begin, part) for begin, part in self._upload.pieces(data)]
        self.named.checkpoint.release(info.name)
        if self._trusting:
            self._unproven += sound
            return True
        bad = (~torch.cat(sound)).nonzero().flatten().tolist()
        if not bad:
            return True
        fmt, (_, cols) = format_of(info.qtype), info.rows_cols
        row = bad[0]
        if bool(torch.isfinite(fmt.decode(data[row].contiguous(), 1, cols)).all()):
            return False
        raise self._damaged(info, row)

    def _rows(self, info: TensorInfo, change: Change) -> torch.Tensor:
        """Return the stored rows, uint8 [rows, bytes of a row], in the order that the model wants."""
        rows = info.rows_cols[0]
        data = mapped_tensor(self.named.checkpoint.raw(info.name)).view(rows, -1)
        order = self._row_order(change, rows)
        return data if order is None else data.index_select(0, order)

    def _dense(self, info: TensorInfo, change: Change) -> torch.Tensor:
        rows, cols = info.rows_cols
        fmt = format_of(info.qtype)
        target = self._taker(info.name)((rows, cols), dense_type(info))
        if self._upload is None:
            return target
        flat = mapped_tensor(self.named.checkpoint.raw(info.name))
        order = self._row_order(change, rows)
        order = torch.arange(rows) if order is None else order
        if not fmt.has_whole_rows(info.nbytes, rows, cols):
            # blocks of the old flat packing run over row ends: only the whole can be decoded
            self._store(target, 0, self._decoded(info, fmt, flat, rows)[order], info)
            self._upload.passed(info.nbytes)
        else:
            by_row = flat.view(rows, -1)
            step = max(1, DECODED_ELEMENTS // max(1, cols))
            for first in range(0, rows, step):
                wanted = order[first : first + step]
                part = self._decoded(info, fmt, by_row[wanted].flatten(), len(wanted))
                self._store(target, first, part, info)
                self._upload.passed(len(wanted) * by_row.shape[1])
        self.named.checkpoint.release(info.name)
        return target

    def _store(self, target: torch.Tensor, first: int, part: torch.Tensor, info: TensorInfo) -> None:
        finite = torch.isfinite(part).all(dim=1)
        if not bool(finite.all()):
            raise self._damaged(info, first + int((~finite).nonzero()[0]))
        target[first : first + len(part)].copy_(part.to(target.dtype))

    def _decoded(self, info: TensorInfo, fmt: WeightFormat, data: torch.Tensor, rows: int) -> torch.Tensor:
        return self._named(info, lambda: fmt.decode(data, rows, info.rows_cols[1]))

    def _named(self, info: TensorInfo, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `decode`; a format knows what is wrong with the bytes, but not whose they are."""
        try:
            return decode()
        except ArtifactError as error:
            raise ArtifactError(
                error.message,
                path=self.named.checkpoint.path,
                field=f"tensor {info.name}",
                hint=error.hint or "the file is damaged; download or convert it again",
            ) from error

    def _damaged(self, info: TensorInfo, row: int) -> ArtifactError:
        return ArtifactError(
            f"holds a value that is not finite in row {row}",
            path=self.named.checkpoint.path,
            field=f"tensor {info.name}",
            hint="the file is damaged; download or convert it again",
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
