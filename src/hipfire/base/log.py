"""One-line notices on stderr, and the process-wide logger.

stdout is payload. Everything here goes to stderr, without colour; control characters are shown escaped. This
file does not know progress bars.
"""

from __future__ import annotations

import logging
import sys

from hipfire.base.printable import one_line

LOGGER_NAME = "hipfire"


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, so that a redirected stream is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        try:
            sys.stderr.write(f"hipfire: {level}{one_line(record.getMessage())}\n")
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
