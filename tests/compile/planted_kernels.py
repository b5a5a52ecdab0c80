"""Kernels with one planted fault each, and sound ones beside them, for the tests of the compile gate.

A process that compiles imports this; the tests themselves only name it.
"""

import os
import sys

import triton
import triton.language as tl

from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import dot4, matmul

ONE_EACH = frozenset({"gfx1201", "sm_90"})


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, columns, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """One tile of a matrix product; with huge tiles it spills, and with many stages it needs much memory."""
    row = tl.arange(0, M)
    column = tl.arange(0, N)
    inner = tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, columns, K):
        at = start + inner
        a = tl.load(a_ptr + row[:, None].to(tl.int64) * columns + at[None, :], mask=(at < columns)[None, :])
        b = tl.load(b_ptr + at[:, None].to(tl.int64) * N + column[None, :], mask=(at < columns)[:, None])
        acc = matmul(a, b, acc)
    tl.store(out_ptr + row[:, None] * N + column[None, :], acc)


@triton.jit
def summed_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr):
    """A product without matrix instructions."""
    row = tl.arange(0, 16)
    inner = tl.arange(0, K)
    a = tl.load(a_ptr + row[:, None] * K + inner[None, :]).to(tl.float32)
    b = tl.load(b_ptr + inner).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(a * b[None, :], axis=1))


@triton.jit
def bytes_kernel(a_ptr, b_ptr, out_ptr, NATIVE: tl.constexpr, TARGET: tl.constexpr):
    """Products of four bytes: native, or byte for byte as the interpreter has them."""
    at = tl.arange(0, 128)
    a = tl.load(a_ptr + at)
    b = tl.load(b_ptr + at)
    tl.store(out_ptr + at, dot4(a, b, tl.zeros_like(a), TARGET if NATIVE else "plain"))


@triton.jit
def absent_kernel(x_ptr, bias_ptr, out_ptr, count):
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at, mask=at < count)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x, mask=at < count)


@triton.jit
def broken_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + undefined_name)  # noqa: F821


class Aborting(Offline):
    """Ends the process as a fault of the compiler does."""

    def compile(self, target):
        sys.stderr.write("LLVM ERROR: planted fault\n  #0 0x0 a stack follows\n")
        sys.stderr.flush()
        os.abort()


def _product(name, size, needs=("matrix",), on=ONE_EACH, stages=1, kind="*bf16", depth=32, warps=4):
    return Offline(
        product_kernel,
        {"a_ptr": kind, "b_ptr": kind, "out_ptr": "*fp32", "columns": "i32"},
        {"M": size, "N": size, "K": depth},
        warps=warps,
        stages=stages,
        name=name,
        needs=frozenset(needs),
        on=frozenset(on),
    )


_TWO = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}
_WORDS = {"a_ptr": "*i32", "b_ptr": "*i32", "out_ptr": "*i32"}
_COPY = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
_DOT4 = frozenset({"dot4"})

OFFLINE = (
    _product("sound", 32, on=("cuda", "hip")),
    _product("spills", 64, needs=(), kind="*fp32", depth=16, warps=1),
    _product("too much shared memory", 32, stages=4, depth=256),
    Offline(summed_kernel, _TWO, {"K": 64}, name="no matrix", needs=frozenset({"matrix"}), on=ONE_EACH),
    Offline(bytes_kernel, _WORDS, {"NATIVE": True}, name="sound", needs=_DOT4),
    Offline(bytes_kernel, _WORDS, {"NATIVE": False}, name="no dot4", needs=_DOT4, on=ONE_EACH),
    Offline(absent_kernel, {**_COPY, "count": "i32"}, {"bias_ptr": None}, on=ONE_EACH),
    Offline(broken_kernel, _COPY, {}, on=ONE_EACH),
    Aborting(absent_kernel, _COPY, {"bias_ptr": None, "count": 1}, name="aborts", on=frozenset({"gfx1201"})),
)
