"""The next token of each row, on the device: penalties, cuts and a draw, with no wait for the host.

A row is cut into chunks by the size of the vocabulary alone: what is drawn for it does not depend on its
neighbors. This file does not know requests, nor how the cuts are found.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.sample_cuts import (
    CHUNK,
    COLDEST,
    SETTINGS,
    TEMPERATURE,
    Batch,
    Cut,
    cut_count,
    cut_mass,
    rank_of,
    row_peak,
    value_of,
    weight_of,
)
from hipfire.kernels.sample import SampleStages, Setting

_HISTORY: Final = 64
_DRAW_WARPS: Final = 8

_REPEAT = tl.constexpr(int(Setting.REPEAT))
_PRESENCE = tl.constexpr(int(Setting.PRESENCE))
_FREQUENCY = tl.constexpr(int(Setting.FREQUENCY))


@triton.jit
def _copy(logits_ptr, work_ptr, vocabulary, row_stride, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    values = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0)
    tl.store(work_ptr + row * vocabulary + token, values, mask=inside)


@triton.jit
def _penalize(
    logits_ptr,
    work_ptr,
    history_ptr,
    settings_ptr,
    vocabulary,
    row_stride,
    window,
    history_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(history_ptr + row * history_stride + place, mask=place < window, other=-1)
    count = tl.zeros((BLOCK,), tl.int32)
    earlier = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, window, BLOCK):
        other = start + tl.arange(0, BLOCK)
        others = tl.load(history_ptr + row * history_stride + other, mask=other < window, other=-1)
        same = (token[:, None] == others[None, :]).to(tl.int32)
        count += tl.sum(same, axis=1)
        earlier += tl.sum(tl.where(other[None, :] < place[:, None], same, 0), axis=1)
    # each distinct token is written by its first occurrence
    first = (token >= 0) & (token < vocabulary) & (earlier == 0)
    value = tl.load(logits_ptr + row * row_stride + token, mask=first, other=0.0).to(tl.float32)
    settings = settings_ptr + row * SETTINGS
    repeat = tl.load(settings + _REPEAT)
    value = tl.where(value > 0, value / repeat, value * repeat)
    value -= tl.load(settings + _PRESENCE) + tl.load(settings + _FREQUENCY) * count.to(tl.float32)
    tl.store(work_ptr + row * vocabulary + token, value, mask=first)


@triton.jit
def _peaks(values_ptr, peaks_ptr, places_ptr, vocabulary, chunks, row_stride, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    values = tl.load(values_ptr + row * row_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    # a NaN spoils its row as +inf does
    values = tl.where(values != values, float("inf"), values)
    peak = tl.max(values, axis=0)
    place = tl.min(tl.where(inside & (values == peak), token, vocabulary), axis=0)
    tl.store(peaks_ptr + row * chunks + chunk, peak)
    tl.store(places_ptr + row * chunks + chunk, place)


@triton.jit
def _best(peaks_ptr, places_ptr, row, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row and the smallest token that has it."""
    index = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + index, mask=index < chunks, other=-float("inf"))
    places = tl.load(places_ptr + row * chunks + index, mask=index < chunks, other=2147483647)
    peak = tl.max(peaks, axis=0)
    return peak, tl.min(tl.where(peaks == peak, places, 2147483647), axis=0)


