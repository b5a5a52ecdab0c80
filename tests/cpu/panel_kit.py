"""Weights in panels, made from codes and scales of the tests' own choice, and cases of products with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from cpu_kit import ROWS, Case, Floats, both_kinds, random_rows, rounded_to_int8
from row_cases import call

from hipfire.kernels.cpu.engine import aligned_bytes
from hipfire.kernels.cpu.layouts import LAYOUTS, DenseLayout, Layout
from hipfire.kernels.panels import PANEL_LINEAR, PANEL_SELECT, Panels

Array = np.ndarray[Any, Any]
OUTPUTS = (1, 15, 16, 17, 33, 100)
COLUMNS = (32, 40, 64, 576, 20, 7, 300)
DENSE_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def code_range(layout: Layout) -> tuple[int, int]:
    """The lowest code and the one behind the highest."""
    return (-128, 128) if layout.signed else (0, 1 << layout.bits)


def _pack_run(layout: Layout, codes: Array) -> bytes:
    """Pack codes [16, 32]; byte 4 r + j of word t is column 4 t + j of row r."""
    words = codes.reshape(16, 8, 4).transpose(1, 0, 2).reshape(8, 64)
    if layout.bits == 8:
        return words.astype(np.int8).tobytes()
    packed = [(words[0::2] & 15) | (words[1::2] & 15) << 4]
    extra = layout.bits - 4
    if extra:
        shifts = (extra * np.arange(8 // extra)).reshape(1, -1, 1)
        packed.append(((words >> 4).reshape(extra, -1, 64) << shifts).sum(1))
    return b"".join(part.astype(np.uint8).tobytes() for part in packed)


def make_panels(
    layout: Layout, codes: Array, scales: Array, minima: Array | None = None
) -> tuple[Panels, Floats]:
    """Lay out codes [N, K] with scales and minima [N, groups]; returns them as panels and as float64."""
    rows, cols = codes.shape
    kind = np.float16 if layout.half else np.float32
    scales = scales.astype(kind)
    low = np.zeros_like(scales) if minima is None else minima.astype(kind)
    per_group = np.arange(cols) // layout.group
    weights = scales.astype(np.float64)[:, per_group] * (codes.astype(np.float64) - layout.offset)
    weights += low.astype(np.float64)[:, per_group]
    runs, panels = -(-cols // 32), -(-rows // 16)
    grid = np.zeros((16 * panels, 32 * runs), np.int64)
    grid[:rows, :cols] = codes
    groups = max(-(-32 * runs // layout.group), scales.shape[1])
    headers = np.zeros((2, 16 * panels, groups), kind)
    headers[0, :rows, : scales.shape[1]], headers[1, :rows, : scales.shape[1]] = scales, low
    pieces = []
    for p in range(panels):
        lanes = slice(16 * p, 16 * p + 16)
        for run in range(runs):
            if run % layout.subs == 0:
                first = run * 32 // layout.group
                pieces += [headers[0, lanes, first + part].tobytes() for part in range(layout.parts)]
                if layout.minimum:
                    pieces.append(headers[1, lanes, first].tobytes())
            pieces.append(_pack_run(layout, grid[lanes, 32 * run : 32 * run + 32]))
    return Panels(layout, rows, cols, _aligned(b"".join(pieces))), weights


def _aligned(data: bytes) -> torch.Tensor:
    memory = aligned_bytes(len(data))
    memory.numpy()[:] = np.frombuffer(data, np.uint8)
    return memory


def random_panels(name: str, rows: int, cols: int, seed: int = 0) -> tuple[Panels, Floats]:
    """Panels of codes over their whole range, with scales of either sign and very different size."""
    rng, layout = np.random.default_rng(1000 * rows + cols + seed), LAYOUTS[name]
    if isinstance(layout, DenseLayout):
        values = torch.from_numpy(rng.standard_normal((rows, cols), np.float32)).to(DENSE_TYPES[name])
        grid = torch.zeros(-(-rows // 16) * 16, cols, dtype=values.dtype)
        grid[:rows] = values
        data = grid.view(-1, 16, cols).transpose(1, 2).contiguous().flatten().view(torch.uint8)
        return Panels(layout, rows, cols, _aligned(data.numpy().tobytes())), values.double().numpy()
    codes = rng.integers(*code_range(layout), (rows, cols))
    groups = (rows, -(-cols // layout.group))
    scales = 10.0 ** rng.uniform(-4, -1, groups) * rng.choice((-1.0, 1.0), groups)
    minima = -8.0 * scales * rng.uniform(0.5, 1.5, groups) if layout.minimum else None
    return make_panels(layout, codes, scales, minima)


def meant(x: torch.Tensor, panels: Panels) -> Floats:
    """The activations as the product with these panels sees them."""
    return x.double().numpy() if isinstance(panels.layout, DenseLayout) else rounded_to_int8(x)[2]


def shapes(name: str, seed: int) -> Iterator[tuple[int, int, int]]:
    """Ragged numbers of tokens, outputs and columns: every one of each list, in changing company."""
    layout, columns = LAYOUTS[name], COLUMNS
    if isinstance(layout, Layout) and layout.subs > 1:
        columns = (*COLUMNS, layout.group, 5 * layout.group // 2)
    for i in range(len(columns) + len(OUTPUTS)):
        outputs = OUTPUTS[(2 * i + i // 3) % len(OUTPUTS)]
        yield ROWS[(i + seed) % len(ROWS)], outputs, columns[i % len(columns)]


def linear_cases(names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        for tokens, rows, cols in shapes(name, seed=0):
            panels, weights = random_panels(name, rows, cols)
            # tokens of very different size
            values = random_rows(tokens, cols, seed=cols) * 4.0 ** torch.arange(tokens)[:, None]
            seen = meant(values, panels)
            want, size = seen @ weights.T, np.sqrt((seen**2 @ weights.T**2).mean(1))
            for kind, x in both_kinds(values):
                label = f"{name} {tokens} x {rows} x {cols} {kind}"
                yield Case(label, call(PANEL_LINEAR, x, panels), [want], 1e-6, rowwise=True, size=size)


def select_cases(names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        for tokens, rows, cols in shapes(name, seed=1):
            panels, weights = random_panels(name, rows, cols, seed=1)
            numbers = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(rows))
            want = weights[numbers.numpy()]
            label = f"{name} {tokens} of {rows} x {cols}"
            yield Case(label, call(PANEL_SELECT, panels, numbers), [want], 3e-7, rowwise=True)
