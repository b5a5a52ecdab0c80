"""Runs steps of a model over its caches: prefill in chunks, decode, and whole-text logits for evaluation.

The runner knows token ids and slots; it does not know text, sampling or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hipfire.base.errors import ContextLengthError, ValidationError
from hipfire.cache.block import BlockCache
from hipfire.cache.kv import KvCache
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.jit import Kernel
from hipfire.kernels.elementwise import GATHER_ROWS
from hipfire.kernels.launch import Launcher
from hipfire.layers.context import Segment, StepContext
from hipfire.models.family import Model
from hipfire.runtime.load_options import PREFILL_CHUNK
from hipfire.runtime.site import HostSite, Site


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The states of a slot's recurrent layers after `position` tokens, uint8 on the device."""

    position: int
    tensor: torch.Tensor


class Runner:
    """A model with its cache; sequences live in the cache's slots.

    A slot with recurrent layers goes on only where their state stands, which is where its rows end, or from
    position 0. A step that fails leaves the states of its slots unknown: they begin anew or are restored.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache | BlockCache,
        launcher: Launcher | None = None,
        *,
        chunk: int = PREFILL_CHUNK,
        site: Site | None = None,
    ) -> None:
        if chunk < 1:
            raise ValidationError(f"a prefill chunk of {chunk} tokens is not possible", hint="use 1 or more")
        self.model = model
        self.cache = cache
        self.launcher = launcher or Launcher()
        self.chunk = chunk
        self.site: Site = site or HostSite(self.launcher)
        self.replay = self.site.retained(self._forward)
        self._owners: dict[int, object] = {}
        # rows written so far per slot; what lies beyond them is another sequence's or nobody's
        self._filled: dict[int, int] = {}
        self._unknown: set[int] = set()

    def claim(self, slot: int, owner: object) -> None:
        """Give a slot to `owner`; whoever held it before can no longer `hold` it."""
        self._check_slot(slot)
        self._owners[slot] = owner

    def hold(self, slot: int, owner: object) -> None:
        """Raise ValidationError unless `owner` still holds the slot: its cache rows are another's now."""
        if self._owners.get(slot) is not owner:
            raise ValidationError(
                "a newer generation took over this one's cache",
                hint="finish one stream before starting the next",
            )

    def filled(self, slot: int) -> int:
        """Return how many rows of a slot hold its sequence."""
        self._check_slot(slot)
        return self._filled.get(slot, 0)

    @property
    def recurrent(self) -> bool:
        """Tell whether the model has layers whose state only stands at the end of what it has read."""
        return self.cache.states is not None

    @torch.inference_mode()
    def share_rows(self, source: int, target: int, count: int, snapshot: Snapshot | None = None) -> None:
        """Let `target` begin with the first `count` rows of `source`; what it held before is dropped.

        Models with recurrent layers need a snapshot of that sequence at exactly `count`. Raises
        ValidationError for slots that do not exist, rows that `source` does not hold and other snapshots.
        """
        self._check_slot(target)
        if not 0 <= count <= self.filled(source):
            raise ValidationError(f"slot {source} holds {self.filled(source)} rows, not {count}")
        if count and self.recurrent and (snapshot is None or snapshot.position != count):
            raise ValidationError(f"rows up to {count} need the state at {count}")
        self.cache.copy_rows(source, target, count)
        self._stand(target, count, snapshot)

    @torch.inference_mode()
    def snapshot(self, slot: int) -> Snapshot:
        """Return a copy of a slot's states; ValidationError if there are none or they are not known."""
        states = self.cache.states
        if states is None or slot in self._unknown:
            raise ValidationError(f"the state of slot {slot} is not known")
        return Snapshot(self.filled(slot), states.snapshot(slot))

    @torch.inference_mode()
    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Bring a slot back to where `snapshot`, of the sequence that it holds, was taken; drops later rows.

        Raises ValidationError if the slot does not hold that many rows.
        """
        if snapshot.position > self.filled(slot):
            raise ValidationError(f"slot {slot} holds {self.filled(slot)} rows, not {snapshot.position}")
        self._stand(slot, snapshot.position, snapshot)

    def _stand(self, slot: int, position: int, snapshot: Snapshot | None) -> None:
        self._filled[slot] = position
        if self.cache.states is not None and snapshot is not None:
            self._unknown.add(slot)
            self.cache.states.restore(slot, snapshot.tensor)
            self._unknown.discard(slot)

    def step(
        self, batch: Sequence[tuple[Segment, Sequence[int]]], *, every_row: bool = False
    ) -> torch.Tensor:
        """Run one step over a ragged batch of (segment, its tokens).

        Returns float32 logits [len(batch), vocab] of each segment's last token, or [T, vocab] of all tokens
        with `every_row`. A segment may start anywhere up to the end of what its slot holds; later rows are
        dropped. Raises ContextLengthError or ValidationError before anything runs.
        """
        self._check(batch)
        for segment, _ in batch:
            self.cache.ensure(segment.slot, segment.start + segment.length)
        if self.recurrent:
            self._unknown.update(segment.slot for segment, _ in batch)
        # after a step the caches hold weights and no Python: the less of it a decode step runs, the better
        logits = None if self.replay is None else self.replay.again(batch)
        if logits is None:
            logits = self._launch(batch, every_row=every_row)
        logits = self.site.own(logits)
        for segment, _ in batch:
            self._filled[segment.slot] = segment.start + segment.length
            self._unknown.discard(segment.slot)
        return logits

    @torch.inference_mode()
    def _launch(self, batch: Sequence[tuple[Segment, Sequence[int]]], *, every_row: bool) -> torch.Tensor:
        """Run a step operation by operation, and record it if it can be replayed."""
        tokens = [token for _, part in batch for token in part]
        segments = [segment for segment, _ in batch]
        slots = {segment.slot for segment in segments}
        context = StepContext(self.launcher, self.cache, segments, self.site.device)
        with self.site.memory(len(tokens), every_row=every_row):
            if self.replay is not None and len(tokens) == len(segments) == len(slots):
                return self.replay.first(context, tokens)
            return self._eager(context, tokens, every_row=every_row)

    def _forward(self, ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.model.logits(self.model(ids, context), context)

    def _eager(self, context: StepContext, tokens: Sequence[int], *, every_row: bool) -> torch.Tensor:
        hidden = self.model(torch.tensor(tokens, device=self.site.device), context)
        if not every_row:
            hidden = self.launcher.run(GATHER_ROWS, hidden, context.last_rows())
        return self.model.logits(hidden, context)

    def _check(self, batch: Sequence[tuple[Segment, Sequence[int]]]) -> None:
        """Raise before anything runs if the batch does not fit the cache, the slots or the vocabulary."""
        if not batch:
            raise ValidationError("a step needs at least one segment")
        ends: dict[int, int] = {}
        before = None
        for segment, tokens in batch:
            self._check_slot(segment.slot)
            if segment.length != len(tokens) or not tokens:
                raise ValidationError(f"a segment of {segment.length} tokens came with {len(tokens)}")
            # a slot's second segment of a step goes on where its first one ended
            first = ends.get(segment.slot, 0)
            end = first or self._filled.get(segment.slot, 0)
            if not first <= segment.start <= end:
                raise ValidationError(
                    f"position {segment.start} of slot {segment.slot} does not follow what the cache holds"
                )
            if self.recurrent:
                self._check_state(segment, ends, end, follows=segment.slot == before)
            before = segment.slot
            self._check_length(segment.start + segment.length)
            if min(tokens) < 0 or max(tokens) >= self.model.vocab_size:
                raise ValidationError(f"token ids must be from 0 to {self.model.vocab_size - 1}")
            ends[segment.slot] = segment.start + segment.length

    def _check_state(self, segment: Segment, ends: Mapping[int, int], end: int, *, follows: bool) -> None:
        """Raise unless a slot's state is known and stands where the segment begins, `end` tokens on.

        `ends` are those of the slots that the step has come to; `follows` says that the last of them is this.
        """
        if segment.slot in ends and not follows:
            raise ValidationError(f"the segments of slot {segment.slot} do not follow one another")
        if segment.start == 0:
            return
        if segment.slot in self._unknown and segment.slot not in ends:
            raise ValidationError(
                f"the state of slot {segment.slot} is not known since a step failed", hint="begin it anew"
            )
        if segment.start != end:
            raise ValidationError(
                f"the state of slot {segment.slot} stands at position {end}, not {segment.start}",
                hint="restore a snapshot, or begin at position 0",
            )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.cache.slots:
            raise ValidationError(f"slot {slot} does not exist: the cache has {self.cache.slots}")

    def _check_length(self, end: int) -> None:
        if end > self.cache.max_seq:
            raise ContextLengthError(end, self.cache.max_seq, hint="raise memory.max_seq or shorten the text")

    def kernels(self) -> list[Kernel]:
        """Return the compiled kernels that steps of this model use; none without a CPU engine."""
        engine = self.launcher.engines.get("numba")
        if not isinstance(engine, CpuEngine):
            return []
        with engine.rehearse() as found, torch.inference_mode():
            # single tokens and whole chunks take different kernels for attention
            for length in {1, min(self.chunk, self.cache.max_seq)}:
                context = StepContext(self.launcher, self.cache, [Segment(0, 0, length)], torch.device("cpu"))
                self._forward(torch.zeros(length, dtype=torch.int64), context)
        return list(found.values())

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int = 0,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Feed `tokens` at positions start.. of a slot, in chunks; returns the last token's logits [vocab].

        `progress` is called with the number of tokens done after every chunk; an exception from it ends the
        prefill between chunks.
        """
        self._check_length(start + len(tokens))
        if not tokens:
            raise ValidationError("the prompt has no tokens", hint="give some text")
        logits = torch.empty(0)
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            logits = self.step([(Segment(slot, start + begin, len(part)), part)])[0]
            if progress is not None:
                progress(begin + len(part))
        return logits

    def decode(self, slot: int, token: int, position: int) -> torch.Tensor:
        """Feed one token at `position` of a slot and return the next token's logits [vocab]."""
        return self.step([(Segment(slot, position, 1), (token,))])[0]

    def all_logits(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, vocab] at every position of a text that starts at position 0."""
        self._check_length(len(tokens))
        if not tokens:
            raise ValidationError("the text has no tokens")
        parts = []
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            parts.append(self.step([(Segment(slot, begin, len(part)), part)], every_row=True))
        return torch.cat(parts)
