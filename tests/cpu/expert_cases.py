"""Cases of the operations of a mixture of experts, and stacks of panels for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from cpu_kit import Case, Floats, padded, random_rows
from panel_kit import meant, random_panels
from row_cases import call

from hipfire.kernels.cpu.engine import aligned_bytes
from hipfire.kernels.cpu.layouts import LAYOUTS
from hipfire.kernels.experts import (
    ADD_GATED,
    EXPERT_DOWN,
    EXPERT_GATED,
    ROUTE,
    PanelExperts,
)
from hipfire.kernels.panels import Panels

# tokens, places, experts: one token, as many as there are experts, and more than a tile has rows
BATCHES = ((1, 3, 5), (2, 1, 1), (5, 4, 4), (37, 3, 4))


def random_stack(
    name: str, experts: int, sections: int, rows: int, cols: int, seed: int = 0
) -> tuple[PanelExperts, Floats]:
    """A stack whose sections have `rows` rows each, and the weights as float64 [experts, all rows, cols]."""
    parts, weights = [], []
    for number in range(experts * sections):
        panels, values = random_panels(name, rows, cols, seed=seed + number)
        parts.append(panels.data)
        weights.append(values)
    whole = torch.cat(parts)
    data = aligned_bytes(whole.numel())
    data.copy_(whole)
    stack = PanelExperts(LAYOUTS[name], experts, sections, sections * rows, cols, data)
    return stack, np.stack(weights).reshape(experts, sections * rows, cols)


def random_ids(tokens: int, places: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Different experts for each token, the first of them for most."""
    scores = random_rows(tokens, experts, seed=seed)
    scores[:, 0] += 1.0
    return scores.topk(places, dim=1).indices.int()


def seen_by(x: torch.Tensor, stack: PanelExperts) -> Floats:
    return meant(x, Panels(stack.layout, 0, stack.cols, stack.data))


def silu(x: Floats) -> Floats:
    return x / (1.0 + np.exp(-x))


def route_cases() -> Iterator[Case]:
    for tokens, experts, count in ((1, 8, 2), (3, 33, 8), (9, 16, 16), (2, 256, 8)):
        for shared in (False, True):
            logits, gate = random_rows(tokens, experts, seed=experts) * 3, random_rows(tokens, 1, seed=1)
            wide = logits.double().numpy()
            chosen = np.argsort(-wide, axis=1, kind="stable")[:, :count]
            scores = np.exp(wide - wide.max(1, keepdims=True))
            weights = np.take_along_axis(scores / scores.sum(1, keepdims=True), chosen, 1)
            normalize = tokens != 3
            if normalize:
                weights = weights / weights.sum(1, keepdims=True)
            if shared:
                chosen = np.concatenate((chosen, np.full((tokens, 1), experts)), 1)
                weights = np.concatenate((weights, 1 / (1 + np.exp(-gate.double().numpy()))), 1)
            arguments = (padded(logits, 3), count, normalize, padded(gate, 2) if shared else None)
            label = f"{count} of {experts} for {tokens}{' shared' if shared else ''}"
            yield Case(label, call(ROUTE, *arguments), [chosen.astype(np.float64), weights], 1e-6)


def add_gated_cases() -> Iterator[Case]:
    for tokens, columns in ((1, 7), (3, 16), (5, 100)):
        x, y, gate = (random_rows(tokens, size, seed=i) for i, size in enumerate((columns, columns, 1)))
        wide = 1 / (1 + np.exp(-gate.double().numpy())) * y.double().numpy() + x.double().numpy()
        arguments = (padded(x, 4), padded(y, 1), padded(gate, 2))
        yield Case(f"{tokens} x {columns}", call(ADD_GATED, *arguments), [wide], 1e-6, 1e-6)


def gated_cases(names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        for index, (tokens, places, experts) in enumerate(BATCHES):
            rows, cols = (16, 20, 33, 8)[index], (64, 40, 288, 7)[index]
            stack, weights = random_stack(name, experts, 2, rows, cols)
            ids = random_ids(tokens, places, experts)
            values = random_rows(tokens, cols, seed=cols)
            seen = np.repeat(seen_by(values, stack), places, 0)
            both = np.einsum("pc,prc->pr", seen, weights[ids.flatten().numpy()])
            want = silu(both[:, :rows]) * both[:, rows:]
            # results may come out small by chance
            size = np.sqrt(np.square(np.abs(both).mean()) + np.square(want).mean(1))
            label = f"{name} {tokens} x {places} of {experts}: {rows} x {cols}"
            run = call(EXPERT_GATED, padded(values, 3), ids, stack, "silu")
            yield Case(label, run, [want], 1e-5, rowwise=True, size=size)


def down_cases(names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        for index, (tokens, places, experts) in enumerate(BATCHES):
            rows, cols = (16, 20, 33, 8)[index], (64, 40, 288, 7)[index]
            stack, matrices = random_stack(name, experts, 1, rows, cols, seed=5)
            ids, weights = random_ids(tokens, places, experts), random_rows(tokens, places, seed=3)
            hidden = random_rows(tokens * places, cols, seed=cols)
            products = np.einsum("pc,prc->pr", seen_by(hidden, stack), matrices[ids.flatten().numpy()])
            terms = products.reshape(tokens, places, rows) * weights.double().numpy()[:, :, None]
            size = np.sqrt(np.square(terms).sum(1).mean(1))
            run = call(EXPERT_DOWN, padded(hidden, 3), ids, weights, stack)
            label = f"{name} {tokens} x {places} of {experts}: {rows} x {cols}"
            yield Case(label, run, [terms.sum(1)], 3e-6, rowwise=True, size=size)
