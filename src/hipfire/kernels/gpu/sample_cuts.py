"""Cuts of the tokens to draw from: by number (top_k) and by mass (top_p), for whole batches on the device.

Tokens are never sorted. A logit becomes a rank of 32 bits, 0 for the largest, and a cut is a rank: it is
found 8 bits at a time, from a histogram of the tokens that share the bits found so far. Histograms are
products of one-hot matrices, so no two threads ever add to one place. A row is cut into chunks by the size of
the vocabulary alone, so no row depends on its neighbors. This file does not know what is drawn.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from hipfire.base.sampling import GREEDY_TEMPERATURE
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.rowwise import row_view
from hipfire.kernels.gpu.target import matmul
from hipfire.kernels.sample import Setting

CHUNK: Final = 2048
_BLOCK: Final = 128
_SHIFTS: Final = (24, 16, 8, 0)

COLDEST = tl.constexpr(GREEDY_TEMPERATURE)
SETTINGS = tl.constexpr(len(Setting))
TEMPERATURE = tl.constexpr(int(Setting.TEMPERATURE))
_TOP_K = tl.constexpr(int(Setting.TOP_K))
_TOP_P = tl.constexpr(int(Setting.TOP_P))
_MIN_P = tl.constexpr(int(Setting.MIN_P))


@triton.jit
def rank_of(values):
    """Return int64 ranks from 0 to 2^32 - 1: the larger a float32, the smaller; equal ones get one rank."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return 2147483647 - ordered.to(tl.int64)


