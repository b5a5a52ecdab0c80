"""Anthropic's conversation in the one form that the engine takes: OpenAI's messages.

Blocks become text, reasoning, tool calls and tool messages, in their order. Turns of one role that follow
one another are one turn, as in Anthropic's API: many chat templates want the roles to alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hipfire.base.errors import UnsupportedError
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields

Message = dict[str, Any]


def system_message(value: object) -> list[Message]:
    """Return the system prompt as messages: none for nothing, else one."""
    if value is None or value in ("", []):
        return []
    return [{"role": "system", "content": _text_only(value, "system")}]


def conversation(values: Sequence[object]) -> list[Message]:
    """Return the messages in OpenAI's form.

    Raises FieldError, naming the block, for what is malformed, and for a tool result without its call;
    UnsupportedError for pictures, documents and tools that the server would have to run.
    """
    made: list[Message] = []
    names: dict[str, str] = {}
    for index, value in enumerate(values):
        message = Fields(value, f"messages[{index}]")
        role = message.choice("role", ("user", "assistant", "system"))
        if role is None:
            raise message.fault("role", "user, assistant or system")
        content, where = message.need("content"), message.where("content")
        message.finish()
        if role == "system":
            made.append({"role": "system", "content": _text_only(content, where)})
        elif role == "user":
            _append(made, _user(_blocks(content, where), names))
        else:
            _append(made, [_assistant(_blocks(content, where), names)])
    if made and made[-1]["role"] == "assistant":
        raise UnsupportedError(
            "the last message is the assistant's, and a reply that is begun cannot be continued",
            hint="end messages with a user message",
        )
    return made


def _blocks(content: object, where: str) -> list[Fields]:
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise FieldError(where, f"{where} must be a string or a list of blocks")
    return [Fields(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _text_only(content: object, where: str) -> str:
    texts = []
    for block in _blocks(content, where):
        if block.choice("type", ("text",)) is None:
            raise block.fault("type", "text")
        texts.append(_text(block))
    return "\n".join(texts)


def _text(block: Fields) -> str:
    text = block.text("text")
    if text is None:
        raise block.fault("text", "a string")
    cache_mark(block)
    block.refuse("citations", neutral=([],))
    block.finish()
    return text


def cache_mark(fields: Fields) -> None:
    """Check a cache mark: prefixes are cached without being asked for, so it changes nothing."""
    if (mark := fields.part("cache_control")) is not None:
        if mark.choice("type", ("ephemeral",)) is None:
            raise mark.fault("type", "ephemeral")
        mark.choice("ttl", ("5m", "1h"))
        mark.finish()


def _user(blocks: list[Fields], names: dict[str, str]) -> list[Message]:
    made: list[Message] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            _append(made, [{"role": "user", "content": _text(block)}])
        elif kind == "tool_result":
            made.append(_tool_result(block, names))
        else:
            raise block.fault("type", "text or tool_result in a user message")
    return made or [{"role": "user", "content": ""}]


def _tool_result(block: Fields, names: dict[str, str]) -> Message:
    call = block.need_text("tool_use_id")
    if call not in names:
        raise block.fault("tool_use_id", "the id of an earlier tool_use block")
    content = block.get("content")
    text = "" if content is None else _text_only(content, block.where("content"))
    if block.flag("is_error"):
        # templates have no place for the flag, and the model must know
        text = f"Error: {text}"
    cache_mark(block)
    block.refuse("toolset_name")
    block.finish()
    return {"role": "tool", "tool_call_id": call, "name": names[call], "content": text}


def _assistant(blocks: list[Fields], names: dict[str, str]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            texts.append(_text(block))
        elif kind == "thinking":
            thoughts.append(_thought(block))
        elif kind == "tool_use":
            calls.append(_tool_use(block, names))
        else:
            raise block.fault("type", "text, thinking or tool_use in an assistant message")
    made: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _thought(block: Fields) -> str:
    text = block.text("thinking")
    if text is None:
        raise block.fault("thinking", "a string")
    # the signature proves where the text came from, which matters to no local model
    block.text("signature")
    block.finish()
    return text


def _tool_use(block: Fields, names: dict[str, str]) -> dict[str, Any]:
    call, name, arguments = block.need_text("id"), block.need_text("name"), block.need("input")
    if not isinstance(arguments, dict):
        raise block.fault("input", "an object")
    if call in names:
        raise block.fault("id", "an id that no other tool_use block has")
    cache_mark(block)
    if (caller := block.part("caller")) is not None:
        caller.refuse("type", neutral=("direct",))
        caller.finish()
    block.refuse("toolset_name")
    block.finish()
    names[call] = name
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _kind(block: Fields) -> str:
    kind = block.need_text("type")
    if kind in ("text", "thinking", "tool_use", "tool_result"):
        return kind
    raise UnsupportedError(
        f"{block.where('type')} is {kind[:80]!r}, which is not supported",
        hint="use text, thinking, tool_use and tool_result blocks",
    )


def _append(made: list[Message], added: list[Message]) -> None:
    """Append messages; one of the same speaker as the last message continues that one."""
    for message in added:
        last = made[-1] if made else {}
        if last.get("role") != message["role"] or message["role"] == "tool":
            made.append(message)
            continue
        for name in ("content", "reasoning_content"):
            joined = [text for text in (last.get(name), message.get(name)) if text]
            if joined or name == "content":
                last[name] = "\n".join(joined)
        if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
            last["tool_calls"] = calls
