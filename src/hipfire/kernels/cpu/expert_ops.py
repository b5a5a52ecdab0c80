"""The operations of a mixture of experts as the CPU engine runs them. This file does not know formats."""

from __future__ import annotations

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu import experts as kernels
from hipfire.kernels.cpu import routes
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.jit import Kernel
from hipfire.kernels.cpu.layouts import PANEL_ROWS, DenseLayout
from hipfire.kernels.cpu.ops import fwht
from hipfire.kernels.cpu.products import FIRST_DENSE, float_rows, quantized
from hipfire.kernels.experts import Experts, PanelExperts
from hipfire.kernels.packed import Activation

_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


def route(
    engine: CpuEngine, logits: torch.Tensor, count: int, normalize: bool, shared: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `route_ref`."""
    logits = float_rows(logits)
    gates = None if shared is None else float_rows(shared)
    tokens, experts = logits.shape
    places = count + (gates is not None)
    ids = torch.empty(tokens, places, dtype=torch.int32)
    weights = torch.empty(tokens, places)
    scratch, each = engine.scratch(4 * experts)
    engine.launch(
        routes.route,
        *(logits, tokens, experts, 4 * logits.stride(0), count, int(normalize)),
        *((0, 0) if gates is None else (gates, 4 * gates.stride(0))),
        *(places, ids, weights, scratch, each),
        reads=(logits,) if gates is None else (logits, gates),
        writes=(ids, weights),
    )
    return ids, weights


def add_gated(engine: CpuEngine, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run `add_gated_ref`."""
    x, y, gate = float_rows(x), float_rows(y), float_rows(gate)
    tokens, columns = x.shape
    out = torch.empty(tokens, columns)
    engine.launch(
        routes.add_gated,
        *(x, y, gate, tokens, columns, 4 * x.stride(0), 4 * y.stride(0), 4 * gate.stride(0), out),
        reads=(x, y, gate),
        writes=(out,),
    )
    return out


def expert_gated(
    engine: CpuEngine,
    x: torch.Tensor,
    ids: torch.Tensor,
    stack: Experts,
    activation: Activation,
    *,
    rotated: bool = False,
) -> torch.Tensor:
    """Run `expert_gated_ref` with activations rounded to int8 where the layout has codes."""
    x, panels = float_rows(x), _panels(stack)
    tokens, places = ids.shape
    y = torch.empty(tokens * places, panels.section_panels * PANEL_ROWS)
    number = _ACTIVATIONS[activation]
    if tokens == 1 and not isinstance(panels.layout, DenseLayout):
        codes, numbers = quantized(engine, x)
        engine.launch(
            kernels.GATED_PAIRS[panels.layout.index],
            *(panels.data, tokens * places, *_sizes(panels), numbers.shape[1], places, ids),
            *(codes, numbers, y, 4 * y.shape[1], number),
            reads=(ids, codes, numbers),
            writes=(y,),
        )
    else:
        _multiply(engine, x, ids, panels, y, places, number)
    hidden = y[:, : panels.rows // 2]
    return fwht(engine, hidden) if rotated else hidden


def expert_down(
    engine: CpuEngine, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts
) -> torch.Tensor:
    """Run `expert_down_ref` with activations rounded to int8 where the layout has codes."""
    hidden, panels = float_rows(hidden), _panels(stack)
    tokens, places = ids.shape
    y = torch.empty(tokens, panels.section_panels * PANEL_ROWS)
    if tokens == 1 and not isinstance(panels.layout, DenseLayout):
        codes, numbers = quantized(engine, hidden)
        size = panels.layout.panel_bytes(panels.cols)
        engine.launch(
            kernels.DOWN_PAIRS[panels.layout.index],
            *(panels.data, tokens, panels.section_panels, panels.expert_bytes, size, numbers.shape[1]),
            *(places, ids, weights, codes, numbers, y, 4 * y.shape[1]),
            reads=(ids, weights, codes, numbers),
            writes=(y,),
        )
        return y[:, : panels.rows]
    products = torch.empty(tokens * places, y.shape[1])
    _multiply(engine, hidden, ids, panels, products, 1, None)
    engine.launch(
        routes.sum_places,
        *(products, tokens, panels.section_panels, 4 * y.shape[1], places, weights, y),
        reads=(products, weights),
        writes=(y,),
    )
    return y[:, : panels.rows]


def _multiply(
    engine: CpuEngine,
    x: torch.Tensor,
    ids: torch.Tensor,
    panels: PanelExperts,
    y: torch.Tensor,
    shared_by: int,
    activation: int | None,
) -> None:
    """Write the products of all pairs, by their experts; `shared_by` pairs in a row have one row of x."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int64)
    starts = torch.empty(panels.experts + 1, dtype=torch.int64)
    engine.launch(
        routes.order_pairs,
        *(ids, pairs, panels.experts, order, starts),
        reads=(ids,),
        writes=(order, starts),
    )
    common = (panels.data, panels.experts, *_sizes(panels))
    out = (y, 4 * y.shape[1], activation or 0)
    if isinstance(panels.layout, DenseLayout):
        engine.launch(
            _dense_kernel(panels.layout, activation),
            *(*common, panels.cols, order, starts, x, 4 * x.stride(0), shared_by, *out),
            reads=(order, starts, x),
            writes=(y,),
        )
        return
    codes, numbers = quantized(engine, x)
    groups = numbers.shape[1]
    sorted_codes = torch.empty(pairs, codes.shape[1], dtype=torch.int8)
    sorted_numbers = torch.empty(pairs, *numbers.shape[1:])
    engine.launch(
        routes.order_codes,
        *(order, pairs, shared_by, groups, codes, numbers, sorted_codes, sorted_numbers),
        reads=(order, codes, numbers),
        writes=(sorted_codes, sorted_numbers),
    )
    scratch, each = engine.scratch(kernels.many_scratch_nbytes(panels.cols))
    many = kernels.DOWN_GROUPS if activation is None else kernels.GATED_GROUPS
    engine.launch(
        many[panels.layout.index],
        *(*common, groups, order, starts, sorted_codes, sorted_numbers, *out, scratch, each),
        reads=(order, starts, sorted_codes, sorted_numbers),
        writes=(y,),
    )


def _dense_kernel(layout: DenseLayout, activation: int | None) -> Kernel:
    many = kernels.DOWN_DENSE if activation is None else kernels.GATED_DENSE
    found: Kernel = many[layout.index - FIRST_DENSE]
    return found


def _sizes(panels: PanelExperts) -> tuple[int, int, int, int]:
    """Return panels of a section, and bytes of an expert, of a section and of a panel."""
    expert = panels.expert_bytes
    return (
        panels.section_panels,
        expert,
        expert // panels.sections,
        panels.layout.panel_bytes(panels.cols),
    )


def _panels(stack: Experts) -> PanelExperts:
    if not isinstance(stack, PanelExperts):
        raise InternalError("experts are not packed into panels")
    return stack
