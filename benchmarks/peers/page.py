"""The block of a documentation page that a run rewrites. This file does not know what stands in it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hipfire.base.errors import ValidationError

BEGIN = "<!-- cpu_peers: begin -->"
END = "<!-- cpu_peers: end -->"


def check_page(page: Path) -> None:
    """Raise ValidationError unless the page has the two markers once each, in their order."""
    _split(page)


def replace_block(page: Path, block: str) -> None:
    """Put `block` between the markers of a page in place of what is there; all else stays as it is.

    Raises ValidationError if the markers are not there once each. The page is never half written.
    """
    before, after = _split(page)
    text = f"{before}{BEGIN}\n\n{block.strip()}\n\n{END}{after}"
    handle, name = tempfile.mkstemp(dir=page.parent, prefix=f".{page.name}-")
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        beside.chmod(page.stat().st_mode)
        beside.replace(page)
    finally:
        beside.unlink(missing_ok=True)


def _split(page: Path) -> tuple[str, str]:
    """Return the text before the first marker and behind the second."""
    try:
        text = page.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValidationError(f"{page} cannot be read: {error.strerror}") from error
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or END in before:
        raise ValidationError(
            f"{page} must hold the lines {BEGIN!r} and {END!r} once each, in this order",
            hint="put them where the tables belong",
        )
    return before, after
