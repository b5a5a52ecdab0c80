"""Steps over caches: bounds, progress, slots."""

from __future__ import annotations

import pytest
import torch

from hipfire.base.errors import ContextLengthError, ValidationError
from hipfire.layers.context import Segment
from hipfire.runtime.runner import Runner
from recital import recite


def runner() -> Runner:
    return recite([1, 2, 3], [4, 5], max_seq=16).runner


def test_prefill_reports_every_chunk_and_can_be_ended_by_its_caller() -> None:
    done: list[int] = []
    runner().prefill(0, list(range(12)), progress=done.append)
    assert done == [5, 10, 12]

    def stop(count: int) -> None:
        raise KeyboardInterrupt(count)

    running = runner()
    with pytest.raises(KeyboardInterrupt):
        running.prefill(0, list(range(12)), progress=stop)
    assert len(running.model.fed) == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(("start", "count"), [(0, 17), (16, 1), (10, 7)])
def test_positions_beyond_the_cache_are_refused_before_any_work(start: int, count: int) -> None:
    running = runner()
    with pytest.raises(ContextLengthError) as caught:
        running.prefill(0, list(range(count)), start)
    assert (caught.value.requested, caught.value.limit) == (start + count, 16)
    assert running.model.fed == []  # type: ignore[attr-defined]


def test_malformed_steps_are_refused() -> None:
    running = runner()
    with pytest.raises(ValidationError, match="no tokens"):
        running.prefill(0, [])
    with pytest.raises(ValidationError, match="segment of 3 tokens came with 2"):
        running.step([(Segment(0, 0, 3), [1, 2])])
    with pytest.raises(ValidationError, match="slot 1 does not exist"):
        running.claim(1, object())
    with pytest.raises(ValidationError, match="chunk of 0"):
        Runner(running.model, running.cache, chunk=0)


def test_the_last_row_of_every_segment_is_scored() -> None:
    running = runner()
    logits = running.step([(Segment(0, 0, 2), [1, 2]), (Segment(0, 2, 1), [3])])
    assert logits.argmax(-1).tolist() == [3, 4]
    rows = running.step([(Segment(0, 0, 2), [1, 2])], every_row=True)
    assert rows.argmax(-1).tolist() == [2, 3]
    assert torch.isfinite(rows).all()


@pytest.mark.parametrize(
    ("segment", "tokens", "message"),
    [
        (Segment(1, 0, 1), [1], "slot 1 does not exist"),
        (Segment(-1, 0, 1), [1], "slot -1 does not exist"),
        (Segment(0, -3, 1), [1], "position -3"),
        (Segment(0, 4, 1), [1], "position 4 of slot 0 does not follow"),
        (Segment(0, 0, 1), [264], "from 0 to 263"),
        (Segment(0, 0, 1), [-1], "from 0 to 263"),
    ],
)
def test_batches_that_would_touch_others_are_refused(
    segment: Segment, tokens: list[int], message: str
) -> None:
    running = runner()
    with pytest.raises(ValidationError, match=message):
        running.step([(segment, tokens)])
    assert running.model.fed == []  # type: ignore[attr-defined]


def test_one_slot_twice_in_a_step_must_go_on_where_it_ended() -> None:
    running = runner()
    with pytest.raises(ValidationError, match="position 0 of slot 0"):
        running.step([(Segment(0, 0, 2), [1, 2]), (Segment(0, 0, 2), [1, 2])])
    with pytest.raises(ValidationError, match="at least one segment"):
        running.step([])


def test_a_sequence_may_be_continued_rewound_and_restarted() -> None:
    running = runner()
    running.prefill(0, [1, 2, 3, 4])
    running.prefill(0, [9], 2)
    with pytest.raises(ValidationError, match="position 4"):
        running.decode(0, 1, 4)
    running.decode(0, 1, 3)
    running.prefill(0, [5])


def test_a_text_that_does_not_fit_is_refused_whole() -> None:
    running = runner()
    with pytest.raises(ContextLengthError) as caught:
        running.all_logits(0, list(range(17)))
    assert caught.value.requested == 17
    assert running.model.fed == []  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="no tokens"):
        running.all_logits(0, [])