@triton.jit
def value_of(rank):
    """Return the float32 of a rank."""
    ordered = (2147483647 - rank).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(values, peak, settings_ptr, row):
    """Return weights relative to the largest logit's, without those that min_p cuts."""
    temperature = tl.load(settings_ptr + row * SETTINGS + TEMPERATURE)
    min_p = tl.load(settings_ptr + row * SETTINGS + _MIN_P)
    weights = tl.exp((values - peak) / tl.where(temperature > COLDEST, temperature, 1.0))
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def row_peak(peaks_ptr, row, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row; infinite or NaN where the row is unusable."""
    index = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks_ptr + row * chunks + index, mask=index < chunks, other=-float("inf")), axis=0)


@triton.jit
def _histogram(
    values_ptr,
    settings_ptr,
    peaks_ptr,
    bound_ptr,
    edge_ptr,
    counts_ptr,
    masses_ptr,
    vocabulary,
    chunks,
    row_stride,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    digit = tl.arange(0, 16)
    counts = tl.zeros((16, 16), tl.float32)
    masses = tl.zeros((16, 16), tl.float32)
    peak = row_peak(peaks_ptr, row, chunks, CHUNKS)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocabulary), BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        values = tl.load(values_ptr + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
        ranks = rank_of(values)
        if SHIFT < 24:
            inside = inside & ((ranks >> (SHIFT + 8)) == tl.load(edge_ptr + row))
        if bound_ptr is not None:
            inside = inside & (ranks <= tl.load(bound_ptr + row))
        digits = ((ranks >> SHIFT) & 255).to(tl.int32)
        upper = (digit[:, None] == (digits >> 4)[None, :]) & inside[None, :]
        lower = digit[None, :] == (digits & 15)[:, None]
        left = tl.where(upper, 1.0, 0.0).to(tl.bfloat16)
        counts = matmul(left, tl.where(lower, 1.0, 0.0).to(tl.bfloat16), counts)
        if masses_ptr is not None:
            # a float32 is the sum of three bfloat16, so nothing is lost
            rest = weight_of(values, peak, settings_ptr, row)
            for _ in tl.static_range(3):
                part = rest.to(tl.bfloat16).to(tl.float32)
                masses = matmul(left, tl.where(lower, part[:, None], 0.0).to(tl.bfloat16), masses)
                rest -= part
    place = (row * chunks + chunk) * 256 + digit[:, None] * 16 + digit[None, :]
    tl.store(counts_ptr + place, counts)
    if masses_ptr is not None:
        tl.store(masses_ptr + place, masses)


@triton.jit
def _bins(histogram_ptr, row, chunks, CHUNKS: tl.constexpr):
    """Return the sum of a row's histograms, [256]."""
    bins = tl.arange(0, 256)
    total = tl.zeros((256,), tl.float32)
    for start in range(0, CHUNKS, 16):
        chunk = start + tl.arange(0, 16)
        place = (row * chunks + chunk)[:, None] * 256 + bins[None, :]
        total += tl.sum(tl.load(histogram_ptr + place, mask=(chunk < chunks)[:, None], other=0.0), axis=0)
    return total


@triton.jit
def _narrow_count(
    counts_ptr,
    settings_ptr,
    edge_ptr,
    above_ptr,
    ties_ptr,
    equal_ptr,
    vocabulary,
    chunks,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, 256)
    counts = _bins(counts_ptr, row, chunks, CHUNKS)
    goal = tl.load(settings_ptr + row * SETTINGS + _TOP_K)
    every = vocabulary * 1.0
    goal = tl.where((goal > 0) & (goal < every), goal, every)
    edge, above = tl.zeros((), tl.int64), tl.zeros((), tl.float32)
    if SHIFT < 24:
        edge, above = tl.load(edge_ptr + row), tl.load(above_ptr + row)
    chosen = tl.min(tl.where(above + tl.cumsum(counts, axis=0) >= goal, bins, 255), axis=0)
    above += tl.sum(tl.where(bins < chosen, counts, 0.0), axis=0)
    tl.store(edge_ptr + row, edge * 256 + chosen)
    tl.store(above_ptr + row, above)
    if SHIFT == 0:
        tl.store(ties_ptr + row, goal - above)
        tl.store(equal_ptr + row, tl.sum(tl.where(bins == chosen, counts, 0.0), axis=0))


@triton.jit
def _narrow_mass(
    counts_ptr,
    masses_ptr,
    settings_ptr,
    peaks_ptr,
    bound_ptr,
    bound_ties_ptr,
    bound_equal_ptr,
    edge_ptr,
    above_ptr,
    goal_ptr,
    ties_ptr,
    chunks,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, 256)
    counts = _bins(counts_ptr, row, chunks, CHUNKS)
    masses = _bins(masses_ptr, row, chunks, CHUNKS)
    peak = row_peak(peaks_ptr, row, chunks, CHUNKS)
    top_p = tl.load(settings_ptr + row * SETTINGS + _TOP_P)
    # what top_k left: every token up to a rank, and of those at the rank the first few
    bound, bound_ties, excess = tl.full((), 4294967295, tl.int64), 16777216.0, 0.0
    if bound_ptr is not None:
        bound, bound_ties = tl.load(bound_ptr + row), tl.load(bound_ties_ptr + row)
        excess = tl.load(bound_equal_ptr + row) - bound_ties
    if SHIFT == 24:
        edge, above = tl.zeros((), tl.int64), tl.zeros((), tl.float32)
        total = tl.sum(masses, axis=0)
        if bound_ptr is not None:
            total -= excess * weight_of(value_of(bound), peak, settings_ptr, row)
        goal = top_p * total
        tl.store(goal_ptr + row, goal)
    else:
        edge, above, goal = tl.load(edge_ptr + row), tl.load(above_ptr + row), tl.load(goal_ptr + row)
    reached = (above + tl.cumsum(masses, axis=0) >= goal) & (counts > 0)
    # sums that are rounded in another order may just miss the goal: then all are kept
    last = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    chosen = tl.min(tl.where(reached, bins, last), axis=0)
    above += tl.sum(tl.where(bins < chosen, masses, 0.0), axis=0)
    edge = edge * 256 + chosen
    if SHIFT == 0:
        weight = weight_of(value_of(edge), peak, settings_ptr, row)
        ties = tl.ceil((goal - above) / tl.where(weight > 0, weight, 1.0))
        equal = tl.sum(tl.where(bins == chosen, counts, 0.0), axis=0)
        ties = tl.minimum(tl.maximum(ties, 1.0), equal)
        ties = tl.where(edge == bound, tl.minimum(ties, bound_ties), ties)
        tl.store(ties_ptr + row, tl.where(top_p < 1, ties, bound_ties))
        edge = tl.where(top_p < 1, edge, bound)
    tl.store(edge_ptr + row, edge)
    tl.store(above_ptr + row, above)


class Batch:
    """The rows of one call, and what all of its kernels are given."""

    def __init__(self, engine: GpuEngine, logits: torch.Tensor, vocabulary: int | None) -> None:
        self.engine = engine
        self.values = row_view(logits)
        self.rows = logits.shape[0]
        self.vocabulary = min(logits.shape[1], vocabulary or logits.shape[1])
        self.chunk = CHUNK
        self.chunks = -(-self.vocabulary // CHUNK)
        self.sizes = {"CHUNKS": max(16, 1 << (self.chunks - 1).bit_length())}
        self.peaks: torch.Tensor
        self.places: torch.Tensor

    def empty(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return memory for [B, *shape]."""
        return self.engine.empty(f"sample.{name}", (self.rows, *shape), dtype)

    def launch(
        self,
        kernel: Any,
        *,
        writes: tuple[torch.Tensor, ...],
        reads: tuple[torch.Tensor | None, ...] = (),
        parts: int = 0,
        constants: dict[str, int],
        warps: int = 4,
        **arguments: Any,
    ) -> None:
        """Start a kernel for every row, in `parts` programs each if it is not 0."""
        self.engine.launch(
            kernel,
            (self.rows, parts) if parts else (self.rows,),
            reads=tuple(tensor for tensor in reads if tensor is not None),
            writes=writes,
            constants=constants,
            warps=warps,
            **arguments,
        )


def _histograms(
    batch: Batch,
    settings: torch.Tensor,
    edge: torch.Tensor,
    bound: torch.Tensor | None,
    shift: int,
    *,
    mass: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the numbers, and if wanted the masses, of tokens by the digit of their ranks at `shift`."""
    counts = batch.empty("counts", batch.chunks, 256)
    masses = batch.empty("masses", batch.chunks, 256) if mass else None
    batch.launch(
        _histogram,
        reads=(batch.values, settings, batch.peaks, bound, edge),
        writes=(counts,) if masses is None else (counts, masses),
        parts=batch.chunks,
        values_ptr=batch.values,
        settings_ptr=settings,
        peaks_ptr=batch.peaks,
        bound_ptr=bound,
        edge_ptr=edge,
        counts_ptr=counts,
        masses_ptr=masses,
        vocabulary=batch.vocabulary,
        chunks=batch.chunks,
        row_stride=batch.values.stride(0),
        constants={"SHIFT": shift, "CHUNK": batch.chunk, "BLOCK": _BLOCK, **batch.sizes},
    )
    return counts, masses


Cut = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def cut_count(batch: Batch, settings: torch.Tensor) -> Cut:
    """Return the rank of the last token that top_k keeps, how many of it are kept, and how many there are."""
    edge, above = batch.empty("count_edge", dtype=torch.int64), batch.empty("count_above")
    ties, equal = batch.empty("count_ties"), batch.empty("count_equal")
    for shift in _SHIFTS:
        counts, _ = _histograms(batch, settings, edge, None, shift, mass=False)
        batch.launch(
            _narrow_count,
            reads=(counts, settings, edge, above),
            writes=(edge, above, ties, equal),
            counts_ptr=counts,
            settings_ptr=settings,
            edge_ptr=edge,
            above_ptr=above,
            ties_ptr=ties,
            equal_ptr=equal,
            vocabulary=batch.vocabulary,
            chunks=batch.chunks,
            constants={"SHIFT": shift, **batch.sizes},
        )
    return edge, ties, equal


def cut_mass(batch: Batch, settings: torch.Tensor, bound: Cut | None) -> Cut:
    """Return the rank of the last token that top_p keeps of those in `bound`, and how many of it."""
    edge, above = batch.empty("mass_edge", dtype=torch.int64), batch.empty("mass_above")
    goal, ties = batch.empty("mass_goal"), batch.empty("mass_ties")
    rank, rank_ties, rank_equal = bound or (None, None, None)
    for shift in _SHIFTS:
        counts, masses = _histograms(batch, settings, edge, rank, shift, mass=True)
        batch.launch(
            _narrow_mass,
            reads=(counts, masses, settings, batch.peaks, rank, rank_ties, rank_equal, edge, above, goal),
            writes=(edge, above, goal, ties),
            counts_ptr=counts,
            masses_ptr=masses,
            settings_ptr=settings,
            peaks_ptr=batch.peaks,
            bound_ptr=rank,
            bound_ties_ptr=rank_ties,
            bound_equal_ptr=rank_equal,
            edge_ptr=edge,
            above_ptr=above,
            goal_ptr=goal,
            ties_ptr=ties,
            chunks=batch.chunks,
            constants={"SHIFT": shift, **batch.sizes},
        )
    return edge, ties, None


_ROW = {"settings_ptr": "*fp32", "peaks_ptr": "*fp32", "chunks": "i32"}
_COUNTS = {"counts_ptr": "*fp32", "edge_ptr": "*i64"}
_HISTOGRAM_TYPES = {**_ROW, **_COUNTS, "values_ptr": "*fp32", "vocabulary": "i32", "row_stride": "i32"}
_COUNT_TYPES = {
    **{"settings_ptr": "*fp32", "above_ptr": "*fp32", "ties_ptr": "*fp32", "equal_ptr": "*fp32"},
    **{"vocabulary": "i32", "chunks": "i32"},
    **_COUNTS,
}
_MASS_TYPES = {
    **{"masses_ptr": "*fp32", "above_ptr": "*fp32", "goal_ptr": "*fp32", "ties_ptr": "*fp32"},
    **_ROW,
    **_COUNTS,
}
_BOUND = {"bound_ptr": "*i64", "bound_ties_ptr": "*fp32", "bound_equal_ptr": "*fp32"}
_LOOP = {"CHUNK": CHUNK, "BLOCK": _BLOCK, "CHUNKS": 128}
_MATRIX = frozenset({"matrix"})


def _offline_histogram(shift: int, *, bound: bool, mass: bool) -> Offline:
    types = {**_HISTOGRAM_TYPES, **({"bound_ptr": "*i64"} if bound else {})}
    types |= {"masses_ptr": "*fp32"} if mass else {}
    absent = {name: None for name in ("bound_ptr", "masses_ptr") if name not in types}
    name = f"{'mass' if mass else 'count'}{shift}{'bound' if bound else ''}"
    return Offline(_histogram, types, {"SHIFT": shift, **_LOOP, **absent}, name=name, needs=_MATRIX)


def _offline_mass(shift: int, *, bound: bool) -> Offline:
    types = {**_MASS_TYPES, **(_BOUND if bound else {})}
    absent = {} if bound else dict.fromkeys(_BOUND)
    name = f"{shift}{'bound' if bound else ''}"
    return Offline(_narrow_mass, types, {"SHIFT": shift, "CHUNKS": 128, **absent}, name=name)


OFFLINE: tuple[Offline, ...] = (
    *(_offline_histogram(shift, bound=False, mass=False) for shift in (24, 0)),
    *(_offline_histogram(shift, bound=bound, mass=True) for shift in (24, 0) for bound in (False, True)),
    *(
        Offline(_narrow_count, _COUNT_TYPES, {"SHIFT": shift, "CHUNKS": 128}, name=str(shift))
        for shift in (24, 0)
    ),
    *(_offline_mass(shift, bound=bound) for shift in (24, 0) for bound in (False, True)),
)
