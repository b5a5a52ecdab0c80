"""Copying cached rows from one slot to another."""

from __future__ import annotations

import pytest
import torch

from hipfire.base.errors import ValidationError
from hipfire.base.types import CacheSpec
from hipfire.cache.kv import KV_MODES, KvCache, kv_mode
from hipfire.layers.context import Segment
from recital import recite


@pytest.mark.parametrize("mode", KV_MODES)
def test_rows_are_copied_in_every_layer_and_no_others(mode: str) -> None:
    cache = KvCache((CacheSpec(2, 32), CacheSpec(1, 64)), mode=kv_mode(mode), slots=3, max_seq=6)
    buffers = [*cache._keys, *cache._values]
    for number, buffer in enumerate(buffers):
        values = torch.arange(buffer.numel()).view(buffer.shape) % 97 + number
        buffer.copy_(values)
    before = [buffer.clone() for buffer in buffers]
    cache.copy_rows(2, 0, 4)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer[0, :4], old[2, :4])
        assert torch.equal(buffer[0, 4:], old[0, 4:])
        assert torch.equal(buffer[1:], old[1:])


@pytest.mark.parametrize(("source", "target", "count"), [(3, 0, 1), (0, -1, 1), (0, 1, 7), (0, 1, -1)])
def test_rows_and_slots_that_do_not_exist_are_refused(source: int, target: int, count: int) -> None:
    cache = KvCache((CacheSpec(1, 4),), mode=kv_mode("f32"), slots=3, max_seq=6)
    with pytest.raises(ValidationError, match="cannot be copied"):
        cache.copy_rows(source, target, count)


def test_a_slot_goes_on_after_rows_that_it_was_given() -> None:
    runner = recite([1], [2], max_seq=16).runner
    runner.cache = KvCache((CacheSpec(1, 4),), mode=kv_mode("f32"), slots=2, max_seq=16)
    runner.prefill(0, [1, 2, 3, 4, 5, 6])
    runner.prefill(1, [9])
    runner.share_rows(0, 1, 4)
    assert (runner.filled(0), runner.filled(1)) == (6, 4)
    # a fifth row was not given
    with pytest.raises(ValidationError, match="position 5 of slot 1"):
        runner.step([(Segment(1, 5, 1), [7])])
    runner.decode(1, 7, 4)
    assert runner.filled(1) == 5


def test_more_rows_than_there_are_cannot_be_shared() -> None:
    runner = recite([1], [2], max_seq=16).runner
    runner.prefill(0, [1, 2, 3])
    with pytest.raises(ValidationError, match="slot 0 holds 3 rows, not 4"):
        runner.share_rows(0, 0, 4)
    with pytest.raises(ValidationError, match="slot 1 does not exist"):
        runner.share_rows(0, 1, 3)
