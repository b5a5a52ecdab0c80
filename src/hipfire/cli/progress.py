"""Progress on stderr: a live bar on a terminal, a few plain lines everywhere else.

NO_COLOR, CLICOLOR=0, TERM=dumb or a redirected stderr choose plain lines: no escape codes, no carriage
returns.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hipfire.base import log
from hipfire.base.printable import one_line
from hipfire.checkpoint.progress import TransferProgress
from hipfire.cli.output import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 5.0


def is_live(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether stderr is a terminal that may be drawn on."""
    if environment.get("NO_COLOR") or environment.get("CLICOLOR") == "0" or environment.get("TERM") == "dumb":
        return False
    return sys.stderr is not None and sys.stderr.isatty()


def make_progress() -> TransferProgress:
    """Return the progress display that suits stderr."""
    return LiveProgress() if is_live() else PlainProgress()


class PlainProgress:
    """Writes a line when a transfer starts, every few seconds, and when it ends."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._label = ""
        self._done, self._total = 0, 0
        self._last = 0.0
        self._ended = True

    def start(self, label: str, total: int | None) -> None:
        """Write that the transfer starts."""
        self._label, self._done, self._total, self._ended = label, 0, total or 0, False
        self._last = self._clock()
        log.logger().info(f"{label}: starting{f' ({size_text(total)})' if total else ''}")

    def update(self, done: int, total: int | None) -> None:
        """Write the position, at most every `PLAIN_SECONDS`."""
        self._done, self._total = done, total or 0
        if self._clock() - self._last >= PLAIN_SECONDS:
            self._last = self._clock()
            log.logger().info(f"{self._label}: {self._position()}")

    def rename(self, label: str) -> None:
        """Keep the first label: a log needs no line for every part."""

    def note(self, line: str) -> None:
        """Write the line."""
        log.logger().info(line)

    def finish(self) -> None:
        """Write where the transfer ended, once."""
        if not self._ended:
            self._ended = True
            log.logger().info(f"{self._label}: {self._position()}")

    def _position(self) -> str:
        if not self._total:
            return size_text(self._done)
        return f"{100 * self._done // self._total}% of {size_text(self._total)}"


class LiveProgress:
    """Draws a bar with rate and remaining time."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, label: str, total: int | None) -> None:
        """Draw an empty bar."""
        # rich.progress takes longer to import than a local command takes to run
        from rich.console import Console  # noqa: PLC0415
        from rich.markup import escape  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(escape(one_line(label)), total=total)
        self._bar.start()

    def update(self, done: int, total: int | None) -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)

    def rename(self, label: str) -> None:
        """Show another label in front of the bar."""
        if self._bar is not None and self._task is not None:
            from rich.markup import escape  # noqa: PLC0415 - see start

            self._bar.update(self._task, description=escape(one_line(label)))

    def note(self, line: str) -> None:
        """Write the line above the bar."""
        if self._bar is None:
            log.logger().info(line)
        else:
            self._bar.console.print(
                f"hipfire: {one_line(line)}", markup=False, highlight=False, soft_wrap=True
            )

    def finish(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


class TensorProgress:
    """Shows the work on the tensors of one model, counted in bytes, on a transfer's display."""

    def __init__(self, display: TransferProgress, label: str) -> None:
        self._display, self._label = display, label
        self._done, self._total = 0, 0

    def start(self, total_bytes: int, tensors: int) -> None:
        """Work on so many tensors and bytes begins."""
        self._done, self._total = 0, total_bytes
        self._display.start(f"{self._label} ({tensors} tensors)", total_bytes)

    def tensor(self, name: str, nbytes: int) -> None:
        """So many more bytes of a tensor are done."""
        self._done += nbytes
        self._display.rename(f"{self._label}: {name}")
        self._display.update(self._done, self._total)

    def done(self) -> None:
        """The work ended."""
        self._display.finish()
