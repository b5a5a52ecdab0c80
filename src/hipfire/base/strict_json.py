"""What JSON's standard forbids and Python's parser allows: hooks for `json.loads`, and a check of the result.

This file knows no limits of size or depth; whoever reads a file or a request has those.
"""

from __future__ import annotations

import math
from typing import Any


def no_constant(text: str) -> float:
    """Refuse NaN and infinities with ValueError: for `parse_constant`."""
    raise ValueError(f"{text} is not a JSON number")


def finite(text: str) -> float:
    """Return the number; ValueError if it is out of a float's range: for `parse_float`."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is out of range")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object; ValueError if a name stands in it twice: for `object_pairs_hook`."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate name {name[:80]!r}")
            seen.add(name)
    return value


def require_unicode(value: object) -> None:
    """Raise UnicodeEncodeError if a string below `value` cannot be written as UTF-8."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode()
            require_unicode(item)
    elif isinstance(value, list):
        for item in value:
            require_unicode(item)
