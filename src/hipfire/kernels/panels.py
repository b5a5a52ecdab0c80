"""Products with weights that are packed into panels, and rows of such weights.

The panels are those of the CPU kernels (`cpu/layouts.py`). The references here decode them to float32, so a
model whose weights are packed can also be run without any compiled kernel, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipfire.kernels.cpu.layouts import PANEL_ROWS, SUB_COLUMNS, DenseLayout, Layout
from hipfire.kernels.launch import Op

_DENSE_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Panels:
    """A [rows, cols] matrix in panels: uint8 `data` of exactly the layout's size, at a 64-byte address."""

    layout: Layout | DenseLayout
    rows: int
    cols: int
    data: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return the matrix as float32 [rows, cols]."""
        if isinstance(self.layout, DenseLayout):
            values = self.data.view(_DENSE_TYPES[self.layout.name]).view(-1, self.cols, PANEL_ROWS)
            return values.float().transpose(1, 2).reshape(-1, self.cols)[: self.rows]
        panels = self.data.view(-1, self.layout.panel_bytes(self.cols))
        subs = -(-self.cols // SUB_COLUMNS)
        groups, rest = divmod(subs, self.layout.subs)
        size = self.layout.header_bytes + self.layout.subs * self.layout.sub_bytes
        parts = []
        if groups:
            whole = panels[:, : groups * size].reshape(-1, size)
            decoded = _decode_groups(whole, self.layout, self.layout.subs)
            parts.append(decoded.view(panels.shape[0], groups, PANEL_ROWS, -1).transpose(1, 2).flatten(2))
        if rest:
            parts.append(_decode_groups(panels[:, groups * size :], self.layout, rest))
        matrix = torch.cat(parts, dim=-1).reshape(-1, subs * SUB_COLUMNS)
        return matrix[: self.rows, : self.cols].contiguous()


def _decode_groups(data: torch.Tensor, layout: Layout, subs: int) -> torch.Tensor:
    """Decode uint8 [n, header and codes of `subs` runs of 32 columns] to float32 [n, 16, 32 * subs]."""
    n = data.shape[0]
    kind = torch.float16 if layout.half else torch.float32
    header = data[:, : layout.header_bytes].contiguous().view(kind).float().view(n, -1, PANEL_ROWS)
    runs = data[:, layout.header_bytes :].reshape(n * subs, layout.sub_bytes)
    codes = _decode_codes(runs, layout).view(n, subs, PANEL_ROWS, SUB_COLUMNS)
    codes = codes.transpose(1, 2).reshape(n, PANEL_ROWS, layout.parts, -1).float() - layout.offset
    # [n, parts, 16] -> [n, 16, parts, 1]
    values = codes * header[:, : layout.parts].transpose(1, 2).unsqueeze(-1)
    if layout.minimum:
        values += header[:, layout.parts :].transpose(1, 2).unsqueeze(-1)
    return values.flatten(2)


def _decode_codes(runs: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the codes of uint8 [n, sub_bytes] as int16 [n, 16, 32]."""
    n, word = runs.shape[0], 4 * PANEL_ROWS
    if layout.bits == 8:
        words = runs.view(torch.int8 if layout.signed else torch.uint8).view(n, 8, word).short()
    else:
        pairs = runs[:, : 4 * word].reshape(n, 4, 1, word)
        words = torch.cat((pairs & 15, pairs >> 4), dim=2).view(n, 8, word).short()
        extra = layout.bits - 4
        if extra:
            planes = runs[:, 4 * word :].reshape(n, extra, 1, word)
            shifts = torch.arange(0, 8, extra, dtype=torch.uint8).view(1, 1, -1, 1)
            high = (planes >> shifts) & ((1 << extra) - 1)
            words = words | (high.view(n, 8, word).short() << 4)
    return words.view(n, 8, PANEL_ROWS, 4).transpose(1, 2).reshape(n, PANEL_ROWS, SUB_COLUMNS)


def panel_linear_ref(x: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Return x W^T as float32 [T, N] for x [T, K], with activations as they are.

    Compiled kernels round activations to int8 for layouts with codes: 32 at a time, scaled by their largest.
    """
    return torch.nn.functional.linear(x.float(), panels.dense())


def panel_select_ref(panels: Panels, rows: torch.Tensor) -> torch.Tensor:
    """Return the given rows, int64 [T], of the matrix as float32 [T, cols]."""
    return panels.dense().index_select(0, rows)


PANEL_LINEAR = Op("panel_linear", panel_linear_ref, {"numba": "hipfire.kernels.cpu.products.panel_linear"})
PANEL_SELECT = Op("panel_select", panel_select_ref, {"numba": "hipfire.kernels.cpu.products.panel_select"})
