"""Facts of the HFQM container that its reader and its writer share.

File: header, metadata JSON (no length field), tensor count, index, zeros up to a 4096-byte boundary, then the
payloads back to back in index order. All numbers are little-endian. Does not know files.
"""

from __future__ import annotations

import struct

from hipfire.base.qtypes import BLOCKS, flat_nbytes, packed_nbytes, qtype_name
from hipfire.base.types import TensorInfo

MAGIC = b"HFQM"
VERSION = 1
ALIGNMENT = 4096
HEADER = struct.Struct("<4sIIIQQ")  # magic, version, arch_id, n_tensors, metadata_offset, data_offset
COUNT = struct.Struct("<I")
NAME_LENGTH = struct.Struct("<H")
ENTRY_KIND = struct.Struct("<BB")  # quant_type, n_dims; the dims follow as u32
ENTRY_TAIL = struct.Struct("<IQ")  # group_size, data_size
SMALLEST_ENTRY = NAME_LENGTH.size + ENTRY_KIND.size + ENTRY_TAIL.size
LARGEST_COUNT = 2**63 - 1  # weights in one tensor


def align(offset: int) -> int:
    """Return the first container-aligned offset that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def size_fault(info: TensorInfo, *, from_gguf: bool) -> str:
    """Return what is wrong with a tensor's element count or byte size; empty if nothing is.

    A known format allows its row-safe and its flat size. Containers that the original engine made from GGUF
    store [in, out] shapes, so with `from_gguf` the reversed shape counts as well. The size of an unknown
    format cannot be checked.
    """
    if info.numel > LARGEST_COUNT:
        return f"the shape {list(info.shape)[:8]} has more than 2^63 elements"
    if info.qtype not in BLOCKS:
        return ""
    shapes = {info.shape, info.shape[::-1]} if from_gguf else {info.shape}
    sizes = set()
    for shape in shapes:
        rows, cols = TensorInfo(info.name, info.qtype, shape, 0).rows_cols
        sizes |= {packed_nbytes(info.qtype, rows, cols), flat_nbytes(info.qtype, rows, cols)}
    if info.nbytes in sizes:
        return ""
    wanted = " or ".join(map(str, sorted(sizes)))
    return (
        f"{qtype_name(info.qtype)} with shape {list(info.shape)[:8]} takes {wanted} bytes, not {info.nbytes}"
    )
