"""How much text a value would become, found without making it.

A list that holds one child a thousand times is small in memory and large when printed, so shared children
count each time that they occur but are walked once. This file knows no limits of its own but a depth.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from itertools import chain
from typing import Any, Final, NamedTuple

from jinja2.utils import Namespace

MAX_DEPTH: Final = 200
_ITEM: Final = 16
_BITS_PER_DIGIT: Final = 3


class Extent(NamedTuple):
    """About how many characters `str` or JSON of a value has, its items at all levels, and its levels."""

    characters: int
    items: int
    depth: int


def extent(value: Any, limit: int) -> Extent:
    """Return the extent of `value`; the walk stops once it knows of more than `limit` characters.

    A `depth` above `MAX_DEPTH` means that the value is deeper than that, or contains itself.
    """
    return _extent(value, limit, {}, 0)


def _extent(value: Any, limit: int, seen: dict[int, Extent], level: int) -> Extent:
    children = _children(value)
    if children is None:
        return Extent(_ITEM + _own(value), 1, 0)
    known = seen.get(id(value))
    if known is not None:
        return known
    characters, items, depth = _ITEM, 0, 0
    for child in children if level <= MAX_DEPTH else ():
        if isinstance(child, str):
            characters += _ITEM + len(child)
            items += 1
        else:
            inner = _extent(child, limit, seen, level + 1)
            characters += inner.characters
            items += inner.items
            depth = max(depth, inner.depth)
        if characters > limit or depth > MAX_DEPTH - level:
            break
    made = Extent(characters, items + 1, depth + 1)
    seen[id(value)] = made
    return made


def _own(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return value.bit_length() // _BITS_PER_DIGIT if isinstance(value, int) else 0


def _children(value: Any) -> Iterable[Any] | None:
    """Return what is printed with a container, or None; no pairs, since those would be new objects."""
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView):
        return value
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    return chain.from_iterable(value) if isinstance(value, ItemsView) else None
