"""What a request may ask of the sampler and of the generation loop: plain, validated values.

This file does not know the defaults that users see (the configuration layer supplies those), any
vocabulary, or how a token is drawn. Every default here is neutral: it switches its stage off, so
`SamplingParams()` draws from the model's own distribution and `GenerationParams()` runs until the model
ends its turn or the context is full.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hipfire.base.errors import ValidationError

# a logit is a float32 of magnitude 10 or so, which resolves about 1e-6; dividing by a temperature this small
# would amplify rounding noise, and far smaller ones would overflow
GREEDY_TEMPERATURE: Final = 1e-5

MAX_SEED: Final = 2**64 - 1
MAX_TOP_LOGPROBS: Final = 20
MAX_BIAS: Final = 100.0


def _refuse(name: str, value: object, allowed: str, hint: str = "") -> ValidationError:
    return ValidationError(f"{name} is {reprlib.repr(value)} but must be {allowed}", hint=hint)


def _number(name: str, value: object, low: float, high: float, hint: str = "") -> float:
    """Return `value` as a float in [low, high]; NaN, infinities, bools and text are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refuse(name, value, f"a number from {low:g} to {high:g}", hint)
    return float(value)


def _integer(name: str, value: object, low: int, high: int | None = None, hint: str = "") -> int:
    """Return `value` as an int in [low, high]; bools, floats and text are refused."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(name, value, allowed, hint)
    if value < low or (high is not None and value > high):
        raise _refuse(name, value, allowed, hint)
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple | list):
        raise _refuse("stop", value, "a list of strings", "put a single stop string into a list")
    for position, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise _refuse(f"stop[{position}]", text, "a string of at least one character")
    return tuple(value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Return a mapping, or pairs, of token ids and biases as pairs in ascending order of ids."""
    if not isinstance(value, Mapping | tuple | list):
        raise _refuse("logit_bias", value, "a mapping of token ids to numbers")
    pairs = value.items() if isinstance(value, Mapping) else value
    checked: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refuse("logit_bias", pair, "a mapping of token ids to numbers")
        token = _integer("a token id of logit_bias", pair[0], 0)
        checked[token] = _number(f"logit_bias of token {token}", pair[1], -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(checked.items()))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Raises `ValidationError` (field, value, allowed range) when constructed.

    An explicit 0 is a value of its own and is never taken for "not set". Fields, in the order of their use:

    - `logit_bias`: pairs of a token id and a number (-100 to 100) that is added to its logit; a mapping is
      accepted.
    - `repeat_penalty` (1 to 3; 1 = off): the logit of each distinct token in the window is divided by it
      where positive and multiplied by it where negative, once.
    - `presence_penalty` (-2 to 2; 0 = off): subtracted once from each token in the window.
    - `frequency_penalty` (-2 to 2; 0 = off): subtracted once per occurrence in the window.
    - `penalty_window`: how many trailing tokens of prompt and reply penalties look at; 0 = none, -1 = all.
    - `temperature` (0 to 2): 0 is greedy, and so is anything up to `GREEDY_TEMPERATURE`.
    - `top_k`: keep that many of the largest logits; 0 and -1 = off.
    - `min_p` (0 to 1; 0 = off): keep tokens of at least this share of the most probable token's probability.
    - `top_p` (0 to 1; 1 = off): keep the smallest set of tokens whose mass reaches it; 0 keeps one token.
    - `seed` (0 to 2**64 - 1): None takes fresh entropy for every request.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 128
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "temperature": _number("temperature", self.temperature, 0.0, 2.0),
            "top_k": _integer("top_k", self.top_k, -1, hint="0 or -1 switches it off"),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "repeat_penalty": _number(
                "repeat_penalty", self.repeat_penalty, 1.0, 3.0, hint="1 switches it off"
            ),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "penalty_window": _integer(
                "penalty_window", self.penalty_window, -1, hint="-1 means the whole context"
            ),
            "logit_bias": _biases(self.logit_bias),
        }
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED, hint="leave it out for a fresh seed")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is taken instead of a draw."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def penalizes(self) -> bool:
        """Return whether any penalty can change a logit."""
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return self.penalty_window != 0 and penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """When a reply ends and what is reported with it. Raises `ValidationError` when constructed.

    - `max_tokens`: most tokens of the reply; 0 reads the prompt and generates nothing, None means until the
      context is full.
    - `stop`: texts that end the reply; the reply holds everything before the first of them. A list is
      accepted.
    - `ignore_eos`: end tokens are never drawn.
    - `min_tokens`: end tokens are not drawn before the reply (the prompt does not count) has that many
      tokens.
    - `top_logprobs` (0 to 20): report the log-probability of each token and of that many most probable ones;
      None reports none.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        _flag("ignore_eos", self.ignore_eos)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, hint="leave it out to run until the context is full")
            if self.min_tokens > self.max_tokens:
                raise _refuse(
                    "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
                )
        if self.top_logprobs is not None:
            _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
