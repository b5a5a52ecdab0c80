"""Codes of packed matrices in a tile: as bytes for integer dots, and as floats for matrix units.

Tiles take their rows from anywhere: products with a matrix and with chosen experts are built from these. See
`packed.PackedMatrix` for how codes lie. This file starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from hipfire.kernels.gpu.target import dot4, matmul


@dataclass(frozen=True)
class Tile:
    """How tiles are multiplied: rows and tokens of a program, columns of a step, warps, stages.

    `whole` says whether each step lies within one group of 4-bit codes, `even` whether every step is whole
    and the runs of its bytes begin at 16 bytes.
    """

    rows: int
    tokens: int
    step: int
    whole: bool
    even: bool
    warps: int
    stages: int

    def constants(self) -> dict[str, object]:
        """Return what of it is a compile-time parameter of kernels."""
        sizes = {"ROWS": self.rows, "TOKENS": self.tokens, "STEP": self.step}
        return {**sizes, "WHOLE": self.whole, "EVEN": self.even}


# what the fast conversion of nibbles adds to each: it sets them into the mantissa of 128.0
_LENT = tl.constexpr(128)


@triton.jit
def stack_row(expert, rows, row):
    """Return int64 numbers of rows in a stack: those of an expert of `rows` rows each."""
    # no stack has more experts or rows than that, which bounds offsets
    first = tl.minimum(tl.maximum(expert, 0), 65535).to(tl.int64) * rows
    return tl.minimum(first + row, 0x7FFFFFFF)


@triton.jit
def _code_bytes(
    codes_ptr, high_ptr, row, unit, mask, units, WORD: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr
):
    """Return the even and the odd codes of word WORD of units, without offset, as int32 of four bytes."""
    if BITS == 8:
        at = codes_ptr + row * (units * 8) + (WORD * units + unit)
        even = tl.load(at, mask=mask, other=0)
        odd = tl.load(at + 4 * units, mask=mask, other=0)
    else:
        at = row * (units * 4) + (WORD * units + unit)
        low = tl.load(codes_ptr + at, mask=mask, other=0)
        even = low & 0x0F0F0F0F
        odd = (low >> 4) & 0x0F0F0F0F
        if BITS == 6:
            # sixteen bits: for each byte of `low` a nibble, two bits for either of its codes
            spread = tl.load(high_ptr + at, mask=mask, other=0).to(tl.int32) & 0xFFFF
            spread = (spread | (spread << 8)) & 0x00FF00FF
            spread = (spread | (spread << 4)) & 0x0F0F0F0F
            even |= (spread & 0x03030303) << 4
            odd |= (spread & 0x0C0C0C0C) << 2
    if OFFSET != 0:
        # in every byte its top bit is lent, so that none borrows from the next
        top: tl.constexpr = -2139062144
        even = ((even | top) - OFFSET * 0x01010101) ^ top
        odd = ((odd | top) - OFFSET * 0x01010101) ^ top
    return even, odd


@triton.jit
def _two_words(
    x_ptr, x_row, codes_ptr, high_ptr, row, unit, mask, units, WORD: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Return the integer products of words WORD and WORD + 1 of units with activations."""
    total = tl.zeros(mask.shape, tl.int32)
    for word in tl.static_range(WORD, WORD + 2):
        even, odd = _code_bytes(codes_ptr, high_ptr, row, unit, mask, units, word, BITS, OFFSET)
        at = x_ptr + x_row * (units * 8) + (word * units + unit)
        total = dot4(even, tl.load(at, mask=mask, other=0), total, TARGET)
        total = dot4(odd, tl.load(at + 4 * units, mask=mask, other=0), total, TARGET)
    return total


