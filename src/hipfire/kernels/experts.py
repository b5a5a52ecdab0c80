"""A mixture of experts: the choice of each token's experts, and products with the matrices of the chosen.

All experts of one projection are one stack, and operations take the numbers of the chosen ones from a tensor
on the device: which experts run is never known to the host. Every token has as many places as it chooses
experts; place s of token t is row t * places + s of what experts make. A shared expert, which every token
has, may be the last of the stack; then it takes the last place. The references decode one expert at a time
to float32. This file does not know file formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hipfire.kernels.cpu.layouts import PANEL_ROWS, DenseLayout, Layout
from hipfire.kernels.elementwise import gelu_tanh_mul_ref, silu_mul_ref
from hipfire.kernels.fwht import fwht256
from hipfire.kernels.launch import Op
from hipfire.kernels.packed import Activation, PackedMatrix, packed_linear_ref
from hipfire.kernels.panels import Panels

_ACTIVATIONS = {"silu": silu_mul_ref, "gelu_pytorch_tanh": gelu_tanh_mul_ref}


class Experts(Protocol):
    """The matrices [rows, cols] of all experts of one projection, whatever they are kept as."""

    @property
    def experts(self) -> int:
        """The number of experts, a shared one that is the last of them included."""

    @property
    def rows(self) -> int:
        """Rows of one expert's matrix."""

    @property
    def cols(self) -> int:
        """Columns of one expert's matrix."""

    def dense(self, expert: int) -> torch.Tensor:
        """Return one expert's matrix as float32 [rows, cols]."""


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Experts packed for a GPU: one matrix that has the rows of all of them, one expert below the other."""

    matrix: PackedMatrix
    experts: int

    @property
    def rows(self) -> int:
        """Rows of one expert's matrix."""
        return self.matrix.rows // self.experts

    @property
    def cols(self) -> int:
        """Columns of one expert's matrix."""
        return self.matrix.cols

    def dense(self, expert: int) -> torch.Tensor:
        """Return one expert's matrix as float32 [rows, cols]."""
        first = expert * self.rows
        return self.matrix.select(torch.arange(first, first + self.rows, device=self.matrix.codes.device))


