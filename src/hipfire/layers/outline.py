"""The blocks that stand for all of a model's: what a step takes of memory repeats itself as its blocks do.

This file compares blocks by their form: types, sizes and settings, not weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch

from hipfire.layers.context import RopeTable

Item = TypeVar("Item")

# so many rounds of a repeating order of blocks are kept: the first differs from the others, and results that
# live from block to block take turns at their places
_ROUNDS = 4
# what differs between blocks that are alike: their number
_NUMBERS = frozenset({"layer"})


def form(value: Any) -> Hashable:
    """Return what two parts of models have in common if steps through them take the same memory."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if value is None or isinstance(value, str | int | float | torch.dtype):
        return value
    if isinstance(value, tuple | list):
        return tuple(form(item) for item in value)
    # angles are computed once for each table of a step, whatever is in it
    if isinstance(value, RopeTable) or not _is_part(value):
        return id(value)
    named = sorted(_attributes(value).items())
    return type(value), tuple((name, form(item)) for name, item in named if name not in _NUMBERS)


def outline(blocks: Sequence[Item]) -> tuple[Item, ...]:
    """Return the first rounds of `blocks` if their forms repeat, such that the end is the same; else all."""
    forms = [form(block) for block in blocks]
    count = len(blocks)
    period = next(
        step
        for step in range(1, count + 1)
        if all(first == later for first, later in zip(forms, forms[step:], strict=False))
    )
    kept = count - max(0, count // period - _ROUNDS) * period
    return tuple(blocks[:kept])


def _is_part(value: Any) -> bool:
    return type(value).__module__.startswith(
        ("hipfire.layers.", "hipfire.models.", "hipfire.kernels.packed", "hipfire.kernels.experts")
    )


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value))