@triton.jit
def row_products(
    x_ptr, x_scales_ptr, x_sums_ptr, x_row, codes_ptr, high_ptr, scales_ptr, minima_ptr, row, valid,
    first_quad, units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    ROWS: tl.constexpr, QUADS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Return what units contribute to products, float32 [ROWS, QUADS]: four units from each quad.

    `row` and `x_row` are int64 [ROWS], rows of the matrix and of the int8 activations; there is nothing to
    read where `valid` [ROWS] does not hold.
    """
    quad = first_quad + tl.arange(0, QUADS)[None, :, None]
    unit = quad * 4 + tl.arange(0, 4)[None, None, :] + tl.zeros((ROWS, QUADS, 4), tl.int32)
    row = row[:, None, None]
    x_row = x_row[:, None, None]
    mask = (unit < units) & valid[:, None, None]
    low = _two_words(
        x_ptr, x_row, codes_ptr, high_ptr, row, unit, mask, units, 0, BITS=BITS, OFFSET=OFFSET, TARGET=TARGET
    )
    high = _two_words(
        x_ptr, x_row, codes_ptr, high_ptr, row, unit, mask, units, 2, BITS=BITS, OFFSET=OFFSET, TARGET=TARGET
    )
    x_at = x_row * units + unit
    x_scale = tl.load(x_scales_ptr + x_at, mask=mask, other=0.0)
    if GROUP >= 128:
        # a quad has one scale
        there = (quad * 4 < units) & valid[:, None, None]
        at = row * groups + quad * 128 // GROUP
    else:
        there = mask
        at = row * groups + unit * 32 // GROUP
    scale = tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)
    if GROUP == 16:
        second = tl.load(scales_ptr + at + 1, mask=there & (unit * 2 + 1 < groups), other=0.0)
        total = low.to(tl.float32) * scale + high.to(tl.float32) * second.to(tl.float32)
    else:
        total = (low + high).to(tl.float32) * scale
    total = total * x_scale
    if MINIMUM:
        x_sum = tl.load(x_sums_ptr + x_at, mask=mask, other=0.0)
        total += x_sum * tl.load(minima_ptr + at, mask=there, other=0.0).to(tl.float32)
    return tl.sum(total, axis=2)


@triton.jit
def _nibbles(codes, TARGET: tl.constexpr):
    """Return the low and the high nibbles of uint8 codes as bfloat16; on `cuda` with 128 added to each."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            """{ .reg .b32 even, odd;
            and.b32 even, $4, 0x0F0F0F0F;
            shr.u32 odd, $4, 4;
            and.b32 odd, odd, 0x0F0F0F0F;
            prmt.b32 $0, even, 0x43434343, 0x4140;
            prmt.b32 $1, even, 0x43434343, 0x4342;
            prmt.b32 $2, odd, 0x43434343, 0x4140;
            prmt.b32 $3, odd, 0x43434343, 0x4342; }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        return (codes & 15).to(tl.float32).to(tl.bfloat16), (codes >> 4).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _floats(
    codes_ptr, high_ptr, scales_ptr, minima_ptr, row, byte, column, mask, units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """Return the even and the odd weights at `byte` of `row`, float32; their group begins by `column`."""
    if BITS == 8:
        at = codes_ptr + row * (units * 32) + byte
        even = tl.load(at, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        odd = tl.load(at + units * 16, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        both = tl.load(codes_ptr + row * (units * 16) + byte, mask=mask, other=0).to(tl.int32)
        first = both & 15
        second = both >> 4
        if BITS == 6:
            nibble = tl.load(high_ptr + row * (units * 8) + byte // 2, mask=mask, other=0).to(tl.int32)
            nibble = nibble >> (byte % 2 * 4)
            first |= (nibble & 3) << 4
            second |= (nibble & 12) << 2
        even = (first - OFFSET).to(tl.float32)
        odd = (second - OFFSET).to(tl.float32)
    at = row * groups + column // GROUP
    # the second half of the last unit may have no group of its own
    there = mask & (column // GROUP < groups)
    scale = tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)
    even *= scale
    odd *= scale
    if MINIMUM:
        minimum = tl.load(minima_ptr + at, mask=there, other=0.0).to(tl.float32)
        even += minimum
        odd += minimum
    return even, odd


@triton.jit
def step_bytes(step, units, STEP: tl.constexpr, EVEN: tl.constexpr):
    """Return where the codes of STEP columns are in a row of 4-bit codes, their columns, and which there are.

    They are STEP / 2 bytes: from each of the four words of STEP / 32 units, side by side. With EVEN every
    step is whole and its runs begin at 16 bytes.
    """
    run: tl.constexpr = STEP // 8
    item = tl.arange(0, STEP // 2)
    byte = item // run * (units * 4) + step * run + item % run
    unit = step * (STEP // 32) + item % run // 4
    if EVEN:
        # neighbors, which the compiler does not see in the sum
        byte = tl.max_contiguous(tl.multiple_of(byte, run), run)
        inside = item >= 0
    else:
        inside = unit < units
    return byte, unit * 32 + item // run * 8, inside


@triton.jit
def _step_sums(x_sums_ptr, x_row, shown, step, units, STEP: tl.constexpr, TARGET: tl.constexpr):
    """Return the sums of activations over the columns of a step, [1, TOKENS], for rows int64 [1, TOKENS]."""
    if TARGET == "hip":
        # unit by unit: tensors of few units do not take on the layout of products there
        total = tl.zeros(x_row.shape, tl.float32)
        for part in tl.static_range(STEP // 32):
            unit = step * (STEP // 32) + part
            total += tl.load(x_sums_ptr + x_row * units + unit, mask=shown & (unit < units), other=0.0)
        return total
    else:
        unit = step * (STEP // 32) + tl.arange(0, STEP // 32)[:, None]
        sums = tl.load(x_sums_ptr + x_row * units + unit, mask=shown & (unit < units), other=0.0)
        return tl.sum(sums, axis=0)[None, :]


@triton.jit
def add_step(
    acc, x_even, x_odd, x_sums_ptr, x_row, shown, codes_ptr, high_ptr, scales_ptr, minima_ptr, row, valid,
    byte, column, inside, step, units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    STEP: tl.constexpr, WHOLE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Return acc [ROWS, TOKENS] plus the products of rows int64 [ROWS, 1] with activations over a step.

    With WHOLE a step lies within one group of 4-bit codes: these are multiplied as they are, exactly, and
    scaled after that, which takes the sums of the activations in rows int64 `x_row` [1, TOKENS].
    """
    mask = inside[None, :] & valid
    if WHOLE:
        codes = tl.load(codes_ptr + row * (units * 16) + byte[None, :], mask=mask, other=0)
        even, odd = _nibbles(codes, TARGET)
        part = matmul(even, x_even, tl.zeros(acc.shape, tl.float32))
        part = matmul(odd, x_odd, part)
        at = row * groups + step * STEP // GROUP
        scale = tl.load(scales_ptr + at, mask=valid, other=0.0).to(tl.float32)
        low = tl.load(minima_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if TARGET == "cuda":
            low -= _LENT * scale
        sums = _step_sums(x_sums_ptr, x_row, shown, step, units, STEP, TARGET)
        return acc + (part * scale + low * sums)
    else:
        even, odd = _floats(
            codes_ptr, high_ptr, scales_ptr, minima_ptr, row, byte[None, :], column[None, :], mask,
            units, groups, BITS, GROUP, OFFSET, MINIMUM,
        )  # fmt: skip
        acc = matmul(even.to(x_even.dtype), x_even, acc)
        return matmul(odd.to(x_odd.dtype), x_odd, acc)
