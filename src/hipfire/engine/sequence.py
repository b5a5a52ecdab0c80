"""One reply while it grows: logits in, deltas out, until it ends.

It draws tokens, turns them into text on the right channel, keeps thinking within its cap, the answer within
its format, and knows why it ended. It does not know slots, batches or other turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from hipfire.base.errors import HipfireError
from hipfire.base.log import logger
from hipfire.engine.grammar import Mask
from hipfire.engine.openers import WINDOW, OpenerGuard
from hipfire.engine.prompting import Prepared
from hipfire.engine.turn import Channel, Delta, TextLogprob, ToolCall, TurnFinish, TurnKey
from hipfire.runtime.load import LoadedModel
from hipfire.runtime.sampler import SampledToken, Sampler
from hipfire.text.reply_parser import Piece, ReplyParser
from hipfire.text.tokenizer import Tokenizer

# what opens a span of thought by itself, for formats where one token does
_OPENERS: Final = {"think": "<think>"}


class NoCallError(HipfireError):
    """A tool had to be called, and the model called none."""

    kind = "internal"


class RunningReply:
    """The reply to one prepared turn.

    `history` holds the prompt and all tokens of the reply that were or will be fed to the model. `finish` is
    None while the reply goes on. Raises ValidationError when constructed for a token id that does not exist.
    """

    def __init__(self, key: TurnKey, prepared: Prepared, loaded: LoadedModel) -> None:
        tokenizer = loaded.tokenizer
        self.prepared = prepared
        self.history = list(prepared.prompt)
        self.generated = 0
        self.reasoning = 0
        self.finish: TurnFinish | None = None
        self.calls: tuple[ToolCall, ...] = ()
        self.warnings = list(prepared.warnings)
        self._key = key
        self._tokenizer = tokenizer
        self._end_ids = loaded.end_ids
        self._sampler = Sampler(
            prepared.sampling,
            loaded.config.sizes.vocab_size,
            generation=prepared.generation,
            end_ids=loaded.end_ids,
            blocked_ids=tokenizer.surplus_ids,
        )
        self._detokenizer = tokenizer.detokenizer(
            at_start=not prepared.continues, keep=_ids(tokenizer, prepared.format.markers)
        )
        self._parser = ReplyParser(
            prepared.format,
            in_thinking=prepared.in_thinking,
            closed=prepared.closed,
            stops=prepared.generation.stop,
            tools=prepared.tools,
        )
        opener = _OPENERS.get(prepared.format.thinking) if prepared.may_think else None
        self._opener = None if opener is None else tokenizer.token_id(opener)
        self._guard = OpenerGuard(prepared.format.markers, tokenizer.token_id)
        self._forced: deque[int] = deque()
        self._span = 0
        self._scored: dict[Channel, list[TextLogprob]] = {"answer": [], "reasoning": []}

    @property
    def seed(self) -> int:
        """Return the seed of the draws."""
        return self._sampler.seed

    @property
    def stop(self) -> str | None:
        """Return the stop string that ended the reply, or None."""
        return self._parser.matched

    def draw(self, logits: torch.Tensor) -> list[Delta]:
        """Choose the next token from `logits` [vocab], the last token's; returns the text that it completes.

        Sets `finish` if the reply ends with it. Raises InternalError for unusable logits, NoCallError if the
        reply ends without the tool call that it had to make.
        """
        if self.generated >= self.prepared.budget:
            return self._end("length")
        if self._forced:
            return self._take(self._forced.popleft(), None)
        mask = self._mask()
        sampled = self._sampler.sample(logits, self.history, mask)
        if sampled.id in self._end_ids:
            if not (self._parser.in_reasoning and self.prepared.close):
                self.generated += 1
                return self._end("stop")
            # an end inside of a thought ends the thought, or the answer would be lost
            return self._close()
        grammar = self.prepared.grammar
        if grammar is not None and not self._parser.in_reasoning and sampled.id != self._opener:
            grammar.take(sampled.id)
        return self._take(sampled.id, self._score(sampled, logits))

    def _close(self) -> list[Delta]:
        self._forced.extend(self.prepared.close)
        return self._take(self._forced.popleft(), None)

    def _take(self, token: int, score: TextLogprob | None) -> list[Delta]:
        """Add a token to the reply; one that was not drawn has no score."""
        before = self._parser.in_reasoning
        self.history.append(token)
        self.generated += 1
        pieces = self._parser.push(self._detokenizer.push(token))
        after = self._parser.in_reasoning
        self.reasoning += before
        self._span = self._span + 1 if before and after else 0
        # a token that leads from one channel to the other is markup, of which clients see nothing
        if score is not None and before == after:
            self._scored["reasoning" if after else "answer"].append(score)
        deltas = self._deltas(pieces)
        grammar = self.prepared.grammar
        if self._parser.matched is not None or (grammar is not None and not after and grammar.complete):
            return deltas + self._end("stop")
        if self.generated >= self.prepared.budget:
            return deltas + self._end("length")
        if after and not self._forced and 0 < self.prepared.cap <= self._span:
            self._forced.extend(self.prepared.close)
        return deltas

    def _mask(self) -> Mask | None:
        """Return which tokens may come next, None for all: an answer's format and the guard forbid some."""
        grammar = self.prepared.grammar
        if grammar is None or self._parser.in_reasoning:
            begin = max(len(self.prepared.prompt), len(self.history) - WINDOW)
            banned = self._guard.banned(self.history[begin:])
            if not banned:
                return None
            allowed = np.ones(self._tokenizer.vocab_size, np.bool_)
            allowed[banned] = False
            return allowed
        allowed = grammar.allowed()
        if self._opener is not None and self.generated == 0:
            allowed[self._opener] = True
        return allowed

    def _end(self, reason: TurnFinish) -> list[Delta]:
        pieces = []
        if self._parser.matched is None:
            pieces = self._parser.push(self._detokenizer.flush())
            pieces += self._parser.finish()
        for line in self._parser.repairs():
            logger().info("turn %s: %s", self._key.id, line)
        if self._parser.matched is not None:
            reason = "stop"
        self.calls = self._released(cut=reason == "length")
        deltas = self._deltas(pieces)
        self.finish = "tool_calls" if self.calls else reason
        return deltas

    def _released(self, *, cut: bool) -> tuple[ToolCall, ...]:
        """Return the calls that the client gets; a reply that was `cut` may end inside of one."""
        choice = self.prepared.tool_choice
        if choice.mode == "none" or not self.prepared.tools:
            return ()
        found = list(self._parser.sure_calls() if cut else self._parser.calls())
        if len(found) < len(self._parser.calls()):
            self.warnings.append("the reply was cut inside of a tool call, which is left out")
        if choice.mode == "named":
            found = [call for call in found if call.name == choice.name]
        if not choice.parallel and len(found) > 1:
            self.warnings.append(f"{len(found) - 1} further tool calls are left out, as asked")
            found = found[:1]
        if not found and choice.mode in ("required", "named"):
            raise NoCallError(
                "the model did not call a tool although tool_choice demands it",
                hint="raise max_tokens" if cut else "try again, or use a larger model",
            )
        return tuple(ToolCall(call.name, call.arguments) for call in found)

    def _deltas(self, pieces: Iterable[Piece]) -> list[Delta]:
        made = []
        for piece in pieces:
            if piece.text:
                scores, self._scored[piece.channel] = self._scored[piece.channel], []
                made.append(Delta(self._key, piece.channel, piece.text, tuple(scores)))
        return made

    def _score(self, sampled: SampledToken, logits: torch.Tensor) -> TextLogprob | None:
        wanted = self.prepared.generation.top_logprobs
        if wanted is None:
            return None
        top = tuple(self._described(candidate) for candidate in self._sampler.top_logprobs(logits, wanted))
        return replace(self._described(sampled), top=top)

    def _described(self, token: SampledToken) -> TextLogprob:
        return TextLogprob(
            self._tokenizer.token_text(token.id),
            tuple(self._tokenizer.token_bytes(token.id)),
            token.logprob or 0.0,
        )


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    found = (tokenizer.token_id(text) for text in texts)
    return frozenset(number for number in found if number is not None)
