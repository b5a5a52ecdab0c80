"""Reading a request's JSON objects field by field, so that each field is taken, or refused by its name.

Null means absent, everywhere. This file knows no API.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hipfire.base.errors import UnsupportedError
from hipfire.server.errors import FieldError

# longer names are nobody's slip of the finger, and comparing them takes long
_MAX_NAME = 80


class Fields:
    """One JSON object of a request; `path` is where it lies in the body, "" for the body itself.

    Read every field that the API has, then call `finish`. Methods raise FieldError, which names the field.
    """

    def __init__(self, values: object, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise FieldError(path, f"{path or 'the body'} must be an object, not {kind_of_value(values)}")
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def where(self, name: str) -> str:
        """Return the path of a field from the body."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        """Return the field's value, None if it is absent or null."""
        self._known.add(name)
        return self._values.get(name)

    def fault(self, name: str, allowed: str, *, hint: str = "") -> FieldError:
        """Return the error that the field must be what `allowed` says."""
        value = self._values.get(name)
        shown = "is missing" if value is None else f"is {reprlib.repr(value)}"
        return FieldError(self.where(name), f"{self.where(name)} {shown} but must be {allowed}", hint=hint)

    def need(self, name: str) -> Any:
        """Return the field's value; it must be there."""
        if (value := self.get(name)) is None:
            raise FieldError(self.where(name), f"{self.where(name)} is missing")
        return value

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.fault(name, "a string")
        return value

    def need_text(self, name: str) -> str:
        """Return a string, which must be there and not be empty."""
        if not (value := self.text(name)):
            raise self.fault(name, "a string of at least one character")
        return value

    def flag(self, name: str) -> bool | None:
        """Return a boolean."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.fault(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fault(name, f"an integer from {low} to {high}")
        return value

    def choice(self, name: str, options: Sequence[str]) -> str | None:
        """Return one of these strings."""
        value = self.text(name)
        if value is not None and value not in options:
            raise self.fault(name, f"one of {', '.join(options)}")
        return value

    def items(self, name: str) -> list[Any] | None:
        """Return a list."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.fault(name, "a list")
        return value

    def texts(self, name: str, *, most: int, longest: int) -> tuple[str, ...]:
        """Return a list of at most `most` strings of 1 to `longest` characters each; () if absent."""
        values = self.items(name) or []
        if len(values) > most or not all(
            isinstance(each, str) and 0 < len(each) <= longest for each in values
        ):
            raise self.fault(name, f"a list of at most {most} strings of 1 to {longest} characters")
        return tuple(values)

    def part(self, name: str) -> Fields | None:
        """Return an object."""
        value = self.get(name)
        return None if value is None else Fields(value, self.where(name))

    def refuse(self, name: str, *, neutral: Collection[object] = (), hint: str = "") -> None:
        """Refuse the field unless it is absent, null, or one of the values that change nothing."""
        value = self.get(name)
        if value is None or any(value == each and type(value) is type(each) for each in neutral):
            return
        raise UnsupportedError(f"{self.where(name)} is not supported", hint=hint or "leave it out")

    def finish(self) -> None:
        """Refuse fields that nothing has read: they would change nothing, and nobody would know."""
        for name, value in self._values.items():
            if name in self._known or value is None:
                continue
            near = difflib.get_close_matches(name, self._known, 1) if len(name) <= _MAX_NAME else []
            hint = f"did you mean {near[0]}?" if near else ""
            where = self.where(name[:_MAX_NAME])
            raise FieldError(where, f"there is no field {where!r}", hint=hint)


def kind_of_value(value: object) -> str:
    """Return what a JSON value is, for people."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")
