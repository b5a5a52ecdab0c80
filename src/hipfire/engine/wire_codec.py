"""Dataclasses of plain data to JSON values and back, checked against their type hints.

A field that a class gains is carried without a change here. This file knows no message by name.
"""

from __future__ import annotations

import functools
import reprlib
import types
import typing
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from hipfire.base.errors import ValidationError


@dataclass(frozen=True)
class Shape:
    """How an instance of `cls` lies in a JSON object.

    `names` gives the key of a field where it is not the field's own name. The fields of a dataclass in
    `groups` lie beside the others instead of in an object of their own. `constants` are fields that the
    message's type tells, so they are not written.
    """

    cls: type
    names: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Shape] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, value: Any) -> dict[str, Any]:
        """Return the JSON object of an instance."""
        record: dict[str, Any] = {}
        for item in self._fields():
            content = getattr(value, item.name)
            if item.name in self.groups:
                record.update(self.groups[item.name].encode(content))
            else:
                record[self.names.get(item.name, item.name)] = to_plain(content)
        return record

    def decode(self, record: Mapping[str, Any]) -> Any:
        """Return the instance that a JSON object describes; keys of others are left alone.

        Raises ValidationError, which names the key, for a value that is missing or not allowed.
        """
        hints, arguments = _hints(self.cls), dict(self.constants)
        for item in self._fields():
            if item.name in self.groups:
                arguments[item.name] = self.groups[item.name].decode(record)
                continue
            name = self.names.get(item.name, item.name)
            if name in record:
                arguments[item.name] = from_plain(hints[item.name], record[name], name)
            else:
                _require_default(item, name)
        return self.cls(**arguments)

    def keys(self) -> frozenset[str]:
        """Return the keys that such an object may have."""
        found: set[str] = set()
        for item in self._fields():
            group = self.groups.get(item.name)
            found |= group.keys() if group else {self.names.get(item.name, item.name)}
        return frozenset(found)

    def _fields(self) -> list[Field[Any]]:
        return [item for item in fields(self.cls) if item.name not in self.constants]


def to_plain(value: Any) -> Any:
    """Return `value` with dataclasses as dicts, and tuples and sets as lists; mappings stay as they are."""
    if is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted(value)
    return value


def from_plain(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as what a type hint says; `where` is its place, for messages.

    Raises ValidationError for a value of another type.
    """
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        return None if value is None else from_plain(inner, value, where)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise _wrong(where, value, f"one of {', '.join(arguments)}")
        return value
    if origin in (tuple, frozenset):
        return _sequence(origin, arguments, value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments, value, where)
    if is_dataclass(hint):
        return _instance(typing.cast(type, hint), value, where)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 2**53:
            raise _wrong(where, value, "a number")
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        nouns = {str: "text", bool: "true or false", int: "an integer", float: "a number"}
        raise _wrong(where, value, nouns[hint])
    return value


def _sequence(origin: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    if origin is frozenset or arguments[1:] == (Ellipsis,):
        hints = arguments[:1] * len(value)
    elif len(value) == len(arguments):
        hints = arguments
    else:
        raise _wrong(where, value, f"a list of {len(arguments)} values")
    pairs = enumerate(zip(hints, value, strict=True))
    return origin(from_plain(hint, item, f"{where}[{place}]") for place, (hint, item) in pairs)


def _mapping(arguments: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    key_hint, hint = arguments
    return {
        _key(key_hint, key, where): from_plain(hint, item, f"{where}.{key}") for key, item in value.items()
    }


def _key(hint: Any, key: str, where: str) -> Any:
    """Return a key of a JSON object, which is always text, as what the hint says: text or an integer."""
    if hint is not int:
        return key
    # no other spelling of a number may stand for the same key
    if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20 and str(int(key)) == key):
        raise _wrong(where, key, "an object whose keys are integers")
    return int(key)


def _instance(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    hints, arguments = _hints(cls), {}
    known = {item.name: item for item in fields(cls)}
    for name, item in value.items():
        if name not in known:
            raise ValidationError(f"{where}.{reprlib.repr(name)} is unknown", hint="leave it out")
        arguments[name] = from_plain(hints[name], item, f"{where}.{name}")
    for name, declared in known.items():
        if name not in arguments:
            _require_default(declared, f"{where}.{name}")
    return cls(**arguments)


def _require_default(item: Field[Any], where: str) -> None:
    if item.default is MISSING and item.default_factory is MISSING:
        raise ValidationError(f"{where} is missing")


def _wrong(where: str, value: object, allowed: str) -> ValidationError:
    return ValidationError(f"{where} is {reprlib.repr(value)} but must be {allowed}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)
