"""Vectors of sixteen lanes for Numba kernels: loads, stores and arithmetic at plain addresses.

`F16` is sixteen float32, `I16` sixteen int32 (or the same 64 bytes as codes). LLVM splits them into what the
processor has: one 512-bit register, two of 256 bits, four of 128. Addresses are int64 byte addresses; nothing
is checked. Every operation is IEEE float32 in a fixed order, so results do not depend on that split.
This file knows no layout of weights and no operation of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from hipfire.kernels.cpu.target import host_features

LANES = 16
BYTE, SHORT, WORD, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(WORD, LANES)
SHORTS = ir.VectorType(SHORT, 2 * LANES)
HALVES = ir.VectorType(SHORT, LANES)


class VectorType(types.Type):
    """A Numba type whose value is one LLVM vector."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, data_model_manager: Any, numba_type: VectorType) -> None:
        super().__init__(data_model_manager, numba_type, numba_type.llvm_type)


F16 = VectorType("F16", FLOATS)
I16 = VectorType("I16", WORDS)
ADDRESS = types.int64

Emit = Callable[..., Any]


def operation(result: types.Type, parameters: Sequence[types.Type], emit: Emit) -> Any:
    """Make an intrinsic: `emit(builder, *values)` returns its LLVM value, None for a void result."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[Any]) -> Any:
        value = emit(builder, *arguments)
        return context.get_dummy_value() if value is None else value

    signature = result(*parameters)
    makers: Sequence[Callable[..., Any]] = (
        lambda context: (signature, generate),
        lambda context, a: (signature, generate),
        lambda context, a, b: (signature, generate),
        lambda context, a, b, c: (signature, generate),
        lambda context, a, b, c, d: (signature, generate),
        lambda context, a, b, c, d, e: (signature, generate),
        lambda context, a, b, c, d, e, f: (signature, generate),
        lambda context, a, b, c, d, e, f, g: (signature, generate),
    )
    return intrinsic(makers[len(parameters)])


def pointer(builder: ir.IRBuilder, address: Any, pointee: ir.Type, offset: int = 0) -> Any:
    """Return `address` + `offset` bytes as a typed LLVM pointer."""
    if offset:
        address = builder.add(address, ir.Constant(LONG, offset))
    return builder.inttoptr(address, pointee.as_pointer())


def load(builder: ir.IRBuilder, address: Any, kind: ir.Type, offset: int = 0, align: int = 1) -> Any:
    """Load a value of LLVM type `kind`; by default from any address."""
    value = builder.load(pointer(builder, address, kind, offset))
    value.align = align
    return value


def store(builder: ir.IRBuilder, address: Any, value: Any, align: int = 1) -> None:
    """Store an LLVM value, by default at any address."""
    builder.store(value, pointer(builder, address, value.type)).align = align


def splat(builder: ir.IRBuilder, value: Any, kind: ir.VectorType) -> Any:
    """Return a vector whose lanes all are `value`."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(WORD, kind.count), [0] * kind.count)
    )


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """Return a constant vector with equal lanes."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def emit_fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


def emit_half(builder: ir.IRBuilder, bits: Any) -> Any:
    """Return IEEE halves, sixteen 16-bit patterns, as float32; infinities and NaN are not expected.

    Where the processor has no conversion the exponent is moved by arithmetic, which is exact for normal and
    subnormal halves alike.
    """
    if "f16c" in host_features():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    wide = builder.zext(bits, WORDS)
    magnitude = builder.shl(builder.and_(wide, constant(WORDS, 0x7FFF)), constant(WORDS, 13))
    value = builder.fmul(builder.bitcast(magnitude, FLOATS), constant(FLOATS, 2.0**112))
    sign = builder.shl(builder.and_(wide, constant(WORDS, 0x8000)), constant(WORDS, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, WORDS), sign), FLOATS)


def emit_bfloat(builder: ir.IRBuilder, bits: Any) -> Any:
    """Return sixteen bfloat16 patterns as float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, WORDS), constant(WORDS, 16)), FLOATS)


