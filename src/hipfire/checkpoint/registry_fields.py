"""Strict reading of one JSON object of the registry: typed fields, and an error for every unknown one.

This file knows field types. It does not know which fields a card has (registry.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hipfire.base.config_keys import Value, find_key
from hipfire.base.errors import ArtifactError, HipfireError
from hipfire.base.safe_names import check_digest, check_file_name

T = TypeVar("T")
_MISSING: Any = object()
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!+_-]*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*")
_PREFIX = re.compile(r"[0-9a-f]{8,63}")


class Fields:
    """Takes fields out of a JSON object; `done` refuses what nobody took."""

    def __init__(self, raw: Any, source: str, place: str) -> None:
        self._source, self._place = source, place
        if not isinstance(raw, Mapping):
            raise ArtifactError("an object is needed here", path=source, field=place)
        self._left: dict[str, Any] = dict(raw)

    def fault(self, name: str, message: str) -> ArtifactError:
        """Return the error for one field."""
        return ArtifactError(message, path=self._source, field=f"{self._place}.{name}")

    def child(self, name: str, raw: Any) -> Fields:
        """Return a reader for an object inside this one."""
        return Fields(raw, self._source, f"{self._place}.{name}")

    def required(self, name: str, convert: Callable[[Any], T]) -> T:
        """Return the converted field; a missing one is an error."""
        value = self._left.pop(name, _MISSING)
        if value is _MISSING:
            raise self.fault(name, "missing")
        return self._converted(name, value, convert)

    def optional(self, name: str, convert: Callable[[Any], T]) -> T | None:
        """Return the converted field, or None where it is missing or null."""
        value = self._left.pop(name, None)
        return None if value is None else self._converted(name, value, convert)

    def integer(self, name: str, *, low: int) -> int:
        """Return a required integer of at least `low`."""
        value = self.required(name, lambda raw: raw)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fault(name, f"{value!r} is not an integer of at least {low}")
        return value

    def number(self, name: str, *, low: float) -> float:
        """Return a required number of at least `low`."""
        value = self.required(name, lambda raw: raw)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= low:
            raise self.fault(name, f"{value!r} is not a number of at least {low:g}")
        return float(value)

    def table(self, name: str, default: Mapping[str, Any] = _MISSING) -> Mapping[str, Any]:
        """Return an object field; without a default a missing one is an error."""
        value = self._left.pop(name, default)
        if not isinstance(value, Mapping):
            raise self.fault(name, "an object is needed here")
        return value

    def array(self, name: str) -> list[Any]:
        """Return a required, non-empty array field."""
        value = self._left.pop(name, None)
        if not isinstance(value, list) or not value:
            raise self.fault(name, "a non-empty array is needed here")
        return value

    def done(self) -> None:
        """Raise if a field is left that nobody asked for."""
        if self._left:
            raise self.fault(min(self._left), "unknown field")

    def _converted(self, name: str, value: Any, convert: Callable[[Any], T]) -> T:
        try:
            return convert(value)
        except (HipfireError, ValueError) as error:
            raise self.fault(name, str(error)) from error


def text(raw: Any) -> str:
    """Return a string."""
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a string")
    return raw


def file_name(raw: Any) -> str:
    """Return a string that is safe as a file name."""
    return check_file_name(text(raw))


def relative_path(raw: Any) -> str:
    """Return a relative path with `/` between its parts, each of them safe as a file name."""
    for part in text(raw).split("/"):
        check_file_name(part, what="part of a path")
    return str(raw)


def digest(raw: Any) -> str:
    """Return a SHA-256 in hexadecimal."""
    return check_digest(text(raw))


def digest_prefix(raw: Any) -> str:
    """Return the first 8 to 63 hexadecimal digits of a SHA-256."""
    return _matching(raw, _PREFIX, "the beginning of a sha256")


def identifier(raw: Any) -> str:
    """Return a lower-case identifier."""
    return _matching(raw, _IDENTIFIER, "a lower-case identifier")


def package_name(raw: Any) -> str:
    """Return the name of a Python package."""
    return _matching(raw, _PACKAGE, "a package name")


def package_version(raw: Any) -> str:
    """Return the version of a Python package."""
    return _matching(raw, _VERSION, "a package version")


def repo(raw: Any) -> str:
    """Return an OWNER/NAME repository."""
    return _matching(raw, _REPO, "OWNER/NAME")


def byte(raw: Any) -> int:
    """Return an integer in 0..255."""
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw <= 255:
        raise ValueError(f"{raw!r} is not an integer in 0..255")
    return raw


def kv_mode(raw: Any) -> str:
    """Return a value that `memory.kv_cache` takes."""
    return str(_setting("memory.kv_cache", raw)[1])


def settings(raw: Any, table: Fields) -> dict[str, Value]:
    """Return settings by dotted name; an unknown or ill-valued one is an error."""
    if not isinstance(raw, Mapping):
        raise table.fault("settings", "an object is needed here")
    try:
        return dict(_setting(name, value) for name, value in raw.items())
    except (HipfireError, ValueError) as error:
        raise table.fault("settings", str(error)) from error


def _setting(name: str, raw: Any) -> tuple[str, Value]:
    key = find_key(name)
    if key is None or key.scope != "model":
        raise ValueError(f"{name!r} is not a setting that a card may recommend")
    return key.name, key.check(raw, source="card")


def _matching(raw: Any, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(text(raw)):
        raise ValueError(f"{raw!r} is not {what}")
    return str(raw)
