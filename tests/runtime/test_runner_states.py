"""Where slots of a recurrent model may go on, and what is refused before anything runs."""

from __future__ import annotations

import pytest
import torch

from helpers import MemoryCheckpoint, make_runner
from hipfire.base.errors import ValidationError
from hipfire.layers.context import Segment
from hipfire.models.family import family_of
from hipfire.runtime.runner import Runner

WORDS = [5, 9, 33, 70, 2, 8, 41]


@pytest.fixture(scope="module")
def runner() -> Runner:
    family = family_of("qwen3_5")
    config = family.from_hf(family.tiny)
    checkpoint = MemoryCheckpoint()
    torch.manual_seed(0)
    for name, shape in config.tensors().items():
        checkpoint.add(name, torch.randn(shape) * 0.2)
    return make_runner(family, config, checkpoint, slots=3, max_seq=32)


def test_a_slot_goes_on_where_its_state_stands_or_anew(runner: Runner) -> None:
    runner.prefill(0, WORDS)
    assert runner.recurrent
    for start in (1, 6):
        with pytest.raises(ValidationError, match=f"stands at position 7, not {start}"):
            runner.decode(0, 3, start)
    with pytest.raises(ValidationError, match="does not follow"):
        runner.decode(0, 3, 8)
    first = runner.decode(0, 3, 7)
    again = runner.prefill(0, [*WORDS, 3])
    torch.testing.assert_close(first, again, rtol=1e-4, atol=1e-4)
    assert runner.filled(0) == 8


def test_segments_of_a_slot_are_one_piece_of_its_sequence(runner: Runner) -> None:
    whole = runner.prefill(1, WORDS)
    parts = [(Segment(1, 0, 3), WORDS[:3]), (Segment(1, 3, 1), WORDS[3:4]), (Segment(1, 4, 3), WORDS[4:])]
    torch.testing.assert_close(runner.step(parts)[-1], whole, rtol=1e-4, atol=1e-4)
    # single tokens of one slot do not become a step of single tokens
    singles = [(Segment(1, at, 1), [word]) for at, word in enumerate(WORDS)]
    torch.testing.assert_close(runner.step(singles)[-1], whole, rtol=1e-4, atol=1e-4)
    apart = [(Segment(1, 0, 3), WORDS[:3]), (Segment(2, 0, 1), [4]), (Segment(1, 3, 1), [5])]
    with pytest.raises(ValidationError, match="segments of slot 1 do not follow one another"):
        runner.step(apart)
    # nothing ran
    assert (runner.filled(1), runner.filled(2)) == (7, 0)


def test_a_snapshot_brings_a_slot_back_and_starts_others(runner: Runner) -> None:
    runner.prefill(0, WORDS[:4])
    kept = runner.snapshot(0)
    assert kept.position == 4
    wanted = runner.prefill(0, WORDS[4:], 4)
    runner.restore(0, kept)
    assert runner.filled(0) == 4
    assert torch.equal(runner.prefill(0, WORDS[4:], 4), wanted)
    runner.share_rows(0, 2, 4, kept)
    assert torch.equal(runner.prefill(2, WORDS[4:], 4), wanted)
    # and the source is where it was
    assert torch.equal(runner.decode(0, 1, 7), runner.decode(2, 1, 7))


def test_states_that_do_not_fit_the_rows_are_refused(runner: Runner) -> None:
    runner.prefill(0, WORDS)
    late = runner.snapshot(0)
    with pytest.raises(ValidationError, match="need the state at 3"):
        runner.share_rows(0, 1, 3)
    with pytest.raises(ValidationError, match="need the state at 3"):
        runner.share_rows(0, 1, 3, late)
    runner.prefill(1, WORDS[:2])
    with pytest.raises(ValidationError, match="slot 1 holds 2 rows, not 7"):
        runner.restore(1, late)
