"""The blocks of a documentation page that runs rewrite. This file does not know what stands in them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hipfire.base.errors import ValidationError

CPU_PEERS = "cpu_peers"
SERVE_PEERS = "serve_peers"


def markers(name: str) -> tuple[str, str]:
    """Return the lines before and behind a program's block."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


BEGIN, END = markers(CPU_PEERS)


def check_page(page: Path, name: str = CPU_PEERS) -> None:
    """Raise ValidationError unless the page has the two markers once each, in their order."""
    _split(page, name)


def replace_block(page: Path, block: str, name: str = CPU_PEERS) -> None:
    """Put `block` between a program's markers in place of what is there; all else stays as it is.

    Raises ValidationError if the markers are not there once each. The page is never half written.
    """
    begin, end = markers(name)
    before, after = _split(page, name)
    text = f"{before}{begin}\n\n{block.strip()}\n\n{end}{after}"
    handle, made = tempfile.mkstemp(dir=page.parent, prefix=f".{page.name}-")
    beside = Path(made)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        beside.chmod(page.stat().st_mode)
        beside.replace(page)
    finally:
        beside.unlink(missing_ok=True)


def _split(page: Path, name: str) -> tuple[str, str]:
    """Return the text before the first marker and behind the second."""
    begin, end = markers(name)
    try:
        text = page.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValidationError(f"{page} cannot be read: {error.strerror}") from error
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or end in before:
        raise ValidationError(
            f"{page} must hold the lines {begin!r} and {end!r} once each, in this order",
            hint="put them where the tables belong",
        )
    return before, after
