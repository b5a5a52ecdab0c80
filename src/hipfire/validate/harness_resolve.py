"""Every setting of a harness run with the place it came from, and the refusals that need no server.

The default sampling is what users get, not greedy. This file does not know flags' spelling in argparse and
starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hipfire.base.config_keys import Value
from hipfire.base.errors import ValidationError
from hipfire.base.sampling import SamplingParams
from hipfire.checkpoint.library import LocalModel
from hipfire.checkpoint.registry import Card, Registry
from hipfire.validate.harness_options import DEFAULT_PORT, THINKING_CAPS, HarnessOptions

DEFAULT_MAX_TOKENS: Final = 2048
RECIPES: Final[Mapping[str, Mapping[str, float]]] = {
    "general": {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.0},
    "coding": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.0},
    "nothink": {"temperature": 0.7, "top_p": 0.80, "top_k": 20, "presence_penalty": 1.5},
}
# what stands in for a profile that the registry does not have
_FALLBACK: Final = {"": "general", "general": "general", "coding": "coding", "instruct": "nothink"}
_SAMPLING_FIELDS: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
)
UNSET: Final = "not set"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from; None is left to the server."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a run will use. `fields` are the sampling, thinking and length fields of every request."""

    settings: Mapping[str, Setting]
    fields: Mapping[str, Any]
    warnings: tuple[str, ...]

    def value(self, name: str) -> Any:
        """Return a setting's value."""
        return self.settings[name].value

    def lines(self) -> list[str]:
        """Return one line per setting: name, value, source; what is not set is shown too."""
        width = max(len(name) for name in self.settings)
        return [
            f"{name:<{width}}  {UNSET if each.value is None else each.value}  ({each.source})"
            for name, each in self.settings.items()
        ]


def find_card(options: HarnessOptions, registry: Registry, local: LocalModel) -> tuple[Card | None, str]:
    """Return the registry card whose settings apply, and where its tag came from."""
    if options.tag is not None:
        return registry.require(options.tag), "explicit"
    return local.card, "file name" if local.card is not None else "default"


def resolve(options: HarnessOptions, card: Card | None, tag_source: str) -> Resolved:
    """Return every setting; raise ValidationError for a combination that cannot give a useful reply."""
    warnings: list[str] = []
    sampling, label, effort = _sampling(options, card, warnings)
    thinking = _thinking(options, effort, warnings)
    card_kv = None if card is None else card.default_kv_mode
    settings = {
        "tag": Setting(None if card is None else card.tag, tag_source),
        "mode": _given(options.mode, "battery"),
        "kv": _first((options.kv, "explicit"), (card_kv, "registry"), ("auto", "default")),
        "max_seq": _first((options.max_seq, "explicit"), (None, "default: the server's choice")),
        "max_tokens": _first((options.max_tokens, "explicit"), (DEFAULT_MAX_TOKENS, "default")),
        "threads": _first((options.threads, "explicit"), (None, "default: the server's choice")),
        "seed": _first((options.seed, "explicit"), (None, "default: a fresh one for each request")),
        **{f"sampling.{name}": Setting(sampling.get(name), label) for name in _SAMPLING_FIELDS},
        **{
            f"thinking.{name}": Setting(thinking.get(key), source)
            for name, key, source in (
                ("mode", "thinking", _thinking_source(options, "explicit")),
                ("effort", "reasoning_effort", _effort_source(options, effort, label)),
                ("cap", "max_think_tokens", _thinking_source(options, "from --thinking")),
            )
        },
        "feedback_shape": _given(options.feedback_shape, "rich"),
        "fail_on": _given(",".join(options.fail_on) or "none", "empty,attractor"),
        "port": _given(options.port, DEFAULT_PORT),
        "cold": _given(options.cold, False),
        "spawn": _given(options.spawn, True),
    }
    fields: dict[str, Any] = {"max_tokens": settings["max_tokens"].value, **sampling, **thinking}
    if options.seed is not None:
        fields["seed"] = options.seed
    _preflight(settings, fields)
    return Resolved(settings, fields, tuple(warnings))


