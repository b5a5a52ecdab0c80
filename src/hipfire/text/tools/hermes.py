"""Calls in the Hermes dialect: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

This file reads one block of a finished text. It knows no streams and no schemas.
"""

from __future__ import annotations

from typing import Final

from hipfire.text.tools.block import Block, RawCall, read_json, skip_space
from hipfire.text.tools.repair import as_calls, mend

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


def read(text: str, start: int) -> Block | None:
    """Return the calls of the block whose opener stands at `start`, or None if there are none.

    Several objects in one block are several calls. A block without its closing marker reaches as far as its
    JSON is complete.
    """
    repairs: list[str] = []
    body = skip_space(text, start + len(OPEN))
    while text.startswith(OPEN, body):
        body = skip_space(text, body + len(OPEN))
        repairs[:] = ["opener repeated"]
    plain = _plain(text, body)
    if plain is not None:
        return Block(plain.calls, plain.end, (*repairs, *plain.repairs))
    limit = text.find(OPEN, body)
    limit = len(text) if limit < 0 else limit
    end = text.find(CLOSE, body, limit)
    closed = end >= 0
    end = end if closed else limit
    mended = mend(text[body:end], closed=closed)
    if mended is None:
        return None
    calls, more = mended
    return Block(tuple(calls), end + (len(CLOSE) if closed else 0), (*repairs, *more))


def _plain(text: str, body: int) -> Block | None:
    """Return the block if its JSON is valid, so that a closing marker inside a string ends nothing."""
    calls: list[RawCall] = []
    repairs: list[str] = []
    place = body
    while text[place : place + 1] in ("{", "["):
        try:
            value, end = read_json(text, place)
        except ValueError:
            return None
        found = as_calls(value)
        if found is None:
            return None
        calls += found[0]
        repairs += found[1]
        place = skip_space(text, end)
    if not calls:
        return None
    behind = place
    while text[behind : behind + 1] in ("}", "]", ",", "`") or text[behind : behind + 1].isspace():
        behind += 1
    if text.startswith(CLOSE, behind):
        if behind > place:
            repairs.append("surplus characters behind the JSON left out")
        return Block(tuple(calls), behind + len(CLOSE), tuple(repairs))
    repairs.append("closing marker missing")
    return Block(tuple(calls), place, tuple(repairs))
