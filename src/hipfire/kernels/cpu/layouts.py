"""How weights lie in memory for the CPU kernels: panels of sixteen rows, one stream of bytes for each.

A panel is a sequence of weight groups along its columns. A group begins with the scales of its sixteen rows
(then their minima, where the layout has any), followed by the codes of its columns, 32 at a time as `dots`
describes. Reading a panel front to back is all that a matrix product does. Rows are filled up to sixteen and
columns to 32 with zeros. Dense layouts hold the sixteen values of a column side by side.
This file knows no file format; `pack` maps formats to layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PANEL_ROWS = 16
SUB_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """weight = scale * (code - offset) + minimum, for codes of `bits` bits.

    `group` columns share scale and minimum. These are IEEE halves if `half`, else float32. Without `minimum`
    there is none. `signed` codes are two's complement. `index` is the layout's number in programs.
    """

    index: int
    name: str
    bits: int
    group: int
    half: bool
    minimum: bool = False
    offset: int = 0
    signed: bool = False

    @property
    def parts(self) -> int:
        """Return how many groups share 32 columns: two for groups of 16, else one."""
        return max(1, SUB_COLUMNS // self.group)

    @property
    def subs(self) -> int:
        """Return how many runs of 32 columns a group's header serves."""
        return max(1, self.group // SUB_COLUMNS)

    @property
    def header_bytes(self) -> int:
        """Return the bytes of the scales and minima before each group's codes."""
        return PANEL_ROWS * (2 if self.half else 4) * (2 if self.minimum else 1) * self.parts

    @property
    def sub_bytes(self) -> int:
        """Return the bytes of the codes of 32 columns."""
        return PANEL_ROWS * SUB_COLUMNS * self.bits // 8

    def panel_bytes(self, cols: int) -> int:
        """Return the bytes of one panel with `cols` columns."""
        subs = -(-cols // SUB_COLUMNS)
        return -(-subs // self.subs) * self.header_bytes + subs * self.sub_bytes

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a [rows, cols] matrix."""
        return -(-rows // PANEL_ROWS) * self.panel_bytes(cols)


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Weights of a floating type, `itemsize` bytes each; products use float32 activations."""

    index: int
    name: str
    itemsize: int

    def panel_bytes(self, cols: int) -> int:
        """Return the bytes of one panel with `cols` columns."""
        return PANEL_ROWS * cols * self.itemsize

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a [rows, cols] matrix."""
        return -(-rows // PANEL_ROWS) * self.panel_bytes(cols)


CODE_LAYOUTS: tuple[Layout, ...] = (
    Layout(0, "u4g32", 4, 32, half=True, minimum=True),
    Layout(1, "o4g32", 4, 32, half=True, offset=8),
    Layout(2, "u5g32", 5, 32, half=True, minimum=True),
    Layout(3, "o5g32", 5, 32, half=True, offset=16),
    Layout(4, "o6g16", 6, 16, half=True, offset=32),
    Layout(5, "i8g32", 8, 32, half=True, signed=True),
    Layout(6, "u4g128", 4, 128, half=False, minimum=True),
    Layout(7, "u4g256", 4, 256, half=False, minimum=True),
    Layout(8, "u4g128h", 4, 128, half=True, minimum=True),
    Layout(9, "u6g256", 6, 256, half=False, minimum=True),
    Layout(10, "u6g128h", 6, 128, half=True, minimum=True),
)
DENSE_LAYOUTS: tuple[DenseLayout, ...] = (
    DenseLayout(11, "f32", 4),
    DenseLayout(12, "f16", 2),
    DenseLayout(13, "bf16", 2),
)
_ALL: tuple[Layout | DenseLayout, ...] = (*CODE_LAYOUTS, *DENSE_LAYOUTS)
LAYOUTS: Mapping[str, Layout | DenseLayout] = {layout.name: layout for layout in _ALL}
