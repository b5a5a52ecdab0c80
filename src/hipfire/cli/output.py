"""Text for people and JSON for programs, on stdout. This file does not know what it shows.

Tables, fields and JSON may hold text from files, so what is not printable is escaped there. `write` is raw.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from hipfire.base.errors import HipfireError
from hipfire.base.printable import printable


class OutputError(HipfireError):
    """Standard output takes no more; a reader that left is a BrokenPipeError instead."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or error}")


def write(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Write text to stdout, a line unless `end` says otherwise; raise OutputError if it takes no more."""
    try:
        sys.stdout.write(f"{text}{end}")
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error) from error


def write_json(value: Any) -> None:
    """Write a value to stdout as indented JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # outside of strings only line breaks are not printable
    write("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def write_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()
) -> None:
    """Write rows in aligned columns; columns with an index in `right` are flush right."""
    lines = [header, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(display_width(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (_pad(cell, widths[column], column in right) for column, cell in enumerate(line))
        write("  ".join(cells).rstrip())


def write_fields(fields: Mapping[str, object]) -> None:
    """Write `name: value` lines; a list value takes a line for each of its items."""
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            write(f"{printable(name)}:" if value else f"{printable(name)}: none")
            for item in value:
                write(f"  {printable(str(item))}")
        else:
            write(printable(f"{name}: {value}"))


def size_text(nbytes: float) -> str:
    """Return a size in the unit that suits it, such as `93.8 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def display_width(text: str) -> int:
    """Return the number of terminal cells of a text: wide characters take two, combining marks none."""
    cells = 0
    for char in text:
        if not unicodedata.combining(char):
            cells += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return cells


def _pad(cell: str, width: int, right: bool) -> str:
    space = " " * (width - display_width(cell))
    return space + cell if right else cell + space
