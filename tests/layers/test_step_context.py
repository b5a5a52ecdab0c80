"""What a step computes once for all layers, and how it cuts up its tokens."""

from __future__ import annotations

import torch
from packed_kit import block_cache

from hipfire.base.types import CacheSpec, StateSpec
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.cache.states import StateStore, state_nbytes
from hipfire.kernels.fwht import fwht256
from hipfire.kernels.launch import Launcher, LaunchRecord
from hipfire.layers.context import CacheStore, RopeTable, Segment, StepContext

CPU = torch.device("cpu")
SPECS = (CacheSpec(1, 32),)


def step_of(
    *segments: Segment, launcher: Launcher | None = None, cache: CacheStore | None = None
) -> StepContext:
    return StepContext(launcher or Launcher(), cache or block_cache(SPECS, "f32")[0], segments, CPU)


def test_tokens_of_a_sequence_are_put_together_where_a_cache_asks_for_it() -> None:
    contiguous = KvCache(SPECS, mode=kv_mode("f32"), slots=3, max_seq=200)
    segments = (Segment(2, 0, 130), Segment(0, 7, 1))
    assert step_of(*segments, cache=contiguous).tiles is None
    tiles = step_of(*segments).tiles
    assert tiles is not None
    assert tiles.dtype == torch.int32
    assert tiles.tolist() == [[0, 64], [64, 64], [128, 2], [130, 1]]
    assert step_of(Segment(2, 5, 1), Segment(0, 7, 1)).tiles is None


def test_recurrent_layers_take_a_sequence_in_one_piece() -> None:
    specs = (StateSpec(8, 4, 1, 1, 2, 4),)
    states = StateStore(specs, 3, torch.zeros(3, state_nbytes(specs), dtype=torch.uint8))
    cache = KvCache(SPECS, mode=kv_mode("f32"), slots=3, max_seq=200, states=states)
    segments = Segment(2, 4, 3), Segment(2, 7, 1), Segment(0, 9, 1), Segment(1, 0, 2), Segment(1, 3, 2)
    pieces = step_of(*segments, cache=cache).pieces
    assert pieces is not None
    assert pieces.dtype == torch.int32
    assert pieces.tolist() == [[0, 4], [4, 1], [5, 2], [7, 2]]
    assert step_of(Segment(2, 5, 1), Segment(0, 6, 1), cache=cache).pieces is None
    assert step_of(*segments).pieces is None


def test_rows_and_last_rows_are_those_of_the_segments() -> None:
    step = step_of(Segment(2, 4, 3), Segment(0, 9, 1), Segment(1, 0, 2))
    assert step.rows.tolist() == [[2, 4], [2, 5], [2, 6], [0, 9], [1, 0], [1, 1]]
    assert step.last_rows().tolist() == [2, 3, 5]
    rows = torch.tensor([[1, 8]])
    given = StepContext(Launcher(), block_cache(SPECS, "f32")[0], [Segment(0, 0, 1)], CPU, rows=rows)
    assert given.rows is rows
    assert given.positions.tolist() == [8]


def test_activations_are_rotated_once_until_the_step_settles() -> None:
    tape: list[LaunchRecord] = []
    step = step_of(Segment(0, 0, 2), launcher=Launcher(tape=tape))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    table = RopeTable(torch.tensor([1.0, 0.5]))
    for _ in range(2):
        assert torch.equal(step.rotated(x), fwht256(x))
        step.angles(table)
    assert [record.op for record in tape] == ["fwht", "rope_angles"]
    step.settle()
    # the same tensor may hold other numbers by now
    x.neg_()
    assert torch.equal(step.rotated(x), fwht256(x))
    step.angles(table)
    assert [record.op for record in tape] == ["fwht", "rope_angles", "fwht"]
