"""Cases of attention over caches, and of writing them: ragged batches of prefill and decode in many slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cpu_kit import HEAD_DIMS, Case, Floats, both_kinds, random_rows
from row_cases import call

from hipfire.cache.kv import KV_MODES
from hipfire.kernels.kv_cache import KV_WRITE, KV_WRITE_Q8, kv_write_q8_ref, kv_write_ref, q8_decode
from hipfire.kernels.launch import Op

# (slot, first position, length): two prefills, one that goes on, and single tokens, in one batch
MIXED = ((2, 0, 5), (0, 130, 1), (3, 60, 9), (1, 64, 1), (4, 300, 2))
# a sequence over several chunks of 64 keys, fed from the start
LONG = ((0, 0, 150),)


@dataclass(frozen=True)
class Scene:
    """Queries, and caches that hold keys and values up to each slot's last query and poison behind it."""

    mode: str
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    scale: float

    def want(self, window: int | None = None) -> Floats:
        """What attention is in float64."""
        keys, values = _doubles(self.keys), _doubles(self.values)
        queries = self.q.double().numpy()
        group = queries.shape[1] // keys.shape[2]
        out = np.zeros_like(queries)
        for t, (slot, position) in enumerate(self.rows.tolist()):
            first = 0 if window is None else max(0, position - window + 1)
            k = keys[slot, first : position + 1].repeat(group, axis=1)
            v = values[slot, first : position + 1].repeat(group, axis=1)
            scores = np.einsum("hd,nhd->hn", queries[t], k) * np.float32(self.scale)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[t] = np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), v)
        return out


def _doubles(cache: torch.Tensor) -> Floats:
    decoded = q8_decode(cache) if cache.dtype == torch.uint8 else cache
    values: Floats = decoded.double().numpy()
    return values


def poisoned_cache(mode: str, slots: int, length: int, heads: int, size: int) -> torch.Tensor:
    """A cache whose every number is NaN; its slots and positions lie apart."""
    items = KV_MODES[mode].row_items(size)
    cache = torch.empty(slots, length + 3, heads, items + items % 2, dtype=KV_MODES[mode].dtype)
    cache.fill_(255 if mode == "q8" else float("nan"))
    return cache[:, :length, :, :items]


def write_reference(mode: str, cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    (kv_write_q8_ref if mode == "q8" else kv_write_ref)(cache, rows, x)


def write_op(mode: str) -> Op:
    return KV_WRITE_Q8 if mode == "q8" else KV_WRITE


def rows_of(segments: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return torch.tensor([(slot, start + i) for slot, start, length in segments for i in range(length)])


def make_scene(
    mode: str,
    segments: Sequence[tuple[int, int, int]],
    *,
    heads: int,
    group: int,
    size: int,
    seed: int = 0,
    spread: float = 1.0,
) -> Scene:
    """Random queries and caches; with a large `spread` few keys get all the weight."""
    slots = 1 + max(slot for slot, _, _ in segments)
    length = max(start + count for _, start, count in segments) + 2
    caches = [poisoned_cache(mode, slots, length, heads, size) for _ in range(2)]
    for index, cache in enumerate(caches):
        for slot, start, count in segments:
            x = random_rows(start + count, heads, size, seed=seed + 10 * slot + index)
            write_reference(mode, cache, rows_of([(slot, 0, start + count)]), x)
    rows = rows_of(segments)
    q = random_rows(len(rows), heads * group, size, seed=seed + 77, size=spread)
    return Scene(mode, q, caches[0], caches[1], rows, size**-0.5)


def sizes_of(mode: str) -> tuple[int, ...]:
    return tuple(size for size in HEAD_DIMS if size % KV_MODES[mode].block == 0)


def attention_cases(mode: str) -> Iterator[Case]:
    windows = (None, 1, 5, 64, 300)
    for index, size in enumerate(sizes_of(mode)):
        group, heads = (1, 3, 4)[index % 3], 1 + index % 2
        for window in (windows[index % 5], windows[(index + 3) % 5]):
            scene = make_scene(mode, MIXED, heads=heads, group=group, size=size, seed=size)
            yield from _views(scene, window)
    for window in windows:
        yield from _views(make_scene(mode, LONG, heads=2, group=3, size=64), window)
        # one token, which few queries' worth of work is
        yield from _views(make_scene(mode, ((1, 400, 1),), heads=1, group=4, size=64), window)
    yield from _views(make_scene(mode, MIXED, heads=2, group=3, size=64, spread=300.0), None, bound=1e-4)


def _views(scene: Scene, window: int | None, bound: float = 2e-6) -> Iterator[Case]:
    op = KV_MODES[scene.mode].attend
    want = [scene.want(window)]
    for kind, q in both_kinds(scene.q):
        run = call(op, q, scene.keys, scene.values, scene.rows, scene.scale, window)
        label = f"{scene.mode} {(*scene.q.shape, scene.keys.shape[2])} window {window} {kind}"
        yield Case(label, run, want, bound, rowwise=True)


def write_cases(mode: str) -> Iterator[Case]:
    """Every number of the cache is as the reference leaves it, also where nothing is written."""
    for size in sizes_of(mode):
        for heads, segments in ((1, ((0, 0, 1),)), (3, MIXED)):
            rows = rows_of(segments)
            # peaks over all halves that can be scales, and rows of zeros
            x = random_rows(len(rows), heads, size, seed=size)
            x *= (10.0 ** torch.linspace(-9, 6, len(rows)))[:, None, None]
            x[len(rows) // 2] = 0.0
            for kind, view in both_kinds(x):
                yield Case(f"{mode} {tuple(x.shape)} {kind}", _write(mode, rows, view), [np.zeros(1)], 0.0)


def _write(mode: str, rows: torch.Tensor, x: torch.Tensor) -> Any:
    def run(launcher: Any) -> tuple[torch.Tensor, ...]:
        slots, length = 1 + int(rows[:, 0].max()), 2 + int(rows[:, 1].max())
        caches = [poisoned_cache(mode, slots, length, x.shape[1], x.shape[2]) for _ in range(2)]
        launcher.run(write_op(mode), caches[0], rows, x)
        write_reference(mode, caches[1], rows, x)
        got, want = (cache.contiguous().view(torch.uint8) for cache in caches)
        return (torch.tensor([float((got != want).sum())]),)

    return run
