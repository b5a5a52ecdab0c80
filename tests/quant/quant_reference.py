"""The byte rules of the weight formats once more, slowly: Python integers, `struct`, numpy float32 scalars.

Written from the format description alone, one weight at a time, to check the encoders byte for byte. Signs
come from the published bitmaps, not from the generator.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import numpy as np

F32 = np.float32
SIGNS_IN = "6f431f7edba4cc7df732616531ea6134acf88f3f38308757889d933fa3258e40"
SIGNS_OUT = "61b35e61a484ab8e3bc0812461c61c51b819d43a93ecf3be71423aeee9af0f39"

GroupEncoder = Callable[[Sequence[np.float32]], bytes]
GroupDecoder = Callable[[bytes], list[np.float32]]


def sign_list(bitmap: str) -> list[np.float32]:
    word = int.from_bytes(bytes.fromhex(bitmap), "little")
    return [F32(1.0) if word >> i & 1 else F32(-1.0) for i in range(256)]


def f16_bits(value: np.float32) -> int:
    """float32 -> the 16 bits of float16, dropping bits."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    sign, exponent, fraction = bits >> 31 << 15, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return sign | 0x7C00 | ((fraction >> 13 | 1) if fraction else 0)
    exponent -= 112
    if exponent >= 31:
        return sign | 0x7C00
    if exponent >= 1:
        return sign | exponent << 10 | fraction >> 13
    if exponent < -10:
        return sign
    return sign | (fraction | 0x800000) >> (14 - exponent)


def f16_value(bits: int) -> np.float32:
    return F32(struct.unpack("<e", struct.pack("<H", bits))[0])


