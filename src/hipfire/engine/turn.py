"""What a client asks of a generation and what it is told while it runs: plain, validated data.

These are the values that pass between the HTTP server, the daemon and the engine's core. No torch, no
transport: `wire.py` turns them into JSON lines and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hipfire.base.errors import ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams

Channel = Literal["answer", "reasoning"]
TurnFinish = Literal["stop", "length", "tool_calls"]
ToolMode = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class TurnKey:
    """Which attempt of which request; an event of a stale attempt never reaches a client."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Thinking:
    """The three axes of thinking, each None where the client leaves it to the model.

    `enabled` is the mode; `effort` is told to the template; `cap` is the most tokens of one thinking span
    (0 = no bound).
    """

    enabled: bool | None = None
    effort: str | None = None
    cap: int | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may, must not or must be called; `name` is the function of a "named" choice."""

    mode: ToolMode = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What shape the answer must have; `schema` is the JSON schema of kind "json_schema"."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One generation: a conversation (`messages`) or plain text to continue (`prompt`), and how.

    `sampling_given` names the fields of `sampling` that the client chose; the model file's own values and
    then the engine's defaults stand in for the others. None: all of them count as chosen. `fit` cuts
    max_tokens to what the context holds instead of refusing. `deadline` is the number of seconds after which
    the turn is given up, counted from its arrival in the engine.
    """

    key: TurnKey
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    response_format: ResponseFormat = ResponseFormat()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_given: frozenset[str] | None = None
    generation: GenerationParams = field(default_factory=GenerationParams)
    thinking: Thinking = Thinking()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    fit: bool = False
    deadline: float | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValidationError("a turn has either messages or a prompt", hint="give one of the two")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called; `arguments` is a JSON object."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token's text, its bytes and natural-log probability, with the most probable ones at its place."""

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Counts of tokens. `cached` is the part of `prompt` that was not computed again."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class TurnTimings:
    """Wall times in milliseconds, from the turn's arrival; rates in tokens per second, 0 where undefined."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    latency_ms: float
    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a turn, sent when its prompt is about to be read."""

    key: TurnKey
    in_thinking: bool
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text on a channel, with the log-probabilities of its tokens if they were asked for."""

    key: TurnKey
    channel: Channel
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Info:
    """Something worth knowing that ends nothing."""

    key: TurnKey
    message: str


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How a turn ended. `stop` is the stop string that matched; `seed` reproduces the draws."""

    finish: TurnFinish
    usage: TurnUsage
    timings: TurnTimings
    seed: int
    stop: str | None = None
    calls: tuple[ToolCall, ...] = ()
    warnings: tuple[str, ...] = ()
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The turn is complete and waits for its client's commit; not a terminal."""

    key: TurnKey
    result: TurnResult


@dataclass(frozen=True, slots=True)
class Done:
    """Terminal: the client has everything, and the turn stays in the cache."""

    key: TurnKey
    result: TurnResult


@dataclass(frozen=True, slots=True)
class Aborted:
    """Terminal: cancelled, not committed in time, or past its deadline; nothing of the turn stays cached."""

    key: TurnKey
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: an error. `kind` is the class by which clients tell errors apart."""

    key: TurnKey
    kind: str
    message: str
    hint: str = ""
    retryable: bool = False


Event = Started | Delta | Info | Ready | Done | Aborted | Failed
TERMINALS = (Done, Aborted, Failed)
