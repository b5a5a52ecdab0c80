"""A call's arguments brought to the types that the tool's JSON schema asks for.

Nothing is guessed from a value's look where the schema says what it is, and what cannot be converted stays
as it is. This file knows no dialects and no streams.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hipfire.text.tools.block import json_value

_INTEGER: Final = re.compile(r"-?(?:0|[1-9]\d{0,999})(?:\.0+)?")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d{0,999})(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_MAX_REFERENCES: Final = 16
# looks at parts of a schema for one call: nested choices and references multiply
_MAX_LOOKS: Final = 10_000
_SHOWN: Final = 40


def coerce_arguments(
    arguments: Mapping[str, Any], schema: Any, *, texts: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments in the schema's types, and a line for each value that had to be changed.

    Converted, at any depth: text to a boolean, integer, number, object, list or null, a scalar to text, a
    whole float to an integer, and any of them to a member of an enumeration. `texts`: every argument is the
    text that stood in the markup, so converting is reading and no repair; JSON is read as such where the
    schema leaves the type open, and a name that the schema's properties lack stays text. A schema that leads
    nowhere, by references in a circle or too many choices, leaves arguments as they are.
    """
    fitter = _Fitter(schema)
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        before = len(fitter.lines)
        try:
            made[name] = fitter.read(value, name) if texts else fitter.fit(value, fitter.of(name), name)
        except RecursionError:
            del fitter.lines[before:]
            made[name] = value
    return made, () if texts else tuple(fitter.lines)


