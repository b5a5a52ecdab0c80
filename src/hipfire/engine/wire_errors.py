"""Errors on the wire: what a failed message is answered with, and the same error again at the other end.

Clients tell errors apart by `class`, never by their text. This file does not know the other messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hipfire.base.errors import (
    ArtifactError,
    ContextLengthError,
    HipfireError,
    InternalError,
    MemoryLimitError,
    TransportError,
    UnsupportedError,
    ValidationError,
)
from hipfire.engine.scheduler import BusyError
from hipfire.engine.turn import Failed, TurnKey


class MalformedError(HipfireError):
    """A line is not what the protocol's lines are."""

    kind = "malformed"


_REPORTED: dict[str, type[HipfireError]] = {
    error.kind: error
    for error in (
        ArtifactError,
        BusyError,
        InternalError,
        MalformedError,
        TransportError,
        UnsupportedError,
        ValidationError,
    )
}


def failed(key: TurnKey, error: Exception) -> Failed:
    """Return the terminal event of a turn that an error ended."""
    known = as_hipfire(error)
    retryable = known.kind in ("transient", "transport")
    return Failed(key, known.kind, known.message, known.hint, retryable)


def error_line(error: Exception, *, request: int | None = None, **extra: Any) -> dict[str, Any]:
    """Return the reply to a message that could not be carried out; `extra` are further fields of it."""
    known = as_hipfire(error)
    record: dict[str, Any] = {
        "type": "error",
        "class": known.kind,
        "message": known.message,
        "hint": known.hint,
        "retryable": known.kind in ("transient", "transport"),
        **extra,
    }
    if isinstance(known, ContextLengthError):
        record |= {"requested": known.requested, "limit": known.limit}
    if isinstance(known, MemoryLimitError):
        record |= {"required": known.required, "available": known.available}
    return record if request is None else {**record, "request": request}


def error_of(record: Mapping[str, Any]) -> HipfireError:
    """Return the error that an `error` reply describes, of the class that the daemon's error had."""
    kind, message, hint = (str(record.get(name, "")) for name in ("class", "message", "hint"))
    if kind == ContextLengthError.kind and _integers(record, "requested", "limit"):
        return ContextLengthError(record["requested"], record["limit"], hint=hint)
    if kind == MemoryLimitError.kind and _integers(record, "required", "available"):
        what = message.rpartition(" needs ")[0]
        return MemoryLimitError(record["required"], record["available"], what=what, hint=hint)
    return _REPORTED.get(kind, InternalError)(message, hint=hint)


def as_hipfire(error: Exception) -> HipfireError:
    """Return an error that has a kind; what is no HipfireError is a fault of the engine."""
    if isinstance(error, HipfireError):
        return error
    return InternalError(f"{type(error).__name__}: {error}", hint="see the engine's log")


def _integers(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), int) for name in names)
