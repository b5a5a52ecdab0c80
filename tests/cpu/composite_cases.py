"""Cases of operations that are several in one: a sum with its norm, and what precedes attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from attention_cases import MIXED, poisoned_cache, rows_of, sizes_of
from cpu_kit import ROWS, Case, Floats, both_kinds, padded, random_rows
from row_cases import COLUMNS, call

from hipfire.cache.kv import KV_MODES
from hipfire.kernels.kv_cache import q8_decode
from hipfire.kernels.residual import RESIDUAL_NORM

# relative RMS of what a cache holds
CACHE_BOUNDS = {"f32": 1e-6, "bf16": 3e-3, "q8": 1e-2}


def _norm(x: Floats, weight: torch.Tensor, eps: float, offset: float) -> Floats:
    scaled: Floats = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return scaled * (weight.double().numpy() + offset)


def residual_norm_cases() -> Iterator[Case]:
    for rows in ROWS:
        for columns in COLUMNS:
            x, delta = (random_rows(rows, columns, seed=columns + i, size=1.0 + 3 * i) for i in (0, 1))
            weight, delta_weight = (random_rows(columns, seed=7 + i) for i in (0, 1))
            offset, normalized = float(rows % 2), columns % 3 == 0
            added = delta.double().numpy()
            if normalized:
                added = _norm(added, delta_weight, 1e-5, offset)
            total = x.double().numpy() + added
            want = [total, _norm(total, weight, 1e-5, offset)]
            for kind, view in both_kinds(x):
                other = padded(delta, 5) if view is not x else delta
                arguments = (view, other, weight, 1e-5, offset, delta_weight if normalized else None)
                label = f"[{rows}, {columns}] {'normalized ' if normalized else ''}{kind}"
                yield Case(label, call(RESIDUAL_NORM, *arguments), want, 1e-6, rowwise=True)


def attention_input_cases(mode: str) -> Iterator[Case]:
    rows = rows_of(MIXED)
    for size in sizes_of(mode):
        normed, half = size % 64 == 0, size // 2 if size != 24 else 4
        q, k, v = (random_rows(len(rows), heads, size, seed=size + i) for i, heads in enumerate((6, 2, 2)))
        angles = random_rows(len(rows), half, seed=size, size=100.0)
        weights = [random_rows(size, seed=i) for i in (1, 2)] if normed else [None, None]
        turned = [
            _turned(x if weight is None else _norm(x, weight, 1e-6, 1.0), angles)
            for x, weight in zip((q.double().numpy(), k.double().numpy()), weights, strict=True)
        ]
        for kind, view in both_kinds(q):
            apart = (padded(k, 3), padded(v, 11)) if view is not q else (k, v)
            enter = _enter(mode, rows, (view, *apart), angles, weights)
            label = f"{mode} {tuple(q.shape)} {'normalized ' if normed else ''}{kind}"
            yield Case(label, lambda run, enter=enter: enter(run)[:1], turned[:1], 1e-6, rowwise=True)
            held = [turned[1], v.double().numpy(), np.zeros(1)]
            stored = CACHE_BOUNDS[mode]
            yield Case(label, lambda run, enter=enter: enter(run)[1:], held, stored, rowwise=True)


def _turned(x: Floats, angles: torch.Tensor) -> Floats:
    c, s = (part.double().numpy()[:, None] for part in (angles.cos(), angles.sin()))
    half = c.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate((first * c - second * s, second * c + first * s, rest), axis=-1)


def _enter(
    mode: str,
    rows: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    angles: torch.Tensor,
    weights: list[torch.Tensor | None],
) -> Any:
    """Return what gives queries, the keys and values in the caches, and the bytes changed elsewhere."""

    def run(launcher: Any) -> tuple[torch.Tensor, ...]:
        slots, length = 1 + int(rows[:, 0].max()), 2 + int(rows[:, 1].max())
        heads, size = inputs[1].shape[1:]
        caches = [poisoned_cache(mode, slots, length, heads, size) for _ in range(2)]
        before = [cache.clone() for cache in caches]
        arguments = (*inputs, rows, angles.cos(), angles.sin(), *caches, *weights, 1e-6, 1.0)
        queries = launcher.run(KV_MODES[mode].enter, *arguments)
        place = rows[:, 0], rows[:, 1]
        held = [cache[place] for cache in caches]
        changed = 0
        for cache, old in zip(caches, before, strict=True):
            old[place] = cache[place]
            same = cache.contiguous().view(torch.uint8) == old.contiguous().view(torch.uint8)
            changed += int((~same).sum())
        decoded = [q8_decode(data) if mode == "q8" else data for data in held]
        return queries, *decoded, torch.tensor([float(changed)])

    return run