def _sampling(
    options: HarnessOptions, card: Card | None, warnings: list[str]
) -> tuple[dict[str, Value], str, str | None]:
    """Return the sampling fields, their source, and the thinking effort that comes with a recipe."""
    kind, _, rest = options.sampling.partition(":")
    if options.sampling == "greedy":
        return {"temperature": 0.0}, "explicit: greedy", None
    if kind == "json":
        return _json_sampling(rest), "explicit: json", None
    if kind == "recipe" and rest in RECIPES:
        return dict(RECIPES[rest]), f"recipe:{rest}", "none" if rest == "nothink" else None
    if kind == "registry" and rest in _FALLBACK:
        values = {} if card is None else card.sampling_profiles.get(rest, {}) if rest else card.settings()
        fields = {name: values.get(f"generation.{name}") for name in _SAMPLING_FIELDS}
        found: dict[str, Value] = {name: value for name, value in fields.items() if value is not None}
        if found:
            return found, options.sampling, None
        recipe = _FALLBACK[rest]
        warnings.append(f"the registry has no sampling for {options.sampling}: recipe:{recipe} is used")
        return dict(RECIPES[recipe]), f"recipe:{recipe} instead of {options.sampling}", None
    raise ValidationError(
        f"--sampling {options.sampling!r} is not known",
        hint="use registry, registry:general|coding|instruct, greedy, recipe:general|coding|nothink or json:",
    )


def _json_sampling(text: str) -> dict[str, Value]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"--sampling json: is not JSON: {error}") from error
    if not isinstance(values, dict) or not values:
        raise ValidationError("--sampling json: must be an object with at least one field")
    unknown = sorted(set(values) - set(_SAMPLING_FIELDS))
    if unknown:
        raise ValidationError(
            f"--sampling json: unknown field {unknown[0]!r}", hint="use " + ", ".join(_SAMPLING_FIELDS)
        )
    # the ranges are checked where the server checks them
    SamplingParams(**values)
    return values


def _thinking(options: HarnessOptions, effort: str | None, warnings: list[str]) -> dict[str, Any]:
    """Return the request's thinking fields: mode, effort and cap are three axes, and off wins over all."""
    effort = options.thinking_effort or effort
    if options.thinking == "off":
        if options.thinking_effort not in (None, "none"):
            warnings.append(f"--thinking off wins: the effort {effort} is not sent")
        return {"thinking": "off"}
    fields: dict[str, Any] = {}
    if options.thinking is not None:
        fields = {"thinking": "on", "max_think_tokens": THINKING_CAPS[options.thinking]}
    elif options.thinking_effort is not None:
        # an effort without a cap is not to be cut short
        fields = {"max_think_tokens": 0}
    return fields if effort is None else fields | {"reasoning_effort": effort}


def _preflight(settings: Mapping[str, Setting], fields: Mapping[str, Any]) -> None:
    """Refuse what cannot end well."""
    cap, length = fields.get("max_think_tokens", 0), fields["max_tokens"]
    if 0 < length <= cap:
        raise ValidationError(
            f"--max-tokens {length} is not above the thinking cap of {cap}, so that no answer may be left",
            hint=f"raise --max-tokens above {cap}, or lower --thinking",
        )
    max_seq = settings["max_seq"].value
    if max_seq is not None and length >= max_seq:
        raise ValidationError(
            f"--max-tokens {length} leaves no room for a prompt in --max-seq {max_seq}",
            hint="lower --max-tokens or raise --max-seq",
        )


def _first(*offers: tuple[Any, str]) -> Setting:
    """Return the first offer that has a value, else the last one."""
    return next((Setting(*offer) for offer in offers if offer[0] is not None), Setting(*offers[-1]))


def _given(value: Any, default: Any) -> Setting:
    return Setting(value, "default" if value == default else "explicit")


def _thinking_source(options: HarnessOptions, source: str) -> str:
    return source if options.thinking is not None else "default: the model's choice"


def _effort_source(options: HarnessOptions, recipe_effort: str | None, label: str) -> str:
    if options.thinking_effort is not None:
        return "explicit"
    return label if recipe_effort is not None else "default: the model's choice"
