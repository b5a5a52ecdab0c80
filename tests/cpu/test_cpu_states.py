"""Recurrent states on the CPU engine: the same bytes however sequences are cut, mixed, kept and taken up."""

from __future__ import annotations

import random

import pytest
import torch
from cpu_kit import raw_bytes
from model_kit import SLOTS, text, tiny_runner

from hipfire.base.qtypes import QType
from hipfire.layers.context import Segment
from hipfire.runtime.runner import Runner

LENGTH = 70
TEXTS = [text(LENGTH, seed=100 + number) for number in range(3)]


def states(runner: Runner, slot: int) -> bytes:
    assert runner.cache.states is not None
    return b"".join(raw_bytes(view) for _, view in runner.cache.states.views(slot))


def token_by_token(qtype: QType) -> list[list[tuple[bytes, bytes]]]:
    """Return, for each text and length, the last logits and the states behind it."""
    runner, found = tiny_runner("qwen3_5", qtype, mode="f32"), []
    for tokens in TEXTS:
        steps = []
        for position, token in enumerate(tokens):
            logits = runner.decode(0, token, position)
            steps.append((raw_bytes(logits), states(runner, 0)))
        found.append(steps)
    return found


class Chance:
    """Feeds texts to random slots in random pieces, several in a step, going back to snapshots."""

    def __init__(self, runner: Runner, expected: list[list[tuple[bytes, bytes]]], seed: int) -> None:
        self.runner, self.expected, self.chance = runner, expected, random.Random(seed)
        # the text and the position of every slot, and snapshots by text and position
        self.slots = [(self.chance.randrange(3), 0) for _ in range(SLOTS)]
        self.kept: dict[tuple[int, int], tuple[int, object]] = {}
        self.checked = self.restored = 0

    def step(self) -> None:
        batch, ends = [], {}
        for slot in self.chance.sample(range(SLOTS), self.chance.randrange(1, SLOTS + 1)):
            number, position = self.slots[slot]
            if position >= LENGTH:
                number, position = self.chance.randrange(3), 0
            most = self.chance.choice([1, 1, 2, 5, 33])
            count = min(self.chance.randrange(1, most + 1), LENGTH - position)
            cut = self.chance.randrange(1, count + 1)
            for first, length in ((0, cut), (cut, count - cut)):
                if length:
                    at = position + first
                    batch.append((Segment(slot, at, length), TEXTS[number][at : at + length]))
                    ends[len(batch) - 1] = (slot, number, at + length)
        logits = self.runner.step(batch)
        for row, (slot, number, end) in ends.items():
            assert raw_bytes(logits[row]) == self.expected[number][end - 1][0], (slot, end)
            self.slots[slot] = (number, end)
            self.checked += 1
        for slot in {slot for slot, _, _ in ends.values()}:
            number, end = self.slots[slot]
            assert states(self.runner, slot) == self.expected[number][end - 1][1], (slot, end)

    def keep_or_return(self) -> None:
        slot = self.chance.randrange(SLOTS)
        number, position = self.slots[slot]
        if position and self.chance.random() < 0.5:
            self.kept[number, position] = (slot, self.runner.snapshot(slot))
            return
        places = [place for place in self.kept if place[0] == number and place[1] <= position]
        if places:
            chosen = self.chance.choice(places)
            target = self.chance.randrange(SLOTS)
            snapshot = self.kept[chosen][1]
            if target == slot:
                self.runner.restore(slot, snapshot)  # type: ignore[arg-type]
            else:
                self.runner.share_rows(slot, target, chosen[1], snapshot)  # type: ignore[arg-type]
            self.slots[target] = chosen
            self.restored += 1


@pytest.mark.parametrize("qtype", [QType.F32, QType.MQ4G256], ids=lambda qtype: qtype.name)
def test_random_pieces_slots_and_snapshots_change_no_byte(qtype: QType) -> None:
    expected = token_by_token(qtype)
    for seed, threads in ((0, 2), (1, 3)):
        chance = Chance(tiny_runner("qwen3_5", qtype, mode="f32", threads=threads), expected, seed)
        for _ in range(60):
            chance.step()
            chance.keep_or_return()
        assert chance.checked > 150
        assert chance.restored > 10


def test_replayed_steps_begin_sequences_anew() -> None:
    runner, alone = tiny_runner("qwen3_5", mode="f32"), tiny_runner("qwen3_5", mode="f32")
    for turn in range(3):
        # one slot begins in a step in which another goes on
        logits = runner.step([(Segment(0, turn, 1), [7 + turn]), (Segment(1, 0, 1), [40 + turn])])
        assert raw_bytes(logits[0]) == raw_bytes(alone.decode(0, 7 + turn, turn))
        assert raw_bytes(logits[1]) == raw_bytes(alone.decode(1, 40 + turn, 0))
    assert runner.replay is not None
    assert runner.replay.route().replays == 2


def test_a_step_that_fails_leaves_no_state_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("qwen3_5", mode="f32")
    runner.prefill(0, TEXTS[0][:9])
    kept = runner.snapshot(0)
    runner.prefill(0, TEXTS[0][9:12], 9)
    wanted = runner.decode(0, TEXTS[0][12], 12)
    runner.restore(0, kept)
    runner.prefill(0, TEXTS[0][9:12], 9)

    def fails(hidden: torch.Tensor, step: object) -> torch.Tensor:
        raise RuntimeError("the head is gone")

    with monkeypatch.context() as broken:
        broken.setattr(runner.model, "logits", fails)
        with pytest.raises(RuntimeError, match="the head is gone"):
            runner.prefill(0, TEXTS[0][12:15], 12)
    with pytest.raises(Exception, match="state of slot 0 is not known"):
        runner.decode(0, TEXTS[0][12], 12)
    with pytest.raises(Exception, match="state of slot 0 is not known"):
        runner.snapshot(0)
    runner.restore(0, kept)
    runner.prefill(0, TEXTS[0][9:12], 9)
    assert raw_bytes(runner.decode(0, TEXTS[0][12], 12)) == raw_bytes(wanted)
