"""Which strings may become part of a path: model names, file names, digests.

A name comes from a registry, a settings file or the command line and ends up joined to the models folder, so
it must not be able to leave that folder on any system. A user's own path on the command line is not a name
and is not checked here.
"""

from __future__ import annotations

import re

from hipfire.base.errors import ValidationError

MAX_NAME_BYTES = 240
_DEVICE = re.compile(
    r"(con|prn|aux|nul|clock\$|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?", re.IGNORECASE
)
_DRIVE = re.compile(r"[a-zA-Z]:")
_FORBIDDEN = frozenset('<>"|?*/\\')
_DIGEST = re.compile(r"[0-9a-f]{64}")


def name_fault(name: str) -> str | None:
    """Return why `name` cannot be used as one component of a path, or None if it can."""
    if not name or not name.strip():
        return "it is empty"
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "it holds a control character"
    if any("\ud800" <= char <= "\udfff" for char in name):
        return "it is not valid text"
    if bad := sorted(_FORBIDDEN & set(name)):
        return f"it holds {bad[0]!r}"
    if ".." in name:
        return "it holds '..'"
    if _DRIVE.match(name):
        return "it starts like a drive letter"
    if name != name.strip() or name[0] in ".-" or name.endswith("."):
        return "it starts or ends with a character that is not allowed there"
    if _DEVICE.fullmatch(name) or any(_DEVICE.fullmatch(part) for part in name.split(":")):
        return "it is the name of a device"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    return None


def check_name(name: str, *, what: str = "model name") -> str:
    """Return `name` if it is safe as one component of a path (a `:` is allowed in tags)."""
    if (fault := name_fault(name)) is not None:
        raise ValidationError(f"{what} {name[:80]!r} is refused: {fault}")
    return name


def check_file_name(name: str, *, what: str = "file name") -> str:
    """Return `name` if it is safe as a file name on every system (no `:`)."""
    check_name(name, what=what)
    if ":" in name:
        raise ValidationError(f"{what} {name[:80]!r} is refused: it holds ':'")
    return name


def check_digest(text: str, *, what: str = "sha256") -> str:
    """Return `text` if it is a lower-case hexadecimal SHA-256."""
    if not _DIGEST.fullmatch(text):
        raise ValidationError(f"{what} {text[:80]!r} is not 64 lower-case hexadecimal digits")
    return text
