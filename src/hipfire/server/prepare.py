"""What the server adds to a request before the engine gets it: system text, settings, tidy text, a deadline.

Plain functions of the request and of settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from hipfire.base.sampling import SamplingParams
from hipfire.engine.turn import Thinking, TurnRequest
from hipfire.server.options import ModelSettings, ServeOptions
from hipfire.text.normalize import normalize_prompt

_SAMPLING_FIELDS = tuple(each.name for each in fields(SamplingParams))


def turn(request: TurnRequest, options: ServeOptions, settings: ModelSettings) -> TurnRequest:
    """Return the request as the engine gets it; what the client chose stays.

    Raises ValidationError for settings out of range.
    """
    changes: dict[str, Any] = _sampling(request, settings.sampling)
    if request.generation.max_tokens is None and settings.max_tokens is not None:
        limit = max(settings.max_tokens, request.generation.min_tokens)
        changes["generation"] = replace(request.generation, max_tokens=limit)
        changes["fit"] = True
    if request.messages is not None:
        changes["thinking"] = _thinking(request.thinking, settings.thinking)
        system = settings.system or options.default_system
        changes["messages"] = _messages(request.messages, system, normalize=options.normalize)
    if options.request_timeout_s and request.deadline is None:
        changes["deadline"] = options.request_timeout_s
    return replace(request, **changes)


def _sampling(request: TurnRequest, chosen: Mapping[str, float | int]) -> dict[str, Any]:
    given = request.sampling_given
    if given is None:
        given = frozenset(_SAMPLING_FIELDS)
    added: dict[str, Any] = {name: value for name, value in chosen.items() if name not in given}
    return {
        "sampling": replace(request.sampling, **added),
        "sampling_given": given | added.keys(),
    }


def _thinking(asked: Thinking, settings: Thinking) -> Thinking:
    """Return the axes that the client chose, else those that are set; off drops the others' settings."""
    enabled = settings.enabled if asked.enabled is None else asked.enabled
    if enabled is False:
        return Thinking(False, asked.effort, asked.cap)
    effort = settings.effort if asked.effort is None else asked.effort
    cap = settings.cap if asked.cap is None else asked.cap
    return Thinking(enabled, effort, cap)


def _messages(
    messages: tuple[Mapping[str, Any], ...], system: str, *, normalize: bool
) -> tuple[Mapping[str, Any], ...]:
    made = tuple(_tidy(message) for message in messages) if normalize else messages
    if system and not any(message.get("role") in ("system", "developer") for message in messages):
        return ({"role": "system", "content": system}, *made)
    return made


def _tidy(message: Mapping[str, Any]) -> Mapping[str, Any]:
    # what a model or a tool said stays as it is: it must come back as the same tokens, or be exact
    if message.get("role") not in ("system", "developer", "user"):
        return message
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": normalize_prompt(content)}
    if isinstance(content, list | tuple):
        return {**message, "content": [_tidy_part(part) for part in content]}
    return message


def _tidy_part(part: Any) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": normalize_prompt(part["text"])}
    return part