@dataclass(frozen=True, eq=False)
class PanelExperts:
    """Experts packed into panels for the CPU kernels.

    An expert's rows are cut into `sections` of equal length, such as gate and up, and each is filled up to
    whole panels. `data` is uint8 [experts * sections * panels of a section * bytes of a panel].
    """

    layout: Layout | DenseLayout
    experts: int
    sections: int
    rows: int
    cols: int
    data: torch.Tensor

    @property
    def section_panels(self) -> int:
        """Panels of one section."""
        return -(-self.rows // self.sections // PANEL_ROWS)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.sections * self.section_panels * self.layout.panel_bytes(self.cols)

    def section(self, expert: int, number: int) -> torch.Tensor:
        """Return the bytes of one section of an expert."""
        size = self.expert_bytes // self.sections
        first = expert * self.expert_bytes + number * size
        return self.data[first : first + size]

    def dense(self, expert: int) -> torch.Tensor:
        """Return one expert's matrix as float32 [rows, cols]."""
        rows = self.rows // self.sections
        parts = [
            Panels(self.layout, rows, self.cols, self.section(expert, number)).dense()
            for number in range(self.sections)
        ]
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class FloatExperts:
    """Experts as floats: `values` [experts, rows, cols] of any floating type."""

    values: torch.Tensor

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.values.shape[0]

    @property
    def rows(self) -> int:
        """Rows of one expert's matrix."""
        return self.values.shape[1]

    @property
    def cols(self) -> int:
        """Columns of one expert's matrix."""
        return self.values.shape[2]

    def dense(self, expert: int) -> torch.Tensor:
        """Return one expert's matrix as float32 [rows, cols]."""
        return self.values[expert].float()


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """Experts as the bytes of a file, decoded at every use.

    `parts` holds for each expert the tensors, uint8 [rows of the part, bytes of a row], that make up its
    rows. `decode(data, rows, cols)` returns flat bytes as float32 [rows, cols].
    """

    parts: tuple[tuple[torch.Tensor, ...], ...]
    cols: int
    decode: Callable[[torch.Tensor, int, int], torch.Tensor]

    @property
    def experts(self) -> int:
        """The number of experts."""
        return len(self.parts)

    @property
    def rows(self) -> int:
        """Rows of one expert's matrix."""
        return sum(part.shape[0] for part in self.parts[0])

    def dense(self, expert: int) -> torch.Tensor:
        """Return one expert's matrix as float32 [rows, cols]."""
        decoded = [self.decode(part.flatten(), part.shape[0], self.cols) for part in self.parts[expert]]
        return torch.cat(decoded)


def route_ref(
    logits: torch.Tensor, count: int, normalize: bool, shared: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts that each token takes and their weights: ids int32 and float32, both [T, places].

    `logits` [T, E] are of any floating type and distance between rows. A token takes the `count` experts
    with the largest logits, in falling order, equal ones from the lowest number on; logits that are not
    numbers come last. Their weights are those of a softmax over all E, divided by their sum with
    `normalize`. With `shared` [T, 1] expert E follows in one more place, weighted by sigmoid(shared).
    """
    scores = logits.float()
    keys = torch.where(scores.isnan(), -torch.inf, scores)
    ids = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, :count]
    weights = torch.softmax(scores, dim=1).gather(1, ids)
    if normalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    if shared is not None:
        ids = torch.cat((ids, torch.full_like(ids[:, :1], logits.shape[1])), dim=1)
        weights = torch.cat((weights, torch.sigmoid(shared.float())), dim=1)
    return ids.int(), weights


def route_packed_ref(
    x: torch.Tensor, matrix: PackedMatrix, experts: int, count: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `route_ref` makes of x W^T, for x [T, cols] and a matrix packed for a GPU.

    Its first `experts` rows make the logits. One more row makes the gate of a shared expert.
    """
    logits = packed_linear_ref(x, matrix)
    shared = logits[:, experts:] if matrix.rows > experts else None
    return route_ref(logits[:, :experts], count, normalize, shared)


def expert_gated_ref(
    x: torch.Tensor, ids: torch.Tensor, stack: Experts, activation: Activation, *, rotated: bool = False
) -> torch.Tensor:
    """Return activation(gate) * up of each token's experts, float32 [T * places, rows / 2].

    x is [T, cols], ids int32 [T, places]. The first half of an expert's rows makes the gate, the second half
    makes up. With `rotated` the result is in the basis of rotated weights.

    Kernels may round activations to int8, 32 at a time scaled by their largest, or to bfloat16; results of
    prefill steps may then be bfloat16.
    """
    tokens, places = ids.shape
    both = _products(x.float().repeat_interleave(places, dim=0), ids, stack)
    gate, up = both.chunk(2, dim=-1)
    hidden = _ACTIVATIONS[activation](gate, up).view(tokens * places, -1)
    return fwht256(hidden) if rotated else hidden


def expert_down_ref(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts
) -> torch.Tensor:
    """Return each token's sum of its experts' products with their weights, float32 [T, rows].

    hidden is [T * places, cols], ids int32 and weights float32 [T, places]. Kernels add the places up in an
    order that depends on their number alone, and round as those of `expert_gated_ref` do.
    """
    tokens, places = ids.shape
    products = _products(hidden.float(), ids, stack).view(tokens, places, -1)
    total = products[:, 0] * weights[:, :1]
    for place in range(1, places):
        total = total + products[:, place] * weights[:, place : place + 1]
    return total


def _products(x: torch.Tensor, ids: torch.Tensor, stack: Experts) -> torch.Tensor:
    """Return x [n, cols] times the matrix of the expert that each row has in `ids` [..] of n numbers."""
    chosen = ids.flatten()
    out = torch.empty(x.shape[0], stack.rows, device=x.device)
    for expert in sorted(set(chosen.tolist())):
        rows = (chosen == expert).nonzero().flatten()
        out[rows] = torch.nn.functional.linear(x[rows], stack.dense(expert))
    return out


def add_gated_ref(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x + sigmoid(gate) * y, float32, for x and y [T, D] and one gate for each token, [T, 1]."""
    return x.float() + torch.sigmoid(gate.float()) * y.float()


def _op(name: str, reference: Callable[..., object], gpu: str) -> Op:
    kernels = {
        "numba": f"hipfire.kernels.cpu.expert_ops.{name}",
        "triton": f"hipfire.kernels.gpu.{gpu}.{name}",
    }
    return Op(name, reference, kernels)


ROUTE = _op("route", route_ref, "route")
ROUTE_PACKED = Op(
    "route_packed", route_packed_ref, {"triton": "hipfire.kernels.gpu.route_packed.route_packed"}
)
ADD_GATED = _op("add_gated", add_gated_ref, "route")
EXPERT_GATED = _op("expert_gated", expert_gated_ref, "experts")
EXPERT_DOWN = _op("expert_down", expert_down_ref, "experts")
