"""From the blocks of files to packed matrices of GPU kernels, on the device that holds the bytes.

Codes keep their values and rotated weights stay rotated. Only the scales and minima of K formats change:
they are products of two numbers of the file, and rounded to float16. Formats without an entry here are kept
as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hipfire.base.qtypes import BLOCKS, Block, QType
from hipfire.kernels.packed import PACKED_LAYOUTS, UNIT, PackedLayout, PackedMatrix, unit_count
from hipfire.quant.bitpack import UNPACK
from hipfire.quant.ggml import bit_planes, nibble_runs, six_bit_scales
from hipfire.quant.scalar import f16_column, from_bytes

# codes unpacked at a time, a byte each: temporaries are a few times as large; more where nothing is unpacked
_CHUNK = 1 << 24
_PAIRED_CHUNK = 1 << 26


class Parts(NamedTuple):
    """What blocks hold: codes uint8 [n, elements]; scales and minima floating [n, groups of a block].

    With `paired`, codes are of four bits and lie two to a byte, the even one low: [n, elements / 2].
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    paired: bool = False


Split = Callable[[Tensor], Parts]
# a shape and a type -> memory
Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class Packing:
    """How matrices of one format, stored row by row in blocks, are packed."""

    layout: PackedLayout
    block: Block
    split: Split

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a packed [rows, cols] matrix."""
        return self.layout.nbytes(rows, cols)

    def empty(self, rows: int, cols: int, take: Take) -> PackedMatrix:
        """Return a matrix to be filled, in memory that `take` gives for a shape and a type."""
        layout, units, groups = self.layout, unit_count(cols), -(-cols // self.layout.group)
        planes = (rows, 2, 4, 4 * units) if layout.bits == 8 else (rows, 4, 4 * units)
        return PackedMatrix(
            layout,
            rows,
            cols,
            take(planes, torch.uint8),
            take((rows, groups), layout.scale_type),
            take((rows, groups), layout.scale_type) if layout.minimum else None,
            take((rows, 4, 2 * units), torch.uint8) if layout.bits == 6 else None,
        )

    def fill(self, target: PackedMatrix, first: int, data: Tensor) -> Tensor:
        """Pack uint8 `data` [rows, bytes of a row] into the rows of `target` from `first` on.

        Returns a bool [rows]: whether all scales and minima of a row are finite, as stored in the target.
        """
        sound = torch.empty(data.shape[0], dtype=torch.bool, device=data.device)
        for taken in self._chunks(target, data):
            rows = slice(first + taken.start, first + taken.stop)
            sound[taken] = self._fill(target, rows, data[taken])
        return sound

    def fill_rows(self, target: PackedMatrix, rows: Tensor, data: Tensor) -> Tensor:
        """Pack uint8 `data` [n, bytes of a row] into the given rows, int64 [n], of `target`; as `fill`."""
        sound = torch.empty(data.shape[0], dtype=torch.bool, device=data.device)
        for taken in self._chunks(target, data):
            sound[taken] = self._fill(target, rows[taken], data[taken])
        return sound

    def _chunks(self, target: PackedMatrix, data: Tensor) -> Iterator[slice]:
        chunk = _PAIRED_CHUNK if self.split in _PAIRED else _CHUNK
        step = max(1, chunk // max(1, target.cols))
        for begin in range(0, data.shape[0], step):
            yield slice(begin, min(begin + step, data.shape[0]))

    def _fill(self, target: PackedMatrix, taken: slice | Tensor, data: Tensor) -> Tensor:
        rows, layout = data.shape[0], self.layout
        parts = self.split(data.reshape(-1, self.block.nbytes))
        if parts.paired:
            # bytes are as the target wants them: only the order of words is another
            words = parts.codes.reshape(rows, -1)[:, : target.units * UNIT // 2].view(torch.int32)
            ordered = words.view(rows, target.units, 4).transpose(1, 2)
            target.codes.view(torch.int32)[taken] = ordered.reshape(rows, 4, -1)
        else:
            self._fill_codes(target, taken, parts.codes, rows)
        groups = target.scales.shape[1]
        target.scales[taken] = parts.scales.reshape(rows, -1)[:, :groups].to(layout.scale_type)
        # a sum is finite if all that it adds up is
        total = target.scales[taken].sum(dim=1, dtype=torch.float32)
        if target.minima is not None and parts.minima is not None:
            target.minima[taken] = parts.minima.reshape(rows, -1)[:, :groups].to(layout.scale_type)
            total += target.minima[taken].sum(dim=1, dtype=torch.float32)
        return torch.isfinite(total)

    def _fill_codes(self, target: PackedMatrix, taken: slice | Tensor, codes: Tensor, rows: int) -> None:
        codes = codes.reshape(rows, -1)[:, : target.units * UNIT]
        # [rows, unit, word, byte, parity] -> [rows, parity, word, unit, byte]
        ordered = codes.reshape(rows, target.units, 4, 4, 2).permute(0, 4, 2, 1, 3)
        even, odd = (ordered[:, parity].reshape(rows, 4, -1) for parity in (0, 1))
        if self.layout.bits == 8:
            target.codes[taken, 0], target.codes[taken, 1] = even, odd
        else:
            target.codes[taken] = (even & 15) | (odd << 4)
        if target.high is not None:
            nibbles = (even >> 4) | (odd >> 4 << 2)
            target.high[taken] = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _affine(blocks: Tensor, *, bits: int, kind: torch.dtype) -> Parts:
    header = from_bytes(blocks[:, :8], kind)
    scales, minima = header[:, 0::2], header[:, 1::2]
    if bits == 4:
        return Parts(blocks[:, 8:], scales, minima, paired=True)
    return Parts(UNPACK[bits](blocks[:, 8:]), scales, minima)


def _int8(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:], from_bytes(blocks[:, :2], torch.float16))


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(nibble_runs(blocks[:, 2:]).flatten(1), from_bytes(blocks[:, :2], torch.float16))


def _q4_1(blocks: Tensor) -> Parts:
    header = from_bytes(blocks[:, :4], torch.float16)
    return Parts(nibble_runs(blocks[:, 4:]).flatten(1), header[:, :1], header[:, 1:])


def _q5_0(blocks: Tensor) -> Parts:
    places = torch.arange(32, dtype=torch.int32, device=blocks.device)
    fifth = ((from_bytes(blocks[:, 2:6], torch.int32) >> places) & 1).to(torch.uint8)
    codes = nibble_runs(blocks[:, 6:]).flatten(1) | (fifth << 4)
    return Parts(codes, from_bytes(blocks[:, :2], torch.float16))


def _k_headers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = six_bit_scales(blocks[:, 4:16])
    return f16_column(blocks, 0) * scales, -f16_column(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> Parts:
    codes = nibble_runs(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return Parts(codes, *_k_headers(blocks))


def _q5_k(blocks: Tensor) -> Parts:
    fifth = bit_planes(blocks[:, 16:48], 1).reshape(-1, 256)
    codes = nibble_runs(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | (fifth << 4)
    return Parts(codes, *_k_headers(blocks))


def _q6_k(blocks: Tensor) -> Parts:
    low = nibble_runs(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    upper = bit_planes(blocks[:, 128:192].reshape(-1, 32), 2).reshape(-1, 256)
    scales = f16_column(blocks, 208) * from_bytes(blocks[:, 192:208], torch.int8)
    return Parts(low | (upper << 4), scales)


_FOUR_F32 = partial(_affine, bits=4, kind=torch.float32)
_SIX_F32 = partial(_affine, bits=6, kind=torch.float32)
_FOUR_F16 = partial(_affine, bits=4, kind=torch.float16)
_SIX_F16 = partial(_affine, bits=6, kind=torch.float16)

_PAIRED = (_FOUR_F32, _FOUR_F16)

_SPLITS: Mapping[QType, tuple[str, Split]] = {
    QType.Q8F16: ("i8g32", _int8),
    QType.HFQ4G128: ("u4g128", _FOUR_F32),
    QType.HFQ4G256: ("u4g256", _FOUR_F32),
    QType.HFQ6G256: ("u6g256", _SIX_F32),
    QType.MQ4G256: ("u4g256", _FOUR_F32),
    QType.MQ6G256: ("u6g256", _SIX_F32),
    QType.MQ4G256V2: ("u4g128h", _FOUR_F16),
    QType.MQ6G256V2: ("u6g128h", _SIX_F16),
    QType.GGUF_Q8_0: ("i8g32", _int8),
    QType.GGUF_Q4_0: ("o4g32", _q4_0),
    QType.GGUF_Q4_1: ("u4g32", _q4_1),
    QType.GGUF_Q5_0: ("o5g32", _q5_0),
    QType.GGUF_Q4_K: ("u4g32", _q4_k),
    QType.GGUF_Q5_K: ("u5g32", _q5_k),
    QType.GGUF_Q6_K: ("o6g16", _q6_k),
}

PACKINGS: Mapping[int, Packing] = {
    int(qtype): Packing(PACKED_LAYOUTS[layout], BLOCKS[qtype], split)
    for qtype, (layout, split) in _SPLITS.items()
}
