"""What is told about GPUs, with stand-ins for the driver's answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hipfire.base.errors import UnsupportedError
from hipfire.device import facts
from hipfire.device.platform import Gpu

FIRST = Gpu("A card", "cuda", "sm_90", 0, 1000, 132, "580.1", "2.13", "13.0", ())
CARDS = [FIRST, replace(FIRST, name="An old card", arch="sm_70", index=1)]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give this machine two cards, of which the second is too old; note which were asked for memory."""
    asked: list[int] = []

    def free(gpu: Gpu) -> int:
        asked.append(gpu.index)
        return 900

    def check(gpu: Gpu) -> None:
        if gpu.index == 1:
            raise UnsupportedError("An old card cannot be used", hint="use another GPU")

    monkeypatch.setattr(facts, "find_gpu", lambda index=0: CARDS[index])
    monkeypatch.setattr(facts, "check_supported", check)
    monkeypatch.setattr(facts, "free_memory", free)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return asked


def test_every_gpu_is_described(cards: list[int]) -> None:
    good, old = facts.gpu_facts()
    assert good == {
        "name": "A card", "vendor": "cuda", "arch": "sm_90", "driver": "580.1", "runtime": "13.0",
        "memory_bytes": 1000, "free_bytes": 900, "problem": None,
    }  # fmt: skip
    assert (old["name"], old["free_bytes"]) == ("An old card", None)
    assert "use another GPU" in old["problem"]
    # one that cannot be used is left alone
    assert cards == [0]


def test_no_more_gpus_are_touched_than_asked_for(cards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "check_supported", lambda gpu: None)
    assert [each["name"] for each in facts.gpu_facts(most=1)] == ["A card"]
    assert cards == [0]
    assert len(facts.gpu_facts(most=5)) == 2


def test_without_a_gpu_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "find_gpu", lambda index=0: None)
    assert facts.gpu_facts() == []