class _Fitter:
    """Fits values to parts of one schema; `lines` tells what was changed."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._looks = 0
        self.lines: list[str] = []

    def of(self, name: str) -> Any:
        """Return the schema of an argument, {} if there is none."""
        found = self._property(self._root, name)
        return {} if found is None else found

    def read(self, text: str, name: str) -> Any:
        """Return the value of an argument given as text."""
        schema = self._property(self._root, name)
        if schema is None and self._resolved(self._root).get("properties"):
            return text
        kinds = self.kinds(schema)
        if "null" in kinds and text.strip() == "null":
            return None
        if kinds:
            return self.fit(text, schema, name)
        try:
            return self.fit(json_value(text), schema, name)
        except ValueError:
            return text

    def _property(self, schema: Any, name: str) -> Any:
        """Return the schema of a property of an object, None if there is none."""
        schema = self._resolved(schema)
        known = schema.get("properties")
        if isinstance(known, Mapping) and name in known:
            return known[name]
        for part in _parts(schema, "allOf"):
            found = self._property(part, name)
            if found is not None:
                return found
        more = schema.get("additionalProperties")
        return more if isinstance(more, Mapping) else None

    def fit(self, value: Any, schema: Any, where: str) -> Any:
        """Return the value, changed where the schema needs it and the value allows it."""
        schema = self._resolved(schema)
        options = [*_parts(schema, "anyOf"), *_parts(schema, "oneOf")]
        if options:
            return self._fit_any(value, options, where)
        kinds = self.kinds(schema)
        if kinds and _kind(value) not in kinds and not ("number" in kinds and _kind(value) == "integer"):
            value = self._changed(value, _converted(value, kinds), where)
        members = _members(schema)
        if members and not any(_same(value, member) for member in members):
            alike = [member for member in members if _text(member) == _text(value)]
            value = self._changed(value, alike[0] if alike else value, where)
        for part in _parts(schema, "allOf"):
            value = self.fit(value, part, where)
        return self._inside(value, schema, where)

    def kinds(self, schema: Any) -> set[str]:
        """Return the JSON types that a schema allows; none means that it allows all."""
        schema = self._resolved(schema)
        named = schema.get("type")
        if isinstance(named, str):
            return {named}
        if isinstance(named, list):
            return {kind for kind in named if isinstance(kind, str)}
        options = [*_parts(schema, "anyOf"), *_parts(schema, "oneOf"), *_parts(schema, "allOf")]
        if options:
            return set().union(*map(self.kinds, options))
        return {_kind(member) for member in _members(schema)}

    def _fit_any(self, value: Any, options: Sequence[Any], where: str) -> Any:
        """Return the value as the first option has it that it matches, or else matches once it is changed."""
        before = len(self.lines)
        for change in (False, True):
            for option in options:
                made = self.fit(value, option, where)
                fits = self._matches(made if change else value, option)
                if fits:
                    return made
                del self.lines[before:]
        return value

    def _inside(self, value: Any, schema: Mapping[str, Any], where: str) -> Any:
        if isinstance(value, Mapping):
            return {
                name: self.fit(item, self._property(schema, name), f"{where}.{name}")
                for name, item in value.items()
            }
        if isinstance(value, list):
            first, rest = schema.get("prefixItems"), schema.get("items")
            heads = first if isinstance(first, list) else []
            return [
                self.fit(item, heads[place] if place < len(heads) else rest, f"{where}[{place}]")
                for place, item in enumerate(value)
            ]
        return value

    def _matches(self, value: Any, schema: Any) -> bool:
        """Say whether the value has the type, the members and the required properties of the schema."""
        schema = self._resolved(schema)
        options = [*_parts(schema, "anyOf"), *_parts(schema, "oneOf")]
        if options:
            return any(self._matches(value, option) for option in options)
        kinds, kind, members = self.kinds(schema), _kind(value), _members(schema)
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            return False
        if members and not any(_same(value, member) for member in members):
            return False
        if isinstance(value, list):
            return all(self._matches(item, schema.get("items")) for item in value)
        if not isinstance(value, Mapping):
            return True
        required = schema.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        if not all(name in value for name in names):
            return False
        return all(self._matches(item, self._property(schema, name)) for name, item in value.items())

    def _changed(self, before: Any, after: Any, where: str) -> Any:
        if not _same(before, after):
            line = f"{where}: {_kind(before)} {_text(before)[:_SHOWN]!r} made {_kind(after)}"
            self.lines.append(line)
        return after

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return the schema that a local reference leads to; {} for what is no schema."""
        self._looks += 1
        if self._looks > _MAX_LOOKS:
            raise RecursionError("too many choices and references")
        for _ in range(_MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                return schema if isinstance(schema, Mapping) else {}
            schema = self._root if reference.startswith("#") else None
            for step in reference.split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                schema = schema.get(step) if isinstance(schema, Mapping) else None
        return {}


def _converted(value: Any, kinds: set[str]) -> Any:
    """Return the value as one of the kinds, or itself."""
    if isinstance(value, str):
        return _from_text(value, kinds)
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value)
    if "string" in kinds and isinstance(value, bool | int | float):
        return _text(value)
    return value


def _from_text(text: str, kinds: set[str]) -> Any:
    plain = text.strip()
    lowered = plain.lower()
    if "null" in kinds and lowered in ("null", "none"):
        return None
    if "boolean" in kinds and lowered in ("true", "false"):
        return lowered == "true"
    if {"integer", "number"} & kinds and _INTEGER.fullmatch(plain):
        return int(plain.partition(".")[0])
    if "number" in kinds and _NUMBER.fullmatch(plain) and math.isfinite(float(plain)):
        return float(plain)
    if {"object", "array"} & kinds and plain[:1] in ("{", "["):
        try:
            value = json_value(plain)
        except ValueError:
            return text
        return value if _kind(value) in kinds else text
    return text


def _parts(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []


def _members(schema: Mapping[str, Any]) -> list[Any]:
    members = schema.get("enum")
    if isinstance(members, list):
        return members
    return [schema["const"]] if "const" in schema else []


def _kind(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _same(one: Any, other: Any) -> bool:
    """Say whether two values are equal as JSON, where true is not 1."""
    return type(one) is type(other) and bool(one == other)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