def stream(codes: Sequence[int], bits: int) -> bytes:
    word = sum(code << (bits * i) for i, code in enumerate(codes))
    return word.to_bytes(len(codes) * bits // 8, "little")


def unstream(data: bytes, bits: int) -> list[int]:
    word = int.from_bytes(data, "little")
    return [word >> (bits * i) & ((1 << bits) - 1) for i in range(len(data) * 8 // bits)]


def low_high(values: Sequence[np.float32]) -> tuple[np.float32, np.float32]:
    """Minimum and maximum with -0 below +0."""
    ordered = sorted(values, key=lambda v: (float(v), math.copysign(1.0, v)))
    return ordered[0], ordered[-1]


def trunc_code(value: np.float32, qmax: int) -> int:
    with np.errstate(all="ignore"):
        shifted = value + F32(0.5)
    if math.isnan(shifted) or shifted <= 0:
        return 0
    return qmax if shifted >= qmax else int(shifted)


def affine_f32(values: Sequence[np.float32], bits: int, elements: int) -> bytes:
    qmax = (1 << bits) - 1
    lo, hi = low_high(values)
    with np.errstate(all="ignore"):
        span = hi - lo
        scale, inverse = F32(1.0), F32(0.0)
        if span > 0:
            scale = span / F32(qmax)
            inverse = F32(1.0) / scale
        codes = [trunc_code((v - lo) * inverse, qmax) for v in values]
    codes += [0] * (elements - len(codes))
    return struct.pack("<ff", scale, lo) + stream(codes, bits)


def affine_f32_decode(block: bytes, bits: int) -> list[np.float32]:
    scale, lo = (F32(v) for v in struct.unpack("<ff", block[:8]))
    return [scale * F32(code) + lo for code in unstream(block[8:], bits)]


def affine_f16(values: Sequence[np.float32], bits: int) -> bytes:
    qmax = (1 << bits) - 1
    header, codes = b"", []
    for half in (values[:128], values[128:]):
        lo, hi = low_high(half)
        step_bits = 0 if hi == lo else f16_bits((hi - lo) / F32(qmax))
        step, zero = f16_value(step_bits), f16_value(f16_bits(lo))
        header += struct.pack("<HH", step_bits, f16_bits(lo))
        if step == 0:
            codes += [0] * 128
        else:
            inverse = F32(1.0) / step
            for v in half:
                scaled = math.floor((v - zero) * inverse + F32(0.5))
                codes.append(min(max(scaled, 0), qmax))
    return header + stream(codes, bits)


def affine_f16_decode(block: bytes, bits: int) -> list[np.float32]:
    header = [f16_value(b) for b in struct.unpack("<HHHH", block[:8])]
    codes = unstream(block[8:], bits)
    return [header[2 * (i // 128)] * F32(c) + header[2 * (i // 128) + 1] for i, c in enumerate(codes)]


def int8_f16(values: Sequence[np.float32]) -> bytes:
    with np.errstate(all="ignore"):
        scale = max(abs(v) for v in values) / F32(127.0)
        inverse = F32(1.0) / scale if scale > 0 else F32(0.0)
        scaled = [v * inverse for v in values]
    codes = []
    for x in scaled:
        whole = 0 if math.isnan(x) else 128 if math.isinf(x) else math.floor(abs(float(x)) + 0.5)
        codes.append(min(max(int(math.copysign(whole, x)), -128), 127))
    codes += [0] * (32 - len(codes))
    return struct.pack("<H32b", f16_bits(scale), *codes)


def int8_f16_decode(block: bytes) -> list[np.float32]:
    scale, *codes = struct.unpack("<H32b", block)
    return [F32(code) * f16_value(scale) for code in codes]


def butterflies(values: Sequence[np.float32]) -> list[np.float32]:
    work = list(values)
    stride = 1
    while stride < 256:
        for i in range(256):
            if not i & stride:
                a, b = work[i], work[i + stride]
                work[i], work[i + stride] = a + b, a - b
        stride *= 2
    return work


def rotate(values: Sequence[np.float32]) -> list[np.float32]:
    """Rotate up to 256 values; missing ones are zeros."""
    padded = list(values) + [F32(0.0)] * (256 - len(values))
    work = butterflies([v * s for v, s in zip(padded, sign_list(SIGNS_IN), strict=True)])
    return [v * (s * F32(0.0625)) for v, s in zip(work, sign_list(SIGNS_OUT), strict=True)]


def unrotate(values: Sequence[np.float32]) -> list[np.float32]:
    work = butterflies([v * s for v, s in zip(values, sign_list(SIGNS_OUT), strict=True)])
    return [v * (s * F32(0.0625)) for v, s in zip(work, sign_list(SIGNS_IN), strict=True)]


# name -> (group, encoder of one group, decoder of one block)
FORMATS: dict[str, tuple[int, GroupEncoder, GroupDecoder]] = {
    "Q8F16": (32, int8_f16, int8_f16_decode),
    "HFQ4G256": (256, lambda v: affine_f32(v, 4, 256), lambda b: affine_f32_decode(b, 4)),
    "HFQ4G128": (128, lambda v: affine_f32(v, 4, 128), lambda b: affine_f32_decode(b, 4)),
    "HFQ6G256": (256, lambda v: affine_f32(v, 6, 256), lambda b: affine_f32_decode(b, 6)),
    "MQ4G256": (256, lambda v: affine_f32(rotate(v), 4, 256), lambda b: affine_f32_decode(b, 4)),
    "MQ6G256": (256, lambda v: affine_f32(rotate(v), 6, 256), lambda b: affine_f32_decode(b, 6)),
    "MQ4G256V2": (256, lambda v: affine_f16(rotate(v), 4), lambda b: affine_f16_decode(b, 4)),
    "MQ6G256V2": (256, lambda v: affine_f16(rotate(v), 6), lambda b: affine_f16_decode(b, 6)),
}


def pack_flat(values: np.ndarray, name: str) -> bytes:
    """Cut groups across the whole tensor, over row ends, as old files do."""
    group, encode, _ = FORMATS[name]
    flat = values.reshape(-1)
    return b"".join(encode(list(flat[i : i + group])) for i in range(0, flat.size, group))


def pack_rows(values: np.ndarray, name: str) -> bytes:
    """Start each row with a group of its own."""
    return b"".join(pack_flat(row, name) for row in values)


def unpack_flat(data: bytes, name: str, rows: int, cols: int, *, original: bool = False) -> np.ndarray:
    """Decode flat data; `original` undoes the rotation of each block."""
    group, encode, decode = FORMATS[name]
    size = len(encode([F32(0.0)] * group))
    flat: list[np.float32] = []
    for start in range(0, len(data), size):
        values = decode(data[start : start + size])
        flat += unrotate(values) if original else values
    return np.array(flat[: rows * cols], dtype=F32).reshape(rows, cols)
