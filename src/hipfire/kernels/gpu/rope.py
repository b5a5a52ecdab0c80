"""Angles of the rotary position embedding: cosines and sines for the positions of a step.

Angles are float32 products, as in the reference. They are reduced in float64, which needs no table and
no stack at any position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import begin_launch

# adding and subtracting this rounds a float64 of less than 2^51 to the nearest integer
_ROUND = tl.constexpr(6755399441055744.0)


@triton.jit
def angles_kernel(
    rows_ptr, frequencies_ptr, cos_ptr, sin_ptr, scale,
    HALF: tl.constexpr, PADDED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < HALF
    position = tl.load(rows_ptr + 2 * token + 1).to(tl.float32)
    frequency = tl.load(frequencies_ptr + column, mask=inside, other=0.0).to(tl.float32)
    angle = (position * frequency).to(tl.float64)
    turns = (angle * 0.63661977236758134308 + _ROUND) - _ROUND
    rest = (angle - turns * 1.57079632679489661923).to(tl.float32)
    quadrant = turns.to(tl.int64).to(tl.int32) & 3
    square = rest * rest
    # Taylor-like polynomials for at most an eighth of a turn, good to float32
    sine = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * rest + rest
    cosine = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    cosine = cosine * square * square - 0.5 * square + 1.0
    swapped = (quadrant & 1) == 1
    cos = tl.where(swapped, sine, cosine)
    sin = tl.where(swapped, cosine, sine)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = tl.where(quadrant >= 2, -sin, sin)
    tl.store(cos_ptr + token * HALF + column, cos * scale, mask=inside)
    tl.store(sin_ptr + token * HALF + column, sin * scale, mask=inside)


def rope_angles(
    engine: GpuEngine, rows: torch.Tensor, inverse_frequencies: torch.Tensor, attention_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) as `rope_angles_ref` does; `rows` and frequencies are contiguous."""
    tokens, half = rows.shape[0], inverse_frequencies.shape[0]
    cos = engine.empty("rope_cos", (tokens, half))
    sin = engine.empty("rope_sin", (tokens, half))
    engine.launch(
        angles_kernel,
        (tokens,),
        reads=(rows, inverse_frequencies),
        writes=(cos, sin),
        constants={"HALF": half, "PADDED": triton.next_power_of_2(half), "TARGET": engine.target},
        warps=1,
        rows_ptr=rows,
        frequencies_ptr=inverse_frequencies,
        cos_ptr=cos,
        sin_ptr=sin,
        scale=float(attention_scale),
    )
    return cos, sin


OFFLINE = (
    Offline(
        angles_kernel,
        {
            "rows_ptr": "*i64",
            "frequencies_ptr": "*fp32",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "scale": "fp32",
        },
        {"HALF": 64, "PADDED": 64},
        warps=1,
    ),
)
