"""Flags that change how one reply is made, and the fields of a request that say the same to a server.

This file knows settings and flags. It knows no model and opens no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from hipfire.base.config import Config, Resolved
from hipfire.base.config_keys import AUTO, Value
from hipfire.checkpoint.library import LocalModel
from hipfire.cli.settings import WHOLE
from hipfire.engine.turn import Thinking

# setting, and the field of a request that carries it
SENT = (
    ("generation.temperature", "temperature"),
    ("generation.top_p", "top_p"),
    ("generation.top_k", "top_k"),
    ("generation.min_p", "min_p"),
    ("generation.repeat_penalty", "repeat_penalty"),
    ("generation.presence_penalty", "presence_penalty"),
    ("generation.frequency_penalty", "frequency_penalty"),
    ("generation.max_tokens", "max_tokens"),
)
# most tokens of one span of thinking, by name; 0 is no bound
BUDGETS = {"low": 512, "med": 2048, "high": 8192, "xhigh": 24_576, "max": 32_768, "uncapped": 0}
RENAMED = {"temp": "temperature", "system": "prompt.system", "kv_mode": "kv_cache"}
THINKING = ("reasoning.mode", "reasoning.effort", "reasoning.budget", "reasoning.max_tokens")


@dataclass(frozen=True)
class ReplyFlags:
    """Settings for this command alone; None leaves one to the files, the registry card and the model."""

    temp: Annotated[float | None, Parameter(name=["--temp", "-t"])] = None
    """0 to 2; 0 always takes the most likely token."""

    top_p: float | None = None
    """Keep the smallest set of tokens with this probability."""

    top_k: Annotated[int | None, WHOLE] = None
    """Keep this many of the most likely tokens."""

    min_p: float | None = None
    """Drop tokens below this share of the best token's probability."""

    repeat_penalty: float | None = None
    """Divides the score of tokens seen before; 1 is off."""

    presence_penalty: float | None = None
    """Subtracted once from the score of tokens seen before."""

    frequency_penalty: float | None = None
    """Subtracted from a token's score for each time it was seen."""

    max_tokens: Annotated[int | None, WHOLE, Parameter(name=["--max-tokens", "-n"])] = None
    """Longest reply, in tokens."""

    system: str | None = None
    """System message."""

    thinking: str | None = None
    """Whether the model thinks before it answers: auto, on or off."""

    reasoning_effort: str | None = None
    """How hard the model is told to think: auto, none, low, medium, high, xhigh or max."""

    max_think_tokens: Annotated[int | None, WHOLE] = None
    """Most tokens of one span of thinking; 0 is no bound."""

    def values(self) -> dict[str, Value]:
        """Return the values by setting; the flags' own names are those of the settings, but for three."""
        return {RENAMED.get(name, name): value for name, value in vars(self).items()}


def model_settings(
    config: Config, given: Mapping[str, Value], local: LocalModel | None
) -> Callable[..., Resolved]:
    """Return what gives a setting by its name, with the model's own table and registry card among the layers.

    `given` are the values of this command. The result takes the model file's values as `model_file`.
    """
    card = local.card.settings() if local is not None and local.card is not None else {}
    name = local.settings_name if local is not None else None

    def resolve(key: str, model_file: Mapping[str, Value] | None = None) -> Resolved:
        return config.resolve(key, cli=given, model=name, card=card, model_file=model_file)

    return resolve


def request_fields(resolve: Callable[[str], Resolved], *, thinking: bool = True) -> dict[str, Any]:
    """Return the fields of a request that say what somebody chose, those about thinking among them or not.

    Built-in defaults are not sent: below them come the model file's own values, which the server knows.
    """
    fields: dict[str, Any] = {}
    for name, sent in SENT:
        found = resolve(name)
        if found.winner.origin != "default":
            fields[sent] = found.value
    return fields | (thinking_fields(resolve) if thinking else {})


def thinking_fields(resolve: Callable[[str], Resolved]) -> dict[str, Any]:
    """Return the fields of a request that say what is set about thinking."""
    chosen = chosen_thinking(resolve)
    fields: dict[str, Any] = {}
    if chosen.enabled is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": chosen.enabled}
    if chosen.effort is not None:
        fields["reasoning_effort"] = chosen.effort
    if chosen.cap is not None:
        fields["max_think_tokens"] = chosen.cap
    return fields


def chosen_thinking(resolve: Callable[[str], Resolved]) -> Thinking:
    """Return what is set about thinking; off, also as an effort of none, makes the rest meaningless."""
    mode, effort = resolve("reasoning.mode").value, str(resolve("reasoning.effort").value)
    if mode == "off" or (mode == AUTO and effort == "none"):
        return Thinking(enabled=False)
    cap = resolve("reasoning.max_tokens").value
    if cap is None:
        cap = BUDGETS.get(str(resolve("reasoning.budget").value))
    return Thinking(
        enabled=True if mode == "on" else None,
        effort=None if effort in (AUTO, "none") else effort,
        cap=None if cap is None else int(cap),
    )
