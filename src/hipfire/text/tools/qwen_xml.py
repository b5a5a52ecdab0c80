"""Calls in Qwen's XML dialect: `<function=NAME><parameter=ARG>VALUE</parameter>...</function>` in a block.

Values are text; the tool's schema gives them their types later. This file reads one block of a finished text.
It knows no streams.
"""

from __future__ import annotations

import re
from typing import Final

from hipfire.text.tools.block import Block, RawCall, skip_space

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
_FUNCTION: Final = re.compile(r"<function=[\"']?(?P<name>[^<>\"'\n]+?)[\"']?\s*>")
_PARAMETER: Final = re.compile(r"<parameter=[\"']?(?P<key>[^<>\"'\n]+?)[\"']?\s*>")
_FUNCTION_END: Final = "</function>"
_MAX_REPAIRS: Final = 8
_PARAMETER_END: Final = "</parameter>"
# what may stand behind a value; a closing tag in front of anything else belongs to the value
_NEXT: Final = ("<parameter=", _FUNCTION_END, CLOSE)
_NEXT_TAG: Final = re.compile(r"<parameter=|</function>|</tool_call>")
_NEXT_LINE: Final = re.compile(r"\n(?:<parameter=[^<>\n]+>|</function>\s*</tool_call>)")


def read(text: str, start: int) -> Block | None:
    """Return the call of the block that begins at `start`, or None if it is not in this dialect.

    `<function=` may stand alone, without the block around it. A tag that is missing at the end of a value or
    of the function is repaired if a later one shows that it was forgotten, a few times; what the text's end
    cuts off is no call.
    """
    repairs: list[str] = []
    wrapped = text.startswith(OPEN, start)
    head = _FUNCTION.match(text, skip_space(text, start + len(OPEN)) if wrapped else start)
    if head is None:
        return None
    arguments: dict[str, str] = {}
    place = skip_space(text, head.end())
    closer = 0
    while parameter := _PARAMETER.match(text, place):
        end, place, closer = _value_end(text, parameter.end(), closer)
        if end < 0 or len(repairs) > _MAX_REPAIRS:
            return None
        if not text.startswith(_PARAMETER_END, end):
            repairs.append(f"parameter {parameter['key']!r} had no closing tag")
        value = text[parameter.end() : end].removeprefix("\r").removeprefix("\n")
        arguments[parameter["key"]] = value.removesuffix("\n").removesuffix("\r")
        place = skip_space(text, place)
    ended = text.startswith(_FUNCTION_END, place)
    if ended:
        place += len(_FUNCTION_END)
    behind = skip_space(text, place)
    if wrapped and text.startswith(CLOSE, behind):
        place = behind + len(CLOSE)
        repairs += [] if ended else ["closing tag of the function missing"]
    elif ended:
        repairs.append("closing marker missing" if wrapped else "block markers missing")
    else:
        return None
    return Block((RawCall(head["name"].strip(), arguments, texts=True),), place, tuple(repairs))


def _value_end(text: str, start: int, closer: int) -> tuple[int, int, int]:
    """Return the end of the value at `start`, the place behind its closing tag, and the tag's place.

    `closer` is where the search for closing tags had come to; -1 says that there are no more. A value without
    an end gives an end of -1.
    """
    if 0 <= closer < start:
        closer = text.find(_PARAMETER_END, start)
    while closer >= 0:
        behind = closer + len(_PARAMETER_END)
        following = skip_space(text, behind)
        if following == len(text) or text.startswith(_NEXT, following):
            # such a line inside the value shows that the closing tag belongs to a later one
            forgotten = _NEXT_LINE.search(text, start, closer)
            if forgotten is None:
                return closer, behind, closer
            return forgotten.start() + 1, forgotten.start() + 1, closer
        closer = text.find(_PARAMETER_END, behind)
    tag = _NEXT_TAG.search(text, start)
    end = -1 if tag is None else tag.start()
    return end, end, closer
