"""What kernels of experts are given of a packed matrix, at run time and when they are compiled ahead.

This file has no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from hipfire.kernels.packed import PackedLayout, PackedMatrix

# the numbers that kernels take with a matrix, all divisible by 16 for sizes of real models
SIZES: Final[Mapping[str, str]] = {"rows": "i32", "units": "i32", "groups": "i32"}


def matrix_arguments(matrix: PackedMatrix, *, words: bool) -> dict[str, Any]:
    """Return a matrix as arguments of a kernel, which loads its codes as words or as bytes."""
    high = matrix.high
    if high is not None and words:
        high = high.view(torch.int16)
    return {
        "codes_ptr": matrix.codes.view(torch.int32) if words else matrix.codes,
        "high_ptr": high,
        "scales_ptr": matrix.scales,
        "minima_ptr": matrix.minima,
        "units": matrix.units,
        "groups": matrix.scales.shape[1],
    }


def layout_constants(layout: PackedLayout) -> dict[str, object]:
    """Return a layout as compile-time parameters of a kernel."""
    return {
        "BITS": layout.bits,
        "GROUP": layout.group,
        "OFFSET": layout.offset,
        "MINIMUM": layout.minimum,
    }


def offline_layout(
    types: dict[str, str], constants: dict[str, object], layout: PackedLayout, high: str
) -> tuple[dict[str, str], dict[str, object]]:
    """Add the tensors that a layout has to the types, and those that it has not to the constants."""
    header = "*fp16" if layout.half else "*fp32"
    types = {**types, "scales_ptr": header}
    constants = {**constants, **layout_constants(layout)}
    for name, kind, there in (("high_ptr", high, layout.bits == 6), ("minima_ptr", header, layout.minimum)):
        if there:
            types[name] = kind
        else:
            constants[name] = None
    return types, constants
