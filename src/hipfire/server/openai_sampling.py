"""How a reply of OpenAI's API is drawn, when it ends and what shape it has.

Plain functions of the request's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.base.sampling import MAX_TOP_LOGPROBS, GenerationParams, SamplingParams
from hipfire.engine.turn import ResponseFormat
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields

MAX_TOKENS = 393_216
MAX_STOPS = 4
MAX_STOP_CHARS = 64

# the API's names of the knobs, and SamplingParams' own
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_window": "penalty_window",
    "seed": "seed",
}


def limit_of(fields: Fields, *names: str) -> int | None:
    """Return the most tokens of a reply, which has several names; they must agree."""
    found = {name: fields.integer(name, 1, MAX_TOKENS) for name in names}
    values = {value for value in found.values() if value is not None}
    if len(values) > 1:
        raise FieldError(names[0], f"{' and '.join(names)} differ", hint="give one of them")
    return values.pop() if values else None


def chat_logprobs(fields: Fields) -> int | None:
    """Return how many of the most probable tokens are told at each place, None for no log-probabilities."""
    wanted = fields.flag("logprobs") or False
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs", hint="set logprobs to true")
    return (top or 0) if wanted else None


def generation_of(fields: Fields, limit: int | None, top_logprobs: int | None) -> GenerationParams:
    """Return when the reply ends."""
    least = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if limit is not None and least > limit:
        raise fields.fault("min_tokens", f"at most max_tokens, which is {limit}")
    return GenerationParams(
        max_tokens=limit,
        stop=_stops(fields),
        ignore_eos=fields.flag("ignore_eos") or False,
        min_tokens=least,
        top_logprobs=top_logprobs,
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    texts = [stop] if isinstance(stop, str) else stop if stop is not None else []
    short = isinstance(texts, list) and len(texts) <= MAX_STOPS
    if not short or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise fields.fault(
            "stop", f"a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"
        )
    return tuple(texts)


def sampling_of(fields: Fields) -> dict[str, Any]:
    """Return the turn's `sampling` and `sampling_given`."""
    given: dict[str, Any] = {}
    for name, ours in SAMPLING.items():
        if (value := fields.get(name)) is None:
            continue
        if ours in given:
            raise FieldError(name, f"{name} is given by two names", hint="give one of them")
        given[ours] = _checked(name, ours, value)
    bias = fields.get("logit_bias")
    if bias:
        given["logit_bias"] = _checked("logit_bias", "logit_bias", _bias(fields, bias))
    return {"sampling": SamplingParams(**given), "sampling_given": frozenset(given)}


def _checked(name: str, ours: str, value: Any) -> Any:
    try:
        return getattr(SamplingParams(**{ours: value}), ours)
    except ValidationError as error:
        raise FieldError(name, error.message, hint=error.hint) from error


def _bias(fields: Fields, bias: Any) -> dict[int, Any]:
    if not isinstance(bias, Mapping) or not all(key.isascii() and key.isdecimal() for key in bias):
        raise fields.fault("logit_bias", "an object with token ids as its names")
    if any(len(key) > 10 for key in bias) or len({int(key) for key in bias}) != len(bias):
        raise fields.fault("logit_bias", "an object in which each token id stands once")
    return {int(key): value for key, value in bias.items()}


def response_format_of(fields: Fields) -> ResponseFormat:
    """Return what shape the answer must have."""
    wanted = fields.part("response_format")
    if wanted is None:
        return ResponseFormat()
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.fault("type", "text, json_object or json_schema")
    if kind == "text":
        wanted.finish()
        return ResponseFormat()
    if kind == "json_object":
        # some servers take a schema here
        schema = _schema(wanted, "schema")
        wanted.finish()
        return ResponseFormat("json_object" if schema is None else "json_schema", schema)
    described = wanted.part("json_schema")
    if described is None:
        raise wanted.fault("json_schema", "an object with name and schema")
    for name in ("name", "description"):
        described.text(name)
    described.flag("strict")
    schema = _schema(described, "schema")
    if schema is None:
        raise described.fault("schema", "a JSON schema")
    described.finish()
    wanted.finish()
    return ResponseFormat("json_schema", schema)


def _schema(fields: Fields, name: str) -> Mapping[str, Any] | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise fields.fault(name, "a JSON schema, which is an object")
    return value
