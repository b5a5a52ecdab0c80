"""A runner without a model, whose states are the tokens that they have read, so that every use is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from core_kit import Actor, staged

from hipfire.base.types import StateSpec
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.cache.states import StateStore, state_nbytes
from hipfire.layers.context import StepContext
from hipfire.runtime.load import LoadedModel
from hipfire.runtime.runner import Runner
from tiny_models import IM_END

EACH = 64
OPENED = b"assistant\n<think>\n"


class TokenRunner:
    """`rows` are the tokens whose keys each slot holds, `state` those that its recurrent layers have read."""

    recurrent = True

    def __init__(self, slots: int) -> None:
        self.cache = SimpleNamespace(slots=slots, states=SimpleNamespace(nbytes=slots * EACH, slots=slots))
        self.rows: list[list[int]] = [[] for _ in range(slots)]
        self.state: list[tuple[int, ...]] = [()] * slots
        self.computed = 0
        self.snapshots = 0

    def filled(self, slot: int) -> int:
        return len(self.rows[slot])

    def feed(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Compute tokens as the model would: from position 0, or from where the state stands."""
        if start == 0:
            self.state[slot] = ()
        assert len(self.state[slot]) == start, "the state stands elsewhere"
        assert list(self.state[slot]) == self.rows[slot][:start], "the state is of another sequence"
        self.rows[slot][start:] = tokens
        self.state[slot] = (*self.state[slot], *tokens)
        self.computed += len(tokens)

    def snapshot(self, slot: int) -> Any:
        assert list(self.state[slot]) == self.rows[slot], "the state is not that of the rows"
        self.snapshots += 1
        return SimpleNamespace(position=len(self.state[slot]), tensor=self.state[slot])

    def restore(self, slot: int, snapshot: Any) -> None:
        assert tuple(self.rows[slot][: snapshot.position]) == snapshot.tensor, "of another sequence"
        del self.rows[slot][snapshot.position :]
        self.state[slot] = snapshot.tensor

    def share_rows(self, source: int, target: int, count: int, snapshot: Any) -> None:
        assert snapshot.position == count
        assert tuple(self.rows[source][:count]) == snapshot.tensor, "of another sequence"
        self.rows[target], self.state[target] = self.rows[source][:count], snapshot.tensor


STATES = (StateSpec(channels=1, width=2, key_heads=1, value_heads=1, key_dim=1, value_dim=2),)


class Reader(Actor):
    """An actor that keeps a running digest of what it has read, and trips where cache and digest disagree."""

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        assert step.cache.states is not None
        digests = step.cache.states.matrix(0)[:, 0, 0]
        for (slot, position), token in zip(step.rows.tolist(), tokens.tolist(), strict=True):
            if position == 0:
                digests[slot] = 0.0
            count, digest = digests[slot].tolist()
            assert count == position, f"the state has read {count} tokens, not {position}"
            digests[slot] = torch.tensor([count + 1.0, (digest * 31 + token + 1) % 9973])
        hidden = super().__call__(tokens, step)
        for slot, position in dict(step.rows.tolist()).items():
            seen = self._cache._keys[0][slot, : position + 1, 0, 0].long().tolist()
            assert digests[slot, 1].item() == digest_of(seen), "the state is of another sequence"
        return hidden

    def _next(self, seen: list[int]) -> int:
        text = bytes(token if token < 128 else 0 for token in seen)
        opened = text.rfind(OPENED)
        said = [*self.always, IM_END]
        return said[min(len(seen) - opened - len(OPENED), len(said) - 1)] if opened >= 0 else ord("?")


def digest_of(tokens: Sequence[int]) -> int:
    digest = 0
    for token in tokens:
        digest = (digest * 31 + token + 1) % 9973
    return digest


def staged_reader(*, slots: int = 2, max_seq: int = 300, chunk: int = 8, **fields: Any) -> LoadedModel:
    """A loaded model that is a reader."""
    plain = staged(slots=slots, max_seq=max_seq, chunk=chunk, **fields)
    reader = Reader(plain.model.vocab_size)
    memory = torch.full((slots, state_nbytes(STATES)), 255, dtype=torch.uint8)
    cache = KvCache(
        plain.config.cache_specs(),
        mode=kv_mode("f32"),
        slots=slots,
        max_seq=max_seq,
        states=StateStore(STATES, slots, memory),
    )
    return dataclasses.replace(plain, model=reader, runner=Runner(reader, cache, chunk=chunk))
