"""Weights out of a checkpoint, under canonical names, checked, and decoded once where memory allows.

This file knows checkpoints and formats; it does not know which tensors a model wants or in what order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast

import torch

from hipfire.base.errors import ArtifactError, InternalError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.names import Change, NamedCheckpoint
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.panels import Panels
from hipfire.layers.weights import ExpertStack, ExpertTensors, Joined, Weight, row_order
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of
from hipfire.runtime.expert_weights import HostExperts
from hipfire.runtime.panels import pack, pack_decoded, packer_of, panels_nbytes

# panels: packed for the CPU kernels; decoded: float32 matrices in memory; packed: decoded at every use, small
Residency = Literal["panels", "decoded", "packed"]

# elements decoded at once, so that a large matrix needs little memory besides its result
CHUNK_ELEMENTS = 1 << 22


def mapped_tensor(view: memoryview) -> torch.Tensor:
    """Return the bytes of a mapped view as a uint8 tensor without copying; it must not be written to."""
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns that the buffer is read-only; nothing here writes to weights
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def resident_nbytes(info: TensorInfo, residency: Residency) -> int:
    """Return the bytes of memory that a tensor takes under a residency."""
    if residency == "decoded" or len(info.shape) < 2:
        return 4 * info.numel
    return packed_nbytes(info) if residency == "packed" else panels_nbytes(info)


def packed_nbytes(info: TensorInfo) -> int:
    """Return the bytes that a tensor takes under packed residency: its own, or float32 if packed flat."""
    rows, cols = info.rows_cols
    whole = format_of(info.qtype).has_whole_rows(info.nbytes, rows, cols)
    return info.nbytes if whole else 4 * info.numel


def undo_change(values: torch.Tensor, change: Change) -> torch.Tensor:
    """Return the canonical values of a vector from its stored ones."""
    if change == "minus_one":
        return values - 1.0
    return torch.log(-values) if change == "log_negative" else values


class CheckpointWeights:
    """The `WeightSource` of a checkpoint.

    `heads` and `kv_heads` are those of the model, for sources that order rotary rows in pairs. `used`
    collects the canonical names asked for. Except with `packed` residency the mapped pages are given back
    after use. `engine` packs the panels, which no other residency needs.
    """

    def __init__(
        self,
        named: NamedCheckpoint,
        *,
        heads: int,
        kv_heads: int,
        residency: Residency,
        engine: CpuEngine | None = None,
    ) -> None:
        if residency == "panels" and engine is None:
            raise InternalError("panels are packed by an engine")
        self.named = named
        self.residency = residency
        self._engine = engine
        self._row_order = partial(row_order, heads=heads, kv_heads=kv_heads)

    @property
    def device(self) -> torch.device:
        """Return where the tensors are."""
        return torch.device("cpu")

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint holds a tensor of this canonical name."""
        return self.named.find(name) is not None

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """Return the matrix `name`; ArtifactError if it is missing, of another shape, or not finite."""
        info, change = self._find(name, (rows, cols))
        fmt = format_of(info.qtype)
        flat = mapped_tensor(self.named.checkpoint.raw(info.name))
        if self.residency == "panels" and self._engine is not None:
            panels = self._panels(self._engine, info, change, flat)
            self.named.checkpoint.release(info.name)
            return Weight(fmt, rows, cols, panels=panels)
        if not fmt.has_whole_rows(info.nbytes, rows, cols):
            # blocks of the old flat packing run over row ends: only the whole can be decoded
            whole = self._in_order(self._decode(fmt, info, flat, rows, cols), change, rows)
            self._check_finite(whole, info, fmt, 0)
            return Weight(fmt, rows, cols, resident=whole)
        data = self._in_order(flat.view(rows, -1), change, rows)
        resident = torch.empty(rows, cols) if self.residency == "decoded" else None
        step = max(1, CHUNK_ELEMENTS // max(cols, 1))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            part = self._decode(fmt, info, data[begin:end].flatten(), end - begin, cols)
            self._check_finite(part, info, fmt, begin)
            if resident is not None:
                resident[begin:end] = part
        self.named.checkpoint.release(info.name)
        return Weight(fmt, rows, cols, data=data if resident is None else None, resident=resident)

    def joined(self, parts: Sequence[tuple[str, int]], cols: int) -> Joined:
        """Return matrices that read the same activations, each by itself; raises as `matrix`."""
        return Joined(tuple(self.matrix(name, rows, cols) for name, rows in parts))

    def experts(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Return projections of the same experts, each in one stack; see `WeightSource.experts`."""

        def raw(name: str) -> torch.Tensor:
            return mapped_tensor(self.named.checkpoint.raw(name))

        return HostExperts(self.named, raw, self.residency, self._engine).stacks(projections)

    def _panels(self, engine: CpuEngine, info: TensorInfo, change: Change, data: torch.Tensor) -> Panels:
        """Pack a matrix as it is stored where its format can be packed, else as float32."""
        rows, cols = info.rows_cols
        fmt = format_of(info.qtype)
        order = self._row_order(change, rows)
        packer = packer_of(fmt, info.nbytes, rows, cols)
        if packer is not None:
            panels, damaged = pack(
                engine,
                packer,
                data,
                rows,
                cols,
                order,
                packed=partial(self.named.checkpoint.release, info.name),
            )
            if damaged is not None:
                row, block = divmod(damaged, -(-cols // fmt.group))
                raise self._not_finite(info, row, block)
            if panels is not None:
                return panels
        whole = fmt.has_whole_rows(info.nbytes, rows, cols)
        by_row = data.view(rows, -1) if whole else None
        decoded = None if whole else self._decode(fmt, info, data, rows, cols)

        def decode(first: int, last: int) -> torch.Tensor:
            wanted = torch.arange(first, last) if order is None else order[first:last]
            if by_row is None or decoded is not None:
                part = cast(torch.Tensor, decoded)[wanted]
            else:
                part = self._decode(fmt, info, by_row[wanted].flatten(), last - first, cols)
            self._check_finite(part, info, fmt, first)
            return part

        return pack_decoded(engine, decode, rows, cols)

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """Return the small tensor `name` as float32 of this shape; raises as `matrix`."""
        info, change = self._find(name, shape)
        fmt = format_of(info.qtype)
        data = mapped_tensor(self.named.checkpoint.raw(info.name))
        values = self._named_fault(info, lambda: fmt.dense(data, 1, info.numel))
        values = undo_change(values, change)
        self._check_finite(values, info, fmt, 0)
        values = values.view(shape).clone()
        self.named.checkpoint.release(info.name)
        return values

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[TensorInfo, Change]:
        stored = self.named.require(name, shape)
        return stored.info, stored.change

    def _decode(
        self, fmt: WeightFormat, info: TensorInfo, data: torch.Tensor, rows: int, cols: int
    ) -> torch.Tensor:
        return self._named_fault(info, lambda: fmt.decode(data, rows, cols))

    def _named_fault(self, info: TensorInfo, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
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

    def _in_order(self, data: torch.Tensor, change: Change, rows: int) -> torch.Tensor:
        order = self._row_order(change, rows)
        return data if order is None else data.index_select(0, order)

    def _check_finite(self, values: torch.Tensor, info: TensorInfo, fmt: WeightFormat, row: int) -> None:
        if torch.isfinite(values).all():
            return
        position = int((~torch.isfinite(values)).flatten().nonzero()[0])
        bad_row, column = divmod(position, values.shape[-1])
        raise self._not_finite(info, row + bad_row, column // fmt.group)

    def _not_finite(self, info: TensorInfo, row: int, block: int) -> ArtifactError:
        return ArtifactError(
            f"holds a value that is not finite in row {row}, block {block}",
            path=self.named.checkpoint.path,
            field=f"tensor {info.name}",
            hint="the file is damaged; download or convert it again",
        )
