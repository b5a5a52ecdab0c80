"""Calls in Gemma's own dialect: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>`.

Also read: `<|tool_call|>{JSON}<|/tool_call|>`, which some conversions of the template ask for. This file
reads one block of a finished text. It knows no streams and no schemas.
"""

from __future__ import annotations

import re
from typing import Any, Final

from hipfire.text.tools.block import MAX_DEPTH, Block, RawCall, read_json, skip_space
from hipfire.text.tools.repair import as_calls

OPEN: Final = "<|tool_call>"
CLOSE: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
JSON_OPEN: Final = "<|tool_call|>"
JSON_CLOSE: Final = "<|/tool_call|>"
_NAME: Final = re.compile(r"\s*call:\s*(?P<name>[^\s{}<>]+)\s*")
_KEY: Final = re.compile(r"\s*(?P<key>[^\s:{}\[\],<>\"]+)\s*:")
_WORD: Final = re.compile(r"[^\s,{}\[\]<>]+")


def read(text: str, start: int) -> Block | None:
    """Return the calls of the block that begins at `start`, or None if it has none."""
    if text.startswith(JSON_OPEN, start):
        return _read_json_block(text, start + len(JSON_OPEN))
    name = _NAME.match(text, start + len(OPEN))
    if name is None:
        return None
    try:
        arguments, end = _value(text, name.end(), 0)
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    call = RawCall(name["name"], arguments)
    behind = skip_space(text, end)
    if text.startswith(CLOSE, behind):
        return Block((call,), behind + len(CLOSE))
    return Block((call,), end, ("closing marker missing",))


def _read_json_block(text: str, place: int) -> Block | None:
    try:
        value, end = read_json(text, skip_space(text, place))
    except ValueError:
        return None
    found = as_calls(value)
    if found is None:
        return None
    behind = skip_space(text, end)
    if text.startswith(JSON_CLOSE, behind):
        return Block(tuple(found[0]), behind + len(JSON_CLOSE), tuple(found[1]))
    return Block(tuple(found[0]), end, (*found[1], "closing marker missing"))


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """Return the value at `place` and the place behind it; raises ValueError."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    place = skip_space(text, place)
    if text.startswith(QUOTE, place):
        begin = place + len(QUOTE)
        end = text.index(QUOTE, begin)
        return text[begin:end], end + len(QUOTE)
    if text.startswith("{", place):
        return _object(text, place + 1, depth)
    if text.startswith("[", place):
        return _list(text, place + 1, depth)
    if text.startswith('"', place):
        return read_json(text, place)
    word = _WORD.match(text, place)
    if word is None:
        raise ValueError("no value")
    try:
        value, end = read_json(word.group())
    except ValueError:
        return word.group(), word.end()
    return (value if end == len(word.group()) else word.group()), word.end()


def _object(text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
    made: dict[str, Any] = {}
    place = skip_space(text, place)
    while not text.startswith("}", place):
        if text.startswith((QUOTE, '"'), skip_space(text, place)):
            key, end = _value(text, place, depth)
            colon = skip_space(text, end) + 1
            if text[colon - 1 : colon] != ":":
                raise ValueError("no colon behind a key")
        else:
            match = _KEY.match(text, place)
            if match is None:
                raise ValueError("no key")
            key, colon = match["key"], match.end()
        made[key], place = _value(text, colon, depth + 1)
        place = _separator(text, place, "}")
    return made, place + 1


def _list(text: str, place: int, depth: int) -> tuple[list[Any], int]:
    made: list[Any] = []
    place = skip_space(text, place)
    while not text.startswith("]", place):
        item, place = _value(text, place, depth + 1)
        made.append(item)
        place = _separator(text, place, "]")
    return made, place + 1


def _separator(text: str, place: int, closer: str) -> int:
    """Return the place of the next item, or of the closing bracket; raises ValueError."""
    place = skip_space(text, place)
    if text.startswith(closer, place):
        return place
    if not text.startswith(",", place):
        raise ValueError("neither a comma nor the end")
    return skip_space(text, place + 1)
