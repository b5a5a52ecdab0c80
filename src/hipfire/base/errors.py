"""Every error that a user can cause or must read: one class per kind, one line of text, one hint.

This file knows nothing about exit codes or HTTP statuses; the command line and the server map kinds to those.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hipfire.base.printable import one_line


class HipfireError(Exception):
    """Base of all hipfire errors.

    `message` says what is wrong, `hint` what to do about it. Both are single lines.
    """

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def line(self) -> str:
        """Return message and hint as one printable line.

        Control characters, as names from hostile files may hold, are shown escaped.
        """
        return one_line(f"{self.message}; {self.hint}" if self.hint else self.message)

    def __str__(self) -> str:
        return self.line()


class ValidationError(HipfireError):
    """An argument, option or request field has a value that is not allowed."""

    kind = "validation"


class ContextLengthError(HipfireError):
    """A prompt and its reply do not fit in the context; carries both numbers of tokens."""

    kind = "context_length"

    def __init__(self, requested: int, limit: int, *, hint: str = "") -> None:
        super().__init__(f"{requested} tokens requested but the context holds {limit}", hint=hint)
        self.requested = requested
        self.limit = limit


class UnsupportedError(HipfireError):
    """The input is well formed but asks for something that hipfire does not do."""

    kind = "unsupported"


class ArtifactError(HipfireError):
    """A model file is damaged, truncated or hostile; names the file, the field and the byte offset."""

    kind = "artifact"

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        field: str | None = None,
        offset: int | None = None,
        hint: str = "",
    ) -> None:
        place = [str(part) for part in (path, field) if part is not None]
        if offset is not None:
            place.append(f"at byte {offset}")
        super().__init__(": ".join([*place, message]), hint=hint)
        self.path = path
        self.field = field
        self.offset = offset


class MemoryLimitError(HipfireError):
    """A load or an allocation needs more memory than there is; carries both numbers of bytes."""

    kind = "memory"

    def __init__(self, required: int, available: int, *, what: str, hint: str = "") -> None:
        super().__init__(
            f"{what} needs {required / 2**20:.0f} MiB but {available / 2**20:.0f} MiB are available",
            hint=hint,
        )
        self.required = required
        self.available = available


class TransportError(HipfireError):
    """A download or a connection failed."""

    kind = "transport"


class InternalError(HipfireError):
    """A fault of hipfire itself."""
