"""One-line notices on stderr, tracebacks where a record has one, and the process-wide logger.

stdout is payload. Everything here goes to stderr, without colour; control characters are shown escaped. This
file does not know progress bars.
"""

from __future__ import annotations

import logging
import sys

from hipfire.base.printable import one_line, printable

LOGGER_NAME = "hipfire"


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, so that a redirected stream is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:
            # it was closed before the program started
            return
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        lines = [f"hipfire: {level}{one_line(record.getMessage())}"]
        if record.exc_info:
            # of a fault that nobody foresaw, its place is all there is to go by
            lines += map(printable, logging.Formatter().formatException(record.exc_info).splitlines())
        try:
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


def logger() -> logging.Logger:
    """Return hipfire's logger. Until `configure` ran, records go where the embedding program sends them."""
    return logging.getLogger(LOGGER_NAME)


def configure(*, debug: bool = False) -> None:
    """Send notices to stderr, one line each; `debug` also shows debug records. Calling twice is harmless."""
    target = logger()
    target.setLevel(logging.DEBUG if debug else logging.INFO)
    target.propagate = False
    if not any(isinstance(handler, _StderrHandler) for handler in target.handlers):
        target.addHandler(_StderrHandler())
