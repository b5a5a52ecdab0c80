"""What a dialect's reader makes of one tool-call block, and how JSON inside it is read.

This file knows no dialect and no schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

# levels of objects and lists in a call's arguments
MAX_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as the model wrote it.

    With `texts` every argument is the text that stood in the markup, still without a type.
    """

    name: str
    arguments: Mapping[str, Any]
    texts: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """The calls of one block, the place behind it, and a line for each repair that reading it took."""

    calls: tuple[RawCall, ...]
    end: int
    repairs: tuple[str, ...] = ()


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value at `start` and the place behind it; line breaks in strings are allowed.

    Half a surrogate pair becomes U+FFFD. Raises ValueError for anything else: NaN, numbers too large for a
    float and nesting without end too, as no JSON can carry them on.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return _passable(value, 0), end


def json_value(text: str) -> Any:
    """Return the value of a text that is JSON from end to end; raises ValueError."""
    text = text.strip()
    value, end = read_json(text)
    if end != len(text):
        raise ValueError(f"text behind the JSON value, at character {end}")
    return value


def skip_space(text: str, place: int) -> int:
    """Return the first place from `place` on that is not white space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large")
    return number


def _passable(value: Any, depth: int) -> Any:
    """Return the value with whole characters only; raises ValueError if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_passable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_passable(key, depth): _passable(item, depth + 1) for key, item in value.items()}
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_constant, parse_float=_float, strict=False)
