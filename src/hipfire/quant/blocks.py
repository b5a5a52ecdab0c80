"""How the rows of a matrix are cut into blocks, for every format alike, and how old files did it.

Row by row (what `encode` writes): each row starts with a block of its own; its last block is short when the
group does not divide the row. Flat (old files): blocks run over row ends and only the last one is short.
The two are told apart by their size. This file does not know what is inside a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hipfire.base.errors import ArtifactError, UnsupportedError, ValidationError
from hipfire.base.qtypes import BLOCKS, Block, QType, flat_nbytes, packed_nbytes
from hipfire.kernels.fwht import fwht256, inverse_fwht256
from hipfire.quant.format import Decoder, WeightFormat

# float32 [n, t], t up to the block's elements -> uint8 [n, nbytes]; must not write to its argument
BlockEncoder = Callable[[Tensor], Tensor]
# uint8 [n, nbytes] -> float32 [n, elements]
BlockDecoder = Callable[[Tensor], Tensor]

# weights in flight at a time: temporaries stay in the cache of a CPU core, or fill a GPU once
_CHUNK_CPU = 1 << 18
_CHUNK_GPU = 1 << 24


def block_format(
    qtype: QType,
    *,
    decode: BlockDecoder,
    encode: BlockEncoder | None = None,
    rotated: bool = False,
    flat: bool = False,
    whole: bool = False,
) -> WeightFormat:
    """Make a WeightFormat from functions on blocks.

    `rotated` blocks hold rotated weights: the `encode` and `decode` given here see only those. `flat` says
    that old files pack this format flat. `whole` formats have no short blocks: the group must divide the
    columns.
    """
    stored = partial(_decode_rows, decode, qtype, flat=flat, whole=whole)
    original = stored
    if rotated:
        original = partial(_decode_rows, _then_unrotate(decode), qtype, flat=flat, whole=whole)
        stored = partial(_decode_rotated, stored, qtype)
    writer = None
    if encode is not None:
        pack = _rotate_then(encode) if rotated else encode
        writer = partial(_encode_rows, pack, qtype, whole=whole or rotated)
    return WeightFormat(
        qtype=int(qtype),
        name=qtype.name,
        rotated=rotated,
        block=BLOCKS[qtype],
        encode=writer,
        decode=stored,
        decode_dense=original,
    )


def check_size(name: str, data: Tensor, rows: int, cols: int, *sizes: int) -> None:
    """Raise ArtifactError naming all sizes unless uint8 `data` has one of `sizes` bytes."""
    if data.dtype != torch.uint8 or rows < 0 or cols < 0:
        raise ValidationError(
            f"{name} is decoded from bytes and a shape, not from {data.dtype} and [{rows}, {cols}]",
            hint="pass uint8 data and the tensor's rows and columns",
        )
    if data.numel() not in sizes:
        wanted = " or ".join(str(size) for size in dict.fromkeys(sizes))
        raise ArtifactError(
            f"{name} [{rows}, {cols}] takes {wanted} bytes but {data.numel()} are stored",
            hint="the file is damaged or its shape is wrong; download or convert it again",
        )


def check_whole(name: str, block: Block, cols: int) -> None:
    """Raise ArtifactError when a stored row does not end with a block."""
    if cols % block.elements:
        raise ArtifactError(
            f"{name} rows are made of blocks of {block.elements} weights, which {cols} columns are not",
            hint="the file is damaged or its shape is wrong; download or convert it again",
        )


def _rotate_then(encode: BlockEncoder) -> BlockEncoder:
    def encode_rotated(groups: Tensor) -> Tensor:
        return encode(fwht256(groups))

    return encode_rotated


def _then_unrotate(decode: BlockDecoder) -> BlockDecoder:
    def decode_unrotated(blocks: Tensor) -> Tensor:
        return inverse_fwht256(decode(blocks))

    return decode_unrotated


def _chunk(device: torch.device, weights: int) -> int:
    """Return how many items of so many weights are worked on at a time; at least one."""
    return max(1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK_GPU) // max(1, weights))


def _encode_rows(pack: BlockEncoder, qtype: QType, weight: Tensor, *, whole: bool) -> Tensor:
    """Encode floating [rows, cols] row by row into uint8 [nbytes]."""
    block = BLOCKS[qtype]
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValidationError(
            f"{qtype.name} encodes a floating-point matrix, not {weight.dtype} with {weight.ndim} dimensions",
            hint="pass a tensor of shape [rows, columns]",
        )
    rows, cols = weight.shape
    if whole and cols % block.elements:
        raise ValidationError(
            f"{qtype.name} needs a multiple of {block.elements} columns, not {cols}",
            hint="use HFQ4G128 or Q8F16 for this width",
        )
    short = cols % block.elements
    out = torch.empty(packed_nbytes(qtype, rows, cols), dtype=torch.uint8, device=weight.device)
    # without a short block every block is a row of its own, which lets chunks end anywhere
    unit = cols if short else block.elements
    units = weight.detach().reshape(-1, unit) if weight.numel() else weight.new_empty(0, unit)
    target = out.view(units.shape[0], -(-unit // block.elements), block.nbytes)
    step = _chunk(weight.device, unit)
    for start in range(0, units.shape[0], step):
        chunk = units[start : start + step].to(torch.float32)
        _refuse_non_finite(chunk, qtype.name, start * unit, cols)
        into = target[start : start + step]
        full = cols // block.elements if short else 1
        if full:
            groups = chunk[:, : full * block.elements].reshape(-1, block.elements)
            into[:, :full] = pack(groups).view(-1, full, block.nbytes)
        if short:
            into[:, full] = pack(chunk[:, full * block.elements :])
    return out


def _refuse_non_finite(chunk: Tensor, name: str, first: int, cols: int) -> None:
    """Raise ValidationError naming the place of the first NaN or infinity; `first` is the chunk's offset."""
    lo, hi = torch.aminmax(chunk)
    if bool(torch.isfinite(lo) & torch.isfinite(hi)):
        return
    index = int((~torch.isfinite(chunk)).flatten().nonzero()[0])
    row, col = divmod(first + index, cols)
    raise ValidationError(
        f"{name} cannot hold the weight {float(chunk.flatten()[index])} at row {row}, column {col}",
        hint="the source tensor is damaged or overflowed; keep it as it is or convert it again",
    )


