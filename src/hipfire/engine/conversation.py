"""What a request's conversation, tools and thinking mean for its template: plain functions of the request.

This file knows messages and settings. It renders nothing and knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.engine.turn import ToolChoice, TurnRequest
from hipfire.text.reply_format import ReplyFormat
from hipfire.text.think_splitter import strip_reasoning


def usable_tools(request: TurnRequest) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that may be called; a named choice leaves one. ValidationError if there is none."""
    choice = request.tool_choice
    if choice.mode in ("auto", "none"):
        return request.tools
    if not request.tools:
        raise ValidationError(f"tool_choice {choice.mode!r} needs tools", hint="give tools")
    if choice.mode == "required":
        return request.tools
    named = tuple(tool for tool in request.tools if tool_name(tool) == choice.name)
    if not named:
        raise ValidationError(
            f"tool_choice names the function {choice.name!r}, which is not among the tools",
            hint="name one of the tools, or add this one to them",
        )
    return named


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """Return the name of a function schema, with or without its "function" wrapper."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def history(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conversation with reasoning taken out of the assistant's answers, where templates look."""
    made: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str) or message.get("role") != "assistant":
            made.append(message)
            continue
        inline, answer = strip_reasoning(content)
        stated = message.get("reasoning") or message.get("reasoning_content")
        kept = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
        reasoning = stated or inline
        made.append({**kept, "content": answer, **({"reasoning_content": reasoning} if reasoning else {})})
    return made


def with_instruction(messages: list[Mapping[str, Any]], choice: ToolChoice) -> list[Mapping[str, Any]]:
    """Return the conversation with one sentence about a required call in its system message."""
    if choice.mode not in ("required", "named"):
        return messages
    named = f"the function {choice.name}" if choice.mode == "named" else "one of the given functions"
    sentence = f"Answer by calling {named}."
    first = messages[0] if messages else {}
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": sentence}, *messages]
    content = first.get("content")
    joined: Any = f"{content}\n\n{sentence}" if isinstance(content, str) and content else sentence
    if isinstance(content, list | tuple):
        joined = [*content, {"type": "text", "text": sentence}]
    return [{**first, "content": joined}, *messages[1:]]


def thinking_names(
    request: TurnRequest, source: str, fmt: ReplyFormat, closable: bool, warnings: list[str]
) -> tuple[dict[str, Any], int]:
    """Return the names that the template is given, and the cap; what has no effect becomes a warning."""
    extra = dict(request.template_arguments)
    wanted = request.thinking
    cap = wanted.cap or 0
    if wanted.enabled is not None and "enable_thinking" in source:
        extra["enable_thinking"] = wanted.enabled
    elif wanted.enabled and fmt.thinking == "none":
        warnings.append("thinking is dropped: this model does not think")
    if wanted.effort is not None and wanted.enabled is False:
        warnings.append("the reasoning effort is dropped: thinking is off")
    elif wanted.effort is not None and "reasoning_effort" in source:
        extra["reasoning_effort"] = wanted.effort
    elif wanted.effort is not None:
        warnings.append(
            f"the reasoning effort {wanted.effort!r} is dropped: the template has no such setting"
        )
    if cap and (wanted.enabled is False or fmt.thinking == "none" or not closable):
        reason = (
            "thinking is off" if wanted.enabled is False else "this model's thinking cannot be closed early"
        )
        warnings.append(f"the cap of {cap} thinking tokens is dropped: {reason}")
        cap = 0
    return extra, cap
