"""Chat messages checked and brought into the one form that templates are given.

Input is what clients send (the OpenAI message shape); output is new dictionaries, one for each message: the
caller's are never changed. This file knows nothing about templates or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from hipfire.base.errors import ValidationError

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_DEPTH: Final = 100


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as templates expect them, as many as came in.

    Content is always a string: None becomes "", a list of text parts is joined by newlines. An assistant
    message may lack content. Arguments of tool calls are mappings: a JSON text is parsed, "", "null" and None
    are {}. Raises ValidationError, naming the message, for an unknown role, a part that is no text, arguments
    that are no JSON object, or values that JSON does not have.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValidationError(
            "messages must be a non-empty list", hint='pass at least [{"role": "user", "content": "..."}]'
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def normalize_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    """Return a deep copy of tool schemas, or None for None or an empty list."""
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise ValidationError("tools must be a list of function schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValidationError(f"tools[{index}] is {_kind(tool)}, not an object")
    return [copy_json(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def copy_json(value: Any, where: str, depth: int = 0) -> Any:
    """Return a deep copy of a JSON value; raise ValidationError, naming `where`, for what is not JSON."""
    if depth > _MAX_DEPTH:
        raise ValidationError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValidationError(f"{where} has the key {key!r}, which is not a string")
        return {key: copy_json(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_json(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise ValidationError(f"{where} is {_kind(value)}, which JSON cannot hold")


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValidationError(f"{where} is {_kind(message)}, not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ValidationError(f"{where} has the role {role!r}", hint=f"use one of {', '.join(ROLES)}")
    if "content" not in message and role != "assistant":
        raise ValidationError(f"{where} has no content", hint='give it "content", a string or list of parts')
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    made = {"role": role, "content": _content(message.get("content"), where), **copy_json(rest, where)}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise ValidationError(f"{where}.tool_calls is {_kind(calls)}, not a list")
        made["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return made


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValidationError(f"{where}.content is {_kind(content)}, not a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            shown = repr(kind) if isinstance(part, Mapping) else _kind(part)
            raise ValidationError(
                f"{where}.content[{index}] is a part of type {shown}", hint='use parts of type "text"'
            )
        if not isinstance(part.get("text"), str):
            raise ValidationError(f"{where}.content[{index}] has no text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValidationError(f"{where} has no function with a name")
    made: dict[str, Any] = copy_json({key: value for key, value in call.items() if key != "function"}, where)
    named = f"{where} ({function['name']})"
    rest = copy_json({key: value for key, value in function.items() if key != "arguments"}, named)
    made["function"] = {**rest, "arguments": _arguments(function.get("arguments"), named)}
    made.setdefault("type", "function")
    return made


def _arguments(arguments: Any, named: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        arguments = _parsed(arguments, named) if arguments.strip() else None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValidationError(f"the arguments of {named} are {_kind(arguments)}, not a JSON object")
    copied: dict[str, Any] = copy_json(arguments, f"the arguments of {named}")
    return copied


def _parsed(text: str, named: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValidationError(
            f"the arguments of {named} are not valid JSON: {error}", hint="send a JSON object as a string"
        ) from error


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