def _decode_rows(
    unpack: BlockDecoder, qtype: QType, data: Tensor, rows: int, cols: int, *, flat: bool, whole: bool
) -> Tensor:
    """Decode uint8 [nbytes], packed row by row or flat, into float32 [rows, cols]."""
    block = BLOCKS[qtype]
    if whole:
        check_whole(qtype.name, block, cols)
    by_row = packed_nbytes(qtype, rows, cols)
    sizes = (by_row, flat_nbytes(qtype, rows, cols)) if flat else (by_row,)
    check_size(qtype.name, data, rows, cols, *sizes)
    blocks = data.reshape(-1, block.nbytes)
    # both layouts can have the same size and differ (2 rows of 255): then row by row it is, because that is
    # what hipfire writes. For one row, or where the group divides the columns, they are the same bytes.
    if data.numel() == by_row and cols % block.elements:
        return _decode_short_rows(unpack, block, blocks, rows, cols)
    out = torch.empty(blocks.shape[0], block.elements, dtype=torch.float32, device=data.device)
    step = _chunk(data.device, block.elements)
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = unpack(blocks[start : start + step])
    return out.view(-1)[: rows * cols].view(rows, cols)


def _decode_short_rows(unpack: BlockDecoder, block: Block, blocks: Tensor, rows: int, cols: int) -> Tensor:
    """Decode rows whose last block is short: its missing weights are dropped."""
    out = torch.empty(rows, cols, dtype=torch.float32, device=blocks.device)
    row_blocks = -(-cols // block.elements)
    step = _chunk(blocks.device, cols)
    for start in range(0, rows, step):
        values = unpack(blocks[start * row_blocks : (start + step) * row_blocks])
        out[start : start + step] = values.view(-1, row_blocks * block.elements)[:, :cols]
    return out


def _decode_rotated(stored: Decoder, qtype: QType, data: Tensor, rows: int, cols: int) -> Tensor:
    """Decode in the rotated basis, where a short row does not exist: its missing weights are mixed in."""
    if cols % BLOCKS[qtype].elements:
        raise UnsupportedError(
            f"{qtype.name} rows of {cols} columns cannot be used rotated",
            hint="decode them with dense(), which undoes the rotation before it cuts the row",
        )
    return stored(data, rows, cols)
