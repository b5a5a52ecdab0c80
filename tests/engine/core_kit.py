"""An actor on the engine's stage: a model that says what its prompt calls for, from lines in the cache.

It writes every token into the real key cache and reads a sequence back from there, so rows that are missing,
stale or another sequence's show at once as another text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.engine.core import CoreLimits, EngineCore
from hipfire.engine.turn import (
    TERMINALS,
    Delta,
    Done,
    Event,
    Ready,
    Started,
    TurnKey,
    TurnRequest,
    TurnResult,
)
from hipfire.kernels.kv_cache import KV_WRITE
from hipfire.layers.context import StepContext
from hipfire.runtime.load import LoadedModel
from hipfire.runtime.runner import Runner
from hipfire.runtime.templates import Templates
from hipfire.text.template import ChatTemplate
from recital import END, recite
from tiny_models import IM_END, TEMPLATE

GREEDY = SamplingParams(temperature=0.0)
OPENING = "<|im_start|>assistant\n"
THINKING_TEMPLATE = TEMPLATE.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
OPEN_TEMPLATE = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}' + TEMPLATE
)


class Actor:
    """Its next token is the one that continues the script which the sequence so far begins.

    Without a script it says `always` in a chat, and question marks elsewhere.
    `fed` collects (slot, position, token). Feeding a token of `faults` raises; after one of `poison` the
    logits are NaN.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab
        self.scripts: list[list[int]] = []
        self.fed: list[tuple[int, int, int]] = []
        self.steps: list[int] = []
        self.always: list[int] = []
        self.faults: set[int] = set()
        self.poison: set[int] = set()
        self._cache: Any = None

    def say(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Learn a line."""
        self.scripts.append([*prompt, *reply])

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        self._cache = step.cache
        rows, ids = step.rows.tolist(), tokens.tolist()
        for token in ids:
            if token in self.faults:
                raise RuntimeError(f"the device stumbled over {token}")
        self.fed += [(slot, position, token) for (slot, position), token in zip(rows, ids, strict=True)]
        self.steps.append(len(ids))
        values = tokens.float()[:, None, None].expand(-1, 1, 4).contiguous()
        step.launcher.run(KV_WRITE, self._cache._keys[0], step.rows, values)
        return step.rows.float()

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        del step
        rows = torch.zeros(len(hidden), self.vocab_size)
        for row, (slot, position) in enumerate(hidden.long().tolist()):
            seen = self._cache._keys[0][slot, : position + 1, 0, 0].long().tolist()
            if seen[-1] in self.poison:
                rows[row] = float("nan")
            rows[row, self._next(seen)] += 10.0
        return rows

    def _next(self, seen: list[int]) -> int:
        for script in self.scripts:
            if script[: len(seen)] == seen:
                return script[len(seen)] if len(seen) < len(script) else IM_END
        text = bytes(token if token < 128 else 0 for token in seen)
        opened = text.rfind(b"assistant\n")
        if self.always and opened >= 0:
            return [*self.always, IM_END][len(seen) - opened - len(b"assistant\n")]
        return ord("?")


def staged(
    *, slots: int = 2, template: str | None = TEMPLATE, max_seq: int = 300, chunk: int = 8, **assets: Any
) -> LoadedModel:
    """A loaded model that is an actor; `assets` are fields of TextAssets."""
    plain = recite([0], [0], max_seq=max_seq)
    actor = Actor(plain.model.vocab_size)
    cache = KvCache(plain.config.cache_specs(), mode=kv_mode("f32"), slots=slots, max_seq=max_seq)
    for buffer in (*cache._keys, *cache._values):
        buffer.fill_(-1.0)
    chosen = None if template is None else ChatTemplate(template, bos_token=None, eos_token=END)
    return dataclasses.replace(
        plain,
        model=actor,
        runner=Runner(actor, cache, chunk=chunk),
        templates=None if chosen is None else Templates(chosen, chosen),
        assets=dataclasses.replace(plain.assets, **assets),
    )


def ids(text: str) -> list[int]:
    """The tokens of a text in the tiny vocabulary, markers of the template included."""
    return recite([0], [0]).tokenizer.encode(text, parse_special=True)


class Stage:
    """A core over an actor, with everything that its turns were told."""

    def __init__(
        self,
        loaded: LoadedModel | None = None,
        *,
        clock: Callable[[], float] | None = None,
        **limits: Any,
    ) -> None:
        self.loaded = loaded or staged()
        more = {} if clock is None else {"clock": clock}
        self.core = EngineCore(self.loaded, CoreLimits(**limits), **more)
        self.events: dict[str, list[Event]] = {}

    @property
    def actor(self) -> Actor:
        assert isinstance(self.loaded.model, Actor)
        return self.loaded.model

    def script(self, prompt: str, reply: str, *, end: bool = True) -> None:
        """Let the actor answer a prompt, which is text with markers, with `reply`."""
        self.actor.say(ids(prompt), ids(reply) + [IM_END] * end)

    def request(self, name: str, prompt: str | None = None, **fields: Any) -> TurnRequest:
        fields.setdefault("sampling", GREEDY)
        return TurnRequest(TurnKey(name, 1), prompt=prompt, **fields)

    def submit(self, name: str, prompt: str | None = None, **fields: Any) -> None:
        self.events[name] = []
        self.core.submit(self.request(name, prompt, **fields), self.events[name].append)

    def chat(self, name: str, *turns: str, **fields: Any) -> None:
        """Submit a conversation whose turns alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(turns))
        self.submit(name, messages=messages, **fields)

    def run(self, steps: int = 10_000) -> None:
        """Step until there is nothing to do."""
        for _ in range(steps):
            if not self.core.step():
                break
        self.core.integrity_check()

    def commit(self, name: str) -> None:
        self.core.commit(TurnKey(name, 1))

    def finish(self, name: str) -> TurnResult:
        """Run to the end, commit, and return the result."""
        self.run()
        self.commit(name)
        done = self.events[name][-1]
        assert isinstance(done, Done), done
        return done.result

    def text(self, name: str, channel: str = "answer") -> str:
        deltas = [event for event in self.events[name] if isinstance(event, Delta)]
        return "".join(delta.text for delta in deltas if delta.channel == channel)

    def started(self, name: str) -> Started:
        [event] = [event for event in self.events[name] if isinstance(event, Started)]
        return event

    def result(self, name: str) -> TurnResult:
        [event] = [event for event in self.events[name] if isinstance(event, Ready)]
        return event.result

    def terminals(self, name: str) -> list[Event]:
        return [event for event in self.events[name] if isinstance(event, TERMINALS)]


def limit(tokens: int | None = None, **fields: Any) -> Mapping[str, Any]:
    """Fields of a request that bound its reply."""
    return {"generation": GenerationParams(max_tokens=tokens, **fields)}
