"""Cases of the operations on rows of activations: norms, elementwise steps, rotary embedding, rotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from cpu_kit import HEAD_DIMS, ROWS, Case, Floats, both_kinds, padded, random_rows

from hipfire.kernels.elementwise import ADD, GELU_TANH_MUL, MUL_SIGMOID, SCALE, SILU_MUL, SOFTCAP
from hipfire.kernels.fwht import FWHT, INVERSE_FWHT, signs
from hipfire.kernels.launch import Op
from hipfire.kernels.rms_norm import RMS_NORM
from hipfire.kernels.rope import ROPE, ROPE_ANGLES

COLUMNS = (32, 40, 64, 576, 20, 7)
# of positions that a long context has, and the first ones
POSITIONS = (0, 1, 2, 63, 64, 1000, 32767, 131071)


def _doubles(x: torch.Tensor) -> Floats:
    values: Floats = x.double().numpy()
    return values


def call(op: Op, *arguments: Any) -> Any:
    """Make the `run` of a case whose operation returns its results."""

    def run(launcher: Any) -> tuple[torch.Tensor, ...]:
        results = launcher.run(op, *arguments)
        return results if isinstance(results, tuple) else (results,)

    return run


def _elementwise(
    op: Op, want: Callable[[Floats, Floats], Floats], bound: float, floor: float, size: float = 3.0
) -> Iterator[Case]:
    for rows in ROWS:
        for columns in COLUMNS:
            left = random_rows(rows, columns, seed=columns, size=size)
            right = random_rows(rows, columns, seed=rows)
            result = want(_doubles(left), _doubles(right))
            for kind, x in both_kinds(left):
                other = padded(right, 9) if x is not left else right
                yield Case(f"[{rows}, {columns}] {kind}", call(op, x, other), [result], bound, floor)


def _constant(
    op: Op, want: Callable[[Floats, float], Floats], numbers: tuple[float, ...], bound: float, floor: float
) -> Iterator[Case]:
    for rows in ROWS:
        for columns in COLUMNS:
            number = numbers[(rows + columns) % len(numbers)]
            values = random_rows(rows, columns, seed=rows + columns, size=20.0)
            for kind, x in both_kinds(values):
                label = f"[{rows}, {columns}] {kind}, {number}"
                yield Case(label, call(op, x, number), [want(_doubles(values), number)], bound, floor)


def _gelu(x: Floats) -> Floats:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def add_cases() -> Iterator[Case]:
    yield from _elementwise(ADD, lambda a, b: a + b, 6e-8, 0.0)


def silu_cases() -> Iterator[Case]:
    # far out e^x is bounded, so results near the smallest numbers are not exact
    for size in (3.0, 60.0):
        yield from _elementwise(SILU_MUL, lambda a, b: a / (1.0 + np.exp(-a)) * b, 5e-7, 1e-34, size)


def mul_sigmoid_cases() -> Iterator[Case]:
    yield from _elementwise(MUL_SIGMOID, lambda a, b: a / (1.0 + np.exp(-b)), 5e-7, 1e-34, 60.0)


def gelu_cases() -> Iterator[Case]:
    for size in (1.0, 9.0):
        yield from _elementwise(GELU_TANH_MUL, lambda a, b: _gelu(a) * b, 1e-6, 5e-7, size)


def scale_cases() -> Iterator[Case]:
    yield from _constant(SCALE, lambda x, factor: x * np.float32(factor), (0.25, 33.941125, -1.0), 6e-8, 0.0)


def softcap_cases() -> Iterator[Case]:
    # the tanh is exact to 1.2e-7 of its range
    yield from _constant(SOFTCAP, lambda x, cap: cap * np.tanh(x / cap), (30.0, 50.0, 5.0), 3e-7, 1e-5)


def _norm(x: Floats, weight: Floats, eps: float, offset: float) -> Floats:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * (weight + offset)


def rms_norm_cases() -> Iterator[Case]:
    for rows in ROWS:
        for columns in COLUMNS:
            # rows of very different size, of which one is zero
            sizes = 10.0 ** torch.arange(-3, 2).repeat(4)[:rows, None]
            values = random_rows(rows, columns, seed=3 * columns) * sizes
            values[rows // 2] = 0.0 if rows > 2 else 1.0
            weight, offset = random_rows(columns, seed=5), float(rows % 2)
            want = _norm(_doubles(values), _doubles(weight), 1e-6, offset)
            for kind, x in both_kinds(values):
                run = call(RMS_NORM, x, weight, 1e-6, offset)
                yield Case(f"[{rows}, {columns}] {kind}", run, [want], 1e-6)
    for size in HEAD_DIMS:
        for tokens, heads in ((1, 1), (5, 3), (3, 8)):
            values, weight = random_rows(tokens, heads, size, seed=size), random_rows(size, seed=6)
            want = _norm(_doubles(values), _doubles(weight), 1e-5, 1.0)
            for kind, x in both_kinds(values):
                label = f"[{tokens}, {heads}, {size}] {kind}"
                yield Case(label, call(RMS_NORM, x, weight, 1e-5, 1.0), [want], 1e-6)


def angle_cases() -> Iterator[Case]:
    for half in (1, 4, 10, 16, 40, 128):
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        for count in (1, 3, len(POSITIONS)):
            rows = torch.tensor([(count - i, position) for i, position in enumerate(POSITIONS[:count])])
            # the angle is a float32 by definition; what follows is not
            angles = _doubles(rows[:, 1].float()[:, None] * frequencies[None, :])
            for factor in (1.0, 1.25):
                want = [np.cos(angles) * factor, np.sin(angles) * factor]
                run = call(ROPE_ANGLES, rows, frequencies, factor)
                yield Case(f"{count} x {half}, {factor}", run, want, 0.0, 2e-7)


def rope_cases() -> Iterator[Case]:
    for size in HEAD_DIMS:
        for half in sorted({size // 2, max(1, size // 4)}):
            for tokens, heads in ((1, 1), (5, 3), (17, 2)):
                values = random_rows(tokens, heads, size, seed=size + half)
                angles = random_rows(tokens, half, seed=tokens, size=100.0)
                cos, sin = angles.cos(), angles.sin()
                c, s = _doubles(cos)[:, None], _doubles(sin)[:, None]
                x = _doubles(values)
                first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
                want = np.concatenate((first * c - second * s, second * c + first * s, rest), axis=-1)
                for kind, view in both_kinds(values):
                    label = f"[{tokens}, {heads}, {size}], {2 * half} rotated, {kind}"
                    yield Case(label, call(ROPE, view, cos, sin), [want], 1e-7, 1e-6)


def _hadamard() -> Floats:
    matrix = np.ones((1, 1))
    while len(matrix) < 256:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _rotations(op: Op, first: int, last: int) -> Iterator[Case]:
    matrix = np.diag(_doubles(signs(256, last))) @ _hadamard() @ np.diag(_doubles(signs(256, first))) / 16.0
    for rows in ROWS:
        for segments in (1, 3):
            values = random_rows(rows, 256 * segments, seed=rows)
            want = (_doubles(values).reshape(rows, segments, 256) @ matrix.T).reshape(rows, -1)
            for kind, x in both_kinds(values):
                label = f"[{rows}, {256 * segments}] {kind}"
                yield Case(label, call(op, x), [want], 4e-7, rowwise=True)


def fwht_cases() -> Iterator[Case]:
    yield from _rotations(FWHT, 42, 1042)


def inverse_fwht_cases() -> Iterator[Case]:
    yield from _rotations(INVERSE_FWHT, 1042, 42)
