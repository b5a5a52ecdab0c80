"""What several GGML block layouts have in common: nibble halves, fifth bits, and packed 6-bit scales.

This file does not know any whole block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nibble_runs(packed: Tensor) -> Tensor:
    """Split each run's nibbles: uint8 [..., k] -> uint8 [..., 2, k], low nibbles first, then high ones.

    GGML stores the first half of a run of weights in the low nibbles and the second half in the high ones.
    """
    return torch.stack((packed & 0x0F, packed >> 4), dim=-2)


def bit_planes(packed: Tensor, bits: int) -> Tensor:
    """Cut bytes into fields of `bits`: uint8 [n, k] -> uint8 [n, 8 / bits, k], the lowest field first."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> place) & mask for place in range(0, 8, bits)], dim=1)


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 12 bytes of a K block: uint8 [n, 12] -> scales and minima, uint8 [n, 8] each.

    The first four of each lie in the low 6 bits of bytes 0..3 and 4..7; the last four have their low
    nibbles in bytes 8..11 and their upper two bits on top of bytes 0..3 and 4..7.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 0x3F, (low & 0x0F) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 0x3F, (low >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima
