"""Calls out of JSON that a model got nearly right: broken syntax, other key names, heads in the style of XML.

Nothing is guessed: what is cut off in the middle of a string or a list of arguments is no call. This file
knows no streams and no schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hipfire.text.tools.block import RawCall, json_value, read_json, skip_space

_ARGUMENT_KEYS: Final = ("arguments", "parameters", "args")
_CLOSERS: Final = {"{": "}", "[": "]"}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_TOKEN: Final = re.compile(
    r"""(?P<double>"(?:[^"\\]|\\.)*")|(?P<single>'(?:[^'\\]|\\.)*')|(?P<mark>[{}\[\],:])"""
    r"""|(?P<word>[^\s{}\[\],:"']+)|\s+""",
    re.DOTALL,
)
# what may stand around a call's JSON without meaning anything
_LEFTOVER: Final = re.compile(r"</?\w+>|[\s`,}\]]")
_HEADS: Final = (
    re.compile(r"<function=[\"']?(?P<name>[^<>\"'\s{}]+)[\"']?\s*>"),
    re.compile(r"<\w+\s+name=[\"']?(?P<name>[^<>\"'\s{}]+)[\"']?\s*/?>"),
    re.compile(r"<\w+>\s*(?P<name>[^<>\"'\s{}]+)\s*</\w+>"),
)


def as_calls(value: Any) -> tuple[list[RawCall], list[str]] | None:
    """Return the calls that a JSON value stands for, and its repairs; None if it stands for none.

    A value is one call, or a non-empty list of calls.
    """
    if not isinstance(value, list):
        one = as_call(value)
        return None if one is None else ([one[0]], one[1])
    found = [as_call(item) for item in value]
    calls = [call for call in found if call is not None]
    if not calls or len(calls) != len(found):
        return None
    return [call for call, _ in calls], [line for _, lines in calls for line in lines]


def as_call(value: Any) -> tuple[RawCall, list[str]] | None:
    """Return the call that a JSON object stands for and its repairs, or None.

    `{"name", "arguments"}` is the rule, and a call without arguments may leave them out. Repaired: the object
    under a key "function", other names for the arguments, arguments as JSON text, arguments beside the name.
    """
    if not isinstance(value, Mapping):
        return None
    inner = value.get("function")
    if isinstance(inner, Mapping):
        found = as_call(inner)
        return None if found is None else (found[0], [*found[1], 'call taken out of "function"'])
    key = "name" if "name" in value else "function"
    name = value.get(key)
    if not isinstance(name, str) or not name.strip():
        return None
    repairs = [] if key == "name" else ['name taken from "function"']
    used = next((word for word in _ARGUMENT_KEYS if word in value), None)
    if used is None:
        wrapper = {"type"} if value.get("type") == "function" else set()
        rest = {word: item for word, item in value.items() if word != key and word not in wrapper}
        return RawCall(name.strip(), rest), repairs + (["arguments stood beside the name"] if rest else [])
    if used != "arguments":
        repairs.append(f'arguments taken from "{used}"')
    arguments = value[used]
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments) if arguments.strip() else {}
        except ValueError:
            return None
        repairs.append("arguments were JSON text")
    arguments = {} if arguments is None else arguments
    return (RawCall(name.strip(), arguments), repairs) if isinstance(arguments, Mapping) else None


def mend(segment: str, *, closed: bool) -> tuple[list[RawCall], list[str]] | None:
    """Return the calls in the text of a block that is no plain JSON, and its repairs; None if there are none.

    `closed`: the block's closing marker was there, so braces that are missing at its end were forgotten, not
    cut off.
    """
    name, at = _head(segment)
    begin = segment.find("{", at)
    if begin < 0:
        # a head alone calls a function without arguments, if the model said that the call is over
        alone = name and closed and not _LEFTOVER.sub("", segment[at:])
        return ([RawCall(name, {})], ["name taken from a tag"]) if alone else None
    between = segment[at:begin] if name else segment[:begin].strip().removeprefix("```json")
    if _LEFTOVER.sub("", between):
        return None
    found = _object(segment[begin:], closed=closed)
    if found is None or _LEFTOVER.sub("", segment[begin + found[1] :]):
        return None
    value, _, repairs = found
    named = _under(name, value) if name else as_calls(value)
    return None if named is None else (named[0], [*repairs, *named[1]])


def _under(name: str, value: dict[str, Any]) -> tuple[list[RawCall], list[str]] | None:
    """Return the call of a head with this name and the object behind it."""
    line = "name taken from a tag"
    wrapped = any(key in value for key in _ARGUMENT_KEYS)
    if "name" in value and (wrapped or value["name"] == name):
        return as_calls(value)
    if not wrapped:
        return [RawCall(name, value)], [line]
    found = as_call({"name": name, **value})
    return None if found is None else ([found[0]], [line, *found[1]])


def _head(segment: str) -> tuple[str, int]:
    """Return the function name of an XML-like head and the place behind it, or ("", 0)."""
    start = skip_space(segment, 0)
    for head in _HEADS:
        match = head.match(segment, start)
        if match is not None:
            return match["name"], match.end()
    return "", 0


def _object(text: str, *, closed: bool) -> tuple[dict[str, Any], int, list[str]] | None:
    """Return the JSON object at the start of `text`, mended if need be, the place behind it, the repairs."""
    repairs: list[str] = []
    try:
        value, end = read_json(text)
    except ValueError:
        mended = _mended(text, closed=closed)
        if mended is None:
            return None
        try:
            value = json_value(mended[0])
        except ValueError:
            return None
        end = mended[1]
        repairs.append("JSON syntax mended")
    return (value, end, repairs) if isinstance(value, dict) else None


def _mended(text: str, *, closed: bool) -> tuple[str, int] | None:
    """Return the first bracketed value of `text` as JSON and the place behind it; None if it has no end.

    Mended: quotes of the other kind, Python's words for true, false and null, commas in front of a closing
    bracket, and, in a block that is `closed`, missing closing brackets.
    """
    out: list[str] = []
    stack: list[str] = []
    at = 0
    while match := _TOKEN.match(text, at):
        at = match.end()
        token = match.group()
        if token.isspace():
            # words stay apart
            out[-1] += " "
            continue
        if match["single"]:
            token = _double_quoted(token)
        elif match["word"]:
            token = _WORDS.get(token, token)
        elif token in ("}", "]"):
            if not stack or stack.pop() != token:
                return None
            if out[-1].rstrip() == ",":
                out.pop()
        elif token in _CLOSERS:
            stack.append(_CLOSERS[token])
        out.append(token)
        if not stack:
            return "".join(out), at
    complete = at == len(text) and closed and out[-1].rstrip() not in (":", ",")
    return ("".join(out) + "".join(reversed(stack)), at) if complete else None


def _double_quoted(token: str) -> str:
    """Return a string in single quotes as JSON writes it."""
    inner = re.sub(r"\\(.)", lambda match: "'" if match[1] == "'" else match[0], token[1:-1], flags=re.DOTALL)
    escaped = re.sub(r'(\\.)|"', lambda match: match[1] or '\\"', inner, flags=re.DOTALL)
    return f'"{escaped}"'
