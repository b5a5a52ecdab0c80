"""Errors of the server, and which HTTP status and OpenAI error body every error has.

This file maps kinds of error to statuses. It writes no response; other APIs' adapters use `status_of` and
give the error their own shape.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hipfire.base.errors import HipfireError

# how long a client should wait before it tries again, in seconds
RETRY_AFTER = 1

_STATUS = {
    "validation": 400,
    "malformed": 400,
    "context_length": 400,
    "unsupported": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "timeout": 408,
    "too_large": 413,
    "cancel": 499,
    "artifact": 500,
    "internal": 500,
    "memory": 503,
    "transient": 503,
    "transport": 503,
}
# a path with at least one folder; the last part is kept
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/:;,'\"]+/)+([^\s/:;,'\"]*)")
_CODES = {"context_length": "context_length_exceeded", "unauthorized": "invalid_api_key"}


class FieldError(HipfireError):
    """A field of a request has a value that is not allowed; `param` is its path."""

    kind = "validation"

    def __init__(self, param: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class MalformedError(HipfireError):
    """A request's body is not the JSON object that it should be."""

    kind = "malformed"


class NotFoundError(HipfireError):
    """There is no such model or route; `code` tells clients which."""

    kind = "not_found"

    def __init__(self, message: str, *, hint: str = "", code: str = "not_found", param: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.param = param


class MethodError(HipfireError):
    """The route exists, but not for this method."""

    kind = "method"


class OverloadedError(HipfireError):
    """The server cannot take the request now; the same request may work later."""

    kind = "transient"


class TooLargeError(HipfireError):
    """A request's body is larger than the server reads."""

    kind = "too_large"


class SlowClientError(HipfireError):
    """A client took too long to send its request."""

    kind = "timeout"


class UnauthorizedError(HipfireError):
    """The bearer token is missing or wrong."""

    kind = "unauthorized"


class ForbiddenError(HipfireError):
    """The request comes by a name that is not this server's."""

    kind = "forbidden"


class ReportedError(HipfireError):
    """An error that the engine reported; its kind is known at run time only."""

    def __init__(self, kind: str, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.reported = kind
        self.retryable = retryable


def kind_of(error: Exception) -> str:
    """Return the kind by which clients tell errors apart; "internal" for what is no HipfireError."""
    if isinstance(error, ReportedError):
        return error.reported
    return error.kind if isinstance(error, HipfireError) else "internal"


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    return _STATUS.get(kind_of(error), 500)


def message_of(error: Exception) -> str:
    """Return the one line that a client is shown.

    It says nothing about the inside of unexpected errors, nor where on this machine a file lies.
    """
    if not isinstance(error, HipfireError):
        return "internal error; see the server's log"
    # what these quote is the client's own, and must not tell whether such a folder exists
    if kind_of(error) in ("validation", "malformed", "not_found", "forbidden", "method"):
        return error.line()
    return _PATH.sub(lambda found: found[1] if Path(found[0]).parent.is_dir() else found[0], error.line())


def headers_of(error: Exception) -> dict[str, str]:
    """Return the headers that go with an error's response."""
    status = status_of(error)
    if status == 503:
        return {"Retry-After": str(RETRY_AFTER)}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    # the rest of a refused body is not read, so the connection cannot be used again
    return {"Connection": "close"} if status in (408, 413) else {}


def openai_body(error: Exception) -> dict[str, Any]:
    """Return the body that OpenAI's clients expect of an error."""
    kind = kind_of(error)
    status = status_of(error)
    return {
        "error": {
            "message": message_of(error),
            "type": "invalid_request_error" if 400 <= status < 500 else "server_error",
            "param": getattr(error, "param", None) or None,
            "code": getattr(error, "code", None) or _CODES.get(kind, kind),
        }
    }