@triton.jit
def _greedy(peaks_ptr, places_ptr, ids_ptr, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, place = _best(peaks_ptr, places_ptr, row, chunks, CHUNKS)
    usable = (peak < float("inf")) & (peak > -float("inf"))
    tl.store(ids_ptr + row, tl.where(usable, place, -1).to(tl.int64))


@triton.jit
def _kept_masses(
    values_ptr,
    settings_ptr,
    peaks_ptr,
    edge_ptr,
    masses_ptr,
    equal_ptr,
    vocabulary,
    chunks,
    row_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    values = tl.load(values_ptr + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    weights = weight_of(values, row_peak(peaks_ptr, row, chunks, CHUNKS), settings_ptr, row)
    if edge_ptr is not None:
        ranks = rank_of(values)
        edge = tl.load(edge_ptr + row)
        equal = tl.sum((inside & (ranks == edge)).to(tl.int32), axis=0)
        inside = inside & (ranks < edge)
    else:
        equal = tl.zeros((), tl.int32)
    tl.store(masses_ptr + row * chunks + chunk, tl.sum(tl.where(inside, weights, 0.0), axis=0))
    tl.store(equal_ptr + row * chunks + chunk, equal)


@triton.jit
def _draw(
    values_ptr,
    settings_ptr,
    draws_ptr,
    peaks_ptr,
    places_ptr,
    edge_ptr,
    ties_ptr,
    masses_ptr,
    equal_ptr,
    ids_ptr,
    vocabulary,
    chunks,
    row_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    peak, place = _best(peaks_ptr, places_ptr, row, chunks, CHUNKS)
    masses = tl.load(masses_ptr + row * chunks + index, mask=index < chunks, other=0.0)
    equal = tl.load(equal_ptr + row * chunks + index, mask=index < chunks, other=0)
    before = tl.cumsum(equal, axis=0) - equal
    ties = 0
    if edge_ptr is not None:
        edge = tl.load(edge_ptr + row)
        ties = tl.load(ties_ptr + row).to(tl.int32)
        kept = tl.minimum(tl.maximum(ties - before, 0), equal)
        masses += kept.to(tl.float32) * weight_of(value_of(edge), peak, settings_ptr, row)
    ends = tl.cumsum(masses, axis=0)
    goal = tl.load(draws_ptr + row) * tl.max(ends, axis=0)
    # rounding may leave a goal that is never passed: then the last place with a weight is meant
    last = tl.max(tl.where(masses > 0, index, 0), axis=0)
    chunk = tl.min(tl.where((ends > goal) & (masses > 0), index, last), axis=0)
    goal -= tl.sum(tl.where(index == chunk - 1, ends, 0.0), axis=0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    values = tl.load(values_ptr + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    weights = tl.where(inside, weight_of(values, peak, settings_ptr, row), 0.0)
    if edge_ptr is not None:
        ranks = rank_of(values)
        same = inside & (ranks == edge)
        count = tl.cumsum(same.to(tl.int32), axis=0) + tl.sum(tl.where(index == chunk, before, 0), axis=0)
        weights = tl.where((ranks < edge) | (same & (count <= ties)), weights, 0.0)
    running = tl.cumsum(weights, axis=0)
    last = tl.max(tl.where(weights > 0, token, 0), axis=0)
    drawn = tl.min(tl.where((running > goal) & (weights > 0), token, last), axis=0)
    temperature = tl.load(settings_ptr + row * SETTINGS + TEMPERATURE)
    drawn = tl.where(temperature > COLDEST, drawn, place)
    usable = (peak < float("inf")) & (peak > -float("inf"))
    tl.store(ids_ptr + row, tl.where(usable, drawn, -1).to(tl.int64))


def _find_peaks(batch: Batch) -> None:
    """Find the largest logit of each chunk."""
    batch.peaks = batch.empty("peaks", batch.chunks)
    batch.places = batch.empty("places", batch.chunks, dtype=torch.int32)
    batch.launch(
        _peaks,
        reads=(batch.values,),
        writes=(batch.peaks, batch.places),
        parts=batch.chunks,
        values_ptr=batch.values,
        peaks_ptr=batch.peaks,
        places_ptr=batch.places,
        vocabulary=batch.vocabulary,
        chunks=batch.chunks,
        row_stride=batch.values.stride(0),
        constants={"CHUNK": batch.chunk},
    )


def greedy(engine: GpuEngine, logits: torch.Tensor, vocabulary: int | None = None) -> torch.Tensor:
    """Run `greedy_ref`."""
    batch = Batch(engine, logits, vocabulary)
    _find_peaks(batch)
    ids = batch.empty("ids", dtype=torch.int64)
    batch.launch(
        _greedy,
        reads=(batch.peaks, batch.places),
        writes=(ids,),
        peaks_ptr=batch.peaks,
        places_ptr=batch.places,
        ids_ptr=ids,
        chunks=batch.chunks,
        constants=batch.sizes,
    )
    return ids


def penalized(batch: Batch, settings: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """Return a copy of the logits with penalties."""
    logits = batch.values
    work = batch.empty("penalized", batch.vocabulary)
    same: dict[str, Any] = {
        "logits_ptr": logits,
        "work_ptr": work,
        "vocabulary": batch.vocabulary,
        "row_stride": logits.stride(0),
    }
    batch.launch(
        _copy, reads=(logits,), writes=(work,), parts=batch.chunks, constants={"CHUNK": batch.chunk}, **same
    )
    batch.launch(
        _penalize,
        reads=(logits, history, settings),
        writes=(work,),
        parts=-(-history.shape[1] // _HISTORY),
        history_ptr=history,
        settings_ptr=settings,
        window=history.shape[1],
        history_stride=history.stride(0),
        constants={"BLOCK": _HISTORY},
        **same,
    )
    return work


def _drawn(batch: Batch, settings: torch.Tensor, draws: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """Return the ids that the draws fall on."""
    edge, ties, _ = cut or (None, None, None)
    masses, equal = batch.empty("kept", batch.chunks), batch.empty("equal", batch.chunks, dtype=torch.int32)
    same: dict[str, Any] = {
        "values_ptr": batch.values,
        "settings_ptr": settings,
        "peaks_ptr": batch.peaks,
        "edge_ptr": edge,
        "masses_ptr": masses,
        "equal_ptr": equal,
        "vocabulary": batch.vocabulary,
        "chunks": batch.chunks,
        "row_stride": batch.values.stride(0),
    }
    sizes = {"CHUNK": batch.chunk, **batch.sizes}
    inputs = (batch.values, settings, batch.peaks, edge)
    batch.launch(
        _kept_masses, reads=inputs, writes=(masses, equal), parts=batch.chunks, constants=sizes, **same
    )
    ids = batch.empty("ids", dtype=torch.int64)
    batch.launch(
        _draw,
        reads=(*inputs, draws, batch.places, ties, masses, equal),
        writes=(ids,),
        draws_ptr=draws,
        places_ptr=batch.places,
        ties_ptr=ties,
        ids_ptr=ids,
        constants=sizes,
        warps=_DRAW_WARPS,
        **same,
    )
    return ids


def sample(
    engine: GpuEngine,
    logits: torch.Tensor,
    settings: torch.Tensor,
    draws: torch.Tensor,
    history: torch.Tensor | None = None,
    vocabulary: int | None = None,
    needed: SampleStages | None = None,
) -> torch.Tensor:
    """Run `sample_ref`; every argument but the last two may change under a captured graph."""
    needed = SampleStages() if needed is None else needed
    batch = Batch(engine, logits, vocabulary)
    if needed.penalties and history is not None:
        batch.values = penalized(batch, settings, history)
    _find_peaks(batch)
    cut = cut_count(batch, settings) if needed.top_k else None
    cut = cut_mass(batch, settings, cut) if needed.top_p else cut
    return _drawn(batch, settings, draws, cut)


_SIZES = {"vocabulary": "i32", "row_stride": "i32"}
_ROWS = {**_SIZES, "chunks": "i32"}
_PEAKS = {"peaks_ptr": "*fp32", "places_ptr": "*i32"}
_KEPT = {"peaks_ptr": "*fp32", "masses_ptr": "*fp32", "equal_ptr": "*i32", "edge_ptr": "*i64"}
_INPUTS = {"values_ptr": "*fp32", "settings_ptr": "*fp32"}
_WORK = {"logits_ptr": "*fp32", "work_ptr": "*fp32"}
_HISTORY_TYPES = {
    **{"history_ptr": "*i64", "settings_ptr": "*fp32", "window": "i32", "history_stride": "i32"},
    **_WORK,
    **_SIZES,
}
_DRAW_TYPES = {
    **{"draws_ptr": "*fp32", "ties_ptr": "*fp32", "ids_ptr": "*i64"},
    **_INPUTS,
    **_ROWS,
    **_PEAKS,
    **_KEPT,
}
_ONE_CUT = {"CHUNK": CHUNK, "CHUNKS": 128}


def _without(types: dict[str, str], *absent: str) -> dict[str, str]:
    return {name: kind for name, kind in types.items() if name not in absent}


OFFLINE: tuple[Offline, ...] = (
    Offline(_copy, {**_WORK, **_SIZES}, {"CHUNK": CHUNK}),
    Offline(_penalize, _HISTORY_TYPES, {"BLOCK": _HISTORY}),
    Offline(_peaks, {"values_ptr": "*fp32", **_PEAKS, **_ROWS}, {"CHUNK": CHUNK}),
    Offline(_greedy, {**_PEAKS, "ids_ptr": "*i64", "chunks": "i32"}, {"CHUNKS": 128}),
    Offline(_kept_masses, {**_INPUTS, **_KEPT, **_ROWS}, _ONE_CUT),
    Offline(
        _kept_masses,
        {**_INPUTS, **_without(_KEPT, "edge_ptr"), **_ROWS},
        {**_ONE_CUT, "edge_ptr": None},
        name="all",
    ),
    Offline(_draw, _DRAW_TYPES, _ONE_CUT, _DRAW_WARPS),
    Offline(
        _draw,
        _without(_DRAW_TYPES, "edge_ptr", "ties_ptr"),
        {**_ONE_CUT, "edge_ptr": None, "ties_ptr": None},
        _DRAW_WARPS,
        name="all",
    ),
)
