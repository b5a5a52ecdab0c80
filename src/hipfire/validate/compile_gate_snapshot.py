"""The registers that kernels took when somebody last looked, and how far they have drifted from there.

The figures belong to one version of Triton and one machine each. This file compiles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hipfire.base.errors import ValidationError
from hipfire.validate.harness_report import write_report

# a kernel may take this many registers more, or this part of them, before somebody has to look
DRIFT: Final = 8
DRIFT_PART: Final = 0.15

Registers = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Drift:
    """How one kernel's registers on one machine compare: `was` is None for one that is new."""

    key: str
    target: str
    was: int | None
    now: int

    @property
    def fault(self) -> str | None:
        """Return what is wrong, in words, or None."""
        if self.was is None:
            return "is not in the snapshot of registers"
        if self.now - self.was > max(DRIFT, round(DRIFT_PART * self.was)):
            return f"takes {self.now} registers, and {self.was} in the snapshot"
        return None


class Snapshot:
    """A file of registers: by version of Triton, machine and key. A missing file is an empty snapshot.

    Raises `ValidationError` if the file is no such snapshot.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._all: dict[str, dict[str, dict[str, int]]] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValidationError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._all = {
                version: {
                    target: {key: int(count) for key, count in counts.items()}
                    for target, counts in of.items()
                }
                for version, of in json.loads(text).items()
            }
        except (ValueError, AttributeError, TypeError) as error:
            hint = "write a new one with --update"
            raise ValidationError(f"{path} is no snapshot of registers", hint=hint) from error

    def knows(self, version: str) -> bool:
        """Tell whether there are figures of this version of Triton."""
        return version in self._all

    def drifts(self, version: str, registers: Registers) -> list[Drift]:
        """Return every kernel whose registers are not those of the snapshot."""
        known = self._all.get(version, {})
        found = [
            Drift(key, target, known.get(target, {}).get(key), now)
            for (key, target), now in registers.items()
        ]
        return [drift for drift in found if drift.was != drift.now]

    def gone(self, version: str, registers: Registers) -> list[tuple[str, str]]:
        """Return the keys and machines of the snapshot that `registers`, meant to be all, do not hold."""
        known = self._all.get(version, {})
        held = [(key, target) for target, counts in known.items() for key in counts]
        return [pair for pair in held if pair not in registers]

    def update(self, version: str, registers: Registers, *, complete: bool) -> None:
        """Write the figures into the file; all others of this version go if these are `complete`."""
        kept: dict[str, dict[str, int]] = {} if complete else self._all.setdefault(version, {})
        for (key, target), count in registers.items():
            kept.setdefault(target, {})[key] = count
        self._all[version] = {target: dict(sorted(counts.items())) for target, counts in sorted(kept.items())}
        try:
            write_report(dict(sorted(self._all.items())), self._path)
        except ValidationError as error:
            raise ValidationError(f"{self._path} cannot be written") from error