def emit_reduce(builder: ir.IRBuilder, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Fold sixteen lanes in halves, 8 + 8, 4 + 4, .. so that the order is the same everywhere."""
    width = LANES
    while width > 1:
        width //= 2
        order = ir.VectorType(WORD, width)
        low = builder.shuffle_vector(value, value, ir.Constant(order, list(range(width))))
        high = builder.shuffle_vector(value, value, ir.Constant(order, list(range(width, 2 * width))))
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(WORD, 0))


def emit_max(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Return the larger value lane by lane; b where they cannot be compared."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def emit_min(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Return the smaller value lane by lane; b where they cannot be compared."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


LOG2_E = 1.4426950408889634
# ln 2 in two parts, so that x - n ln 2 keeps its low bits; the first has few enough bits for n times it
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
# e^r on [-ln2/2, ln2/2]: the Taylor terms beyond 1 + r; the error of leaving out r^8 / 8! is below 2^-26
EXP_TERMS = tuple(1.0 / f for f in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))
EXP_LOWEST, EXP_HIGHEST = -87.0, 88.0


def emit_exp(builder: ir.IRBuilder, x: Any) -> Any:
    """Return e^x with a relative error below 2e-7 for x in [-87, 88]; x is moved into that range first."""
    x = emit_min(builder, emit_max(builder, x, constant(FLOATS, EXP_LOWEST)), constant(FLOATS, EXP_HIGHEST))
    scaled = builder.fmul(x, constant(FLOATS, LOG2_E))
    n = call(builder, "llvm.rint.v16f32", FLOATS, scaled)
    r = emit_fma(builder, n, constant(FLOATS, -LN2_HIGH), x)
    r = emit_fma(builder, n, constant(FLOATS, -LN2_LOW), r)
    value = constant(FLOATS, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        value = emit_fma(builder, value, r, constant(FLOATS, term))
    exponent = builder.shl(builder.add(builder.fptosi(n, WORDS), constant(WORDS, 127)), constant(WORDS, 23))
    return builder.fmul(value, builder.bitcast(exponent, FLOATS))


zero_f = operation(F16, (), lambda b: constant(FLOATS, 0.0))
load_f = operation(F16, (ADDRESS,), lambda b, a: load(b, a, FLOATS))
load_half = operation(F16, (ADDRESS,), lambda b, a: emit_half(b, load(b, a, HALVES)))
load_bfloat = operation(F16, (ADDRESS,), lambda b, a: emit_bfloat(b, load(b, a, HALVES)))
load_bytes = operation(
    F16,
    (ADDRESS,),
    lambda b, a: b.sitofp(b.sext(load(b, a, ir.VectorType(BYTE, LANES)), WORDS), FLOATS),
)
store_f = operation(types.void, (ADDRESS, F16), lambda b, a, v: store(b, a, v))
splat_f = operation(F16, (types.float32,), lambda b, x: splat(b, x, FLOATS))
splat_at = operation(F16, (ADDRESS,), lambda b, a: splat(b, load(b, a, FLOAT, align=4), FLOATS))
add_f = operation(F16, (F16, F16), lambda b, x, y: b.fadd(x, y))
sub_f = operation(F16, (F16, F16), lambda b, x, y: b.fsub(x, y))
mul_f = operation(F16, (F16, F16), lambda b, x, y: b.fmul(x, y))
div_f = operation(F16, (F16, F16), lambda b, x, y: b.fdiv(x, y))
max_f = operation(F16, (F16, F16), emit_max)
abs_f = operation(F16, (F16,), lambda b, x: call(b, "llvm.fabs.v16f32", FLOATS, x))
fma_f = operation(F16, (F16, F16, F16), emit_fma)
exp_f = operation(F16, (F16,), emit_exp)
sum_f = operation(types.float32, (F16,), lambda b, x: emit_reduce(b, x, b.fadd))
top_f = operation(types.float32, (F16,), lambda b, x: emit_reduce(b, x, lambda p, q: emit_max(b, p, q)))
to_f = operation(F16, (I16,), lambda b, x: b.sitofp(x, FLOATS))
add_i = operation(I16, (I16, I16), lambda b, x, y: b.add(x, y))
sub_i = operation(I16, (I16, I16), lambda b, x, y: b.sub(x, y))
splat_i = operation(I16, (types.int32,), lambda b, x: splat(b, x, WORDS))

load_float = operation(types.float32, (ADDRESS,), lambda b, a: load(b, a, FLOAT, align=4))
store_float = operation(types.void, (ADDRESS, types.float32), lambda b, a, v: store(b, a, v, 4))
load_int = operation(types.int32, (ADDRESS,), lambda b, a: load(b, a, WORD, align=4))
store_int = operation(types.void, (ADDRESS, types.int32), lambda b, a, v: store(b, a, v, 4))
load_long = operation(types.int64, (ADDRESS,), lambda b, a: load(b, a, LONG, align=8))
store_long = operation(types.void, (ADDRESS, types.int64), lambda b, a, v: store(b, a, v, 8))


def _emit_round_bytes(builder: ir.IRBuilder, address: Any, value: Any) -> Any:
    """Store sixteen float32 as signed bytes, rounded to nearest even; returns their sum as int32."""
    rounded = builder.fptosi(call(builder, "llvm.rint.v16f32", FLOATS, value), WORDS)
    store(builder, address, builder.trunc(rounded, ir.VectorType(BYTE, LANES)))
    return emit_reduce(builder, rounded, builder.add)


store_codes = operation(types.int32, (ADDRESS, F16), _emit_round_bytes)


def _emit_store_bfloat(builder: ir.IRBuilder, address: Any, value: Any) -> None:
    """Store sixteen float32 as bfloat16, rounded to nearest even; NaN is not expected."""
    bits = builder.bitcast(value, WORDS)
    odd = builder.and_(builder.lshr(bits, constant(WORDS, 16)), constant(WORDS, 1))
    rounded = builder.add(builder.add(bits, constant(WORDS, 0x7FFF)), odd)
    store(builder, address, builder.trunc(builder.lshr(rounded, constant(WORDS, 16)), HALVES))


store_bfloat = operation(types.void, (ADDRESS, F16), _emit_store_bfloat)
rint_float = operation(types.float32, (types.float32,), lambda b, x: call(b, "llvm.rint.f32", FLOAT, x))
store_byte = operation(types.void, (ADDRESS, types.int32), lambda b, a, v: store(b, a, b.trunc(v, BYTE)))
load_byte = operation(types.int32, (ADDRESS,), lambda b, a: b.sext(load(b, a, BYTE), WORD))
load_unsigned = operation(types.int32, (ADDRESS,), lambda b, a: b.zext(load(b, a, BYTE), WORD))


def _emit_prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Ask for the cache line at an address, which may lie past the end of memory, for reading."""
    place = pointer(builder, address, BYTE)
    kind = ir.FunctionType(ir.VoidType(), [place.type, WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # for reading, kept in all cache levels, data
    builder.call(function, [place, *(ir.Constant(WORD, value) for value in (0, 3, 1))])


prefetch = operation(types.void, (ADDRESS,), _emit_prefetch)


def _emit_scalar_bfloat(builder: ir.IRBuilder, address: Any) -> Any:
    bits = builder.zext(load(builder, address, SHORT, align=2), WORD)
    return builder.bitcast(builder.shl(bits, ir.Constant(WORD, 16)), FLOAT)


def _emit_scalar_half(builder: ir.IRBuilder, address: Any) -> Any:
    """Load one IEEE half; see `emit_half` for the arithmetic."""
    bits = builder.zext(load(builder, address, SHORT), WORD)
    magnitude = builder.shl(builder.and_(bits, ir.Constant(WORD, 0x7FFF)), ir.Constant(WORD, 13))
    value = builder.fmul(builder.bitcast(magnitude, FLOAT), ir.Constant(FLOAT, 2.0**112))
    sign = builder.shl(builder.and_(bits, ir.Constant(WORD, 0x8000)), ir.Constant(WORD, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, WORD), sign), FLOAT)


load_one_bfloat = operation(types.float32, (ADDRESS,), _emit_scalar_bfloat)
load_one_half = operation(types.float32, (ADDRESS,), _emit_scalar_half)
bits_of = operation(types.int32, (types.float32,), lambda b, x: b.bitcast(x, WORD))
store_short = operation(types.void, (ADDRESS, types.int32), lambda b, a, v: store(b, a, b.trunc(v, SHORT)))
