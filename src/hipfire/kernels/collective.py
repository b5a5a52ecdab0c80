"""What processes that share one model do together: sum their parts of a result, or put columns side by side.

The group itself comes from outside. With a group of one there is nothing to do, and no operation is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hipfire.kernels.launch import Op


class Group(Protocol):
    """Processes that run the same operations in the same order, each with its own part of a model."""

    @property
    def size(self) -> int:
        """How many there are."""

    def direct(self, x: torch.Tensor) -> bool:
        """Tell whether `sum_into` takes a tensor of this shape and type; the same in every process."""

    def sum(self, x: torch.Tensor) -> None:
        """Replace x by the sum of all processes' x."""

    def sum_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of all processes' x to `out`, of the same shape and type; x stays as it is."""

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write all processes' x, in their order, to `out` [size, *x.shape]."""


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """How the products of a matrix that is spread over a group become the product of the whole.

    `sum`: each process has some of the columns. `gather`: each has some of the rows, in their order.
    """

    how: Literal["sum", "gather"]
    group: Group


def all_reduce_ref(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of all processes' x, in place of x where that is as good."""
    group.sum(x)
    return x


def gather_columns_ref(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return all processes' x [T, N] side by side, in their order: [T, size * N]."""
    parts = torch.empty((group.size, *x.shape), dtype=x.dtype, device=x.device)
    group.gather(x, parts)
    return parts.transpose(0, 1).reshape(x.shape[0], -1)


ALL_REDUCE = Op(
    "all_reduce", all_reduce_ref, {"triton": "hipfire.kernels.gpu.collective.all_reduce"}, writes=("x",)
)
GATHER_COLUMNS = Op(
    "gather_columns", gather_columns_ref, {"triton": "hipfire.kernels.gpu.collective.gather_columns"}
)
SPREAD_OPS = {"sum": ALL_REDUCE, "gather": GATHER_COLUMNS}
