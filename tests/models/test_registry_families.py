"""Every card of the registry names a family that is there, with the number that its containers have."""

from __future__ import annotations

import pytest

from hipfire.checkpoint.registry import load_registry
from hipfire.models.family import family_of


def test_cards_and_families_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPFIRE_REGISTRY_FILE", raising=False)
    models = load_registry().models
    assert {card.family for tag, card in models.items() if tag.startswith("qwen3.")} == {
        "qwen3_5",
        "qwen3_5_moe",
    }
    for tag, card in models.items():
        family = family_of(card.family)
        assert card.arch_id in (None, family.arch_id), tag
