"""Little-endian bit streams of small codes: two 4-bit codes to a byte, four 6-bit codes to three bytes.

Codes are uint8 below 2^bits in their natural order. This file does not know what a code means.
"""

from __future__ import annotations

import torch
from torch import Tensor

# codes are packed and unpacked as wide integers, one code in each byte of the word


def pack4(codes: Tensor) -> Tensor:
    """Pack contiguous uint8 [n, k] codes of 4 bits into uint8 [n, k/2], the even code in the low nibble."""
    words = codes.view(torch.int16)
    return (words | (words >> 4)).to(torch.uint8)


def unpack4(packed: Tensor) -> Tensor:
    """Unpack uint8 [n, k/2] into uint8 [n, k] codes of 4 bits."""
    words = packed.to(torch.int16)
    return words.bitwise_or(words << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def pack6(codes: Tensor) -> Tensor:
    """Pack contiguous uint8 [n, k] codes of 6 bits into uint8 [n, 3k/4], the first code lowest."""
    words = codes.view(torch.int32)
    packed = words & 0x3F
    for place in (1, 2, 3):
        packed |= (words >> (2 * place)) & (0x3F << (6 * place))
    return packed.view(torch.uint8).view(codes.shape[0], -1, 4)[:, :, :3].flatten(1)


def unpack6(packed: Tensor) -> Tensor:
    """Unpack uint8 [n, 3k/4] into uint8 [n, k] codes of 6 bits."""
    triples = packed.reshape(packed.shape[0], -1, 3)
    words = torch.nn.functional.pad(triples, (0, 1)).view(torch.int32).squeeze(-1)
    codes = words & 0x3F
    for place in (1, 2, 3):
        codes |= (words & (0x3F << (6 * place))) << (2 * place)
    return codes.view(torch.uint8)


PACK = {4: pack4, 6: pack6}
UNPACK = {4: unpack4, 6: unpack6}
