"""What differs between the machines that one Triton source is compiled for.

A kernel takes `TARGET`: `cuda`, `hip`, or `plain` for the interpreter, which has no inline assembly. This
file knows instructions and no operation.
"""

from __future__ import annotations

import os
from typing import Final, Literal

import triton
import triton.language as tl
from triton.language.extra import cuda

TargetName = Literal["cuda", "hip", "plain"]

# decided before Triton decorates anything: one process either interprets kernels or compiles them
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _signed_byte(word, INDEX: tl.constexpr):
    return (word << (24 - 8 * INDEX)) >> 24


@triton.jit
def dot4(a, b, c, TARGET: tl.constexpr):
    """Return c plus the products of the four signed bytes in the int32 words of a and b."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    elif TARGET == "hip":
        return tl.inline_asm_elementwise(
            "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]",
            "=v,v,v,v",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for index in tl.static_range(4):
            c += _signed_byte(a, index) * _signed_byte(b, index)
        return c


@triton.jit
def matmul(a, b, acc):
    """Return acc + a b in float32; the interpreter multiplies in float32, for it gets halves wrong."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def let_next_start(TARGET: tl.constexpr):
    """Let the next launch start up, where the device can do that while this one runs."""
    if TARGET == "cuda":
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(TARGET: tl.constexpr):
    """Wait for the launches before this one."""
    if TARGET == "cuda":
        cuda.gdc_wait()


@triton.jit
def begin_launch(TARGET: tl.constexpr):
    """Let the next launch start up, and wait for the ones before this one; every kernel calls it.

    Launches overlap with their predecessors where the device can do that: what comes before this call may
    read weights, and nothing that another kernel writes. No launch ends before it has waited, so whoever
    waits for it has waited for all before it. A kernel that calls the two halves by itself may read between
    them what was there when the step began, and no launch of the step writes before it: a step begins with
    a copy of its inputs, which waits for everything.
    """
    let_next_start(TARGET)
    wait_for_earlier(TARGET)
