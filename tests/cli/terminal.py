"""A command in a pseudo-terminal: type, wait for text, press Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

CTRL_C, CTRL_D = "\x03", "\x04"
PROGRAM = "import sys; from hipfire.cli.main import main; sys.exit(main())"


class Terminal:
    """Runs the command line with a terminal for its input and output; ends it when the context is left."""

    def __init__(self, *words: str, seconds: float = 30.0) -> None:
        self._ours, theirs = pty.openpty()
        self._seconds = seconds
        self.shown = ""
        self._read = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            # Ctrl-C reaches the programs of the terminal that a session has
            preexec_fn=lambda: _own_terminal(theirs),
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        """Send what a person types."""
        os.write(self._ours, text.encode())

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C as a person does, who sees the prompt first.

        One that comes in the instant between showing the prompt and waiting for keys is only seen with the
        next key.
        """
        time.sleep(0.3)
        self.type(CTRL_C)

    def expect(self, text: str) -> None:
        """Wait until the text is shown after what was waited for before."""
        until = time.monotonic() + self._seconds
        while (found := self.shown.find(text, self._read)) < 0:
            if not self._more(until):
                raise AssertionError(f"{text!r} was not shown: {self.shown[self._read :]!r}")
        self._read = found + len(text)

    def end(self) -> int:
        """Return the exit code, reading what is shown until then."""
        until = time.monotonic() + self._seconds
        while self._more(until):
            pass
        return self.process.wait(self._seconds)

    def _more(self, until: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:
            # the last program that had the terminal is gone
            data = b""
        self.shown += data.decode(errors="replace")
        return bool(data)


def _own_terminal(handle: int) -> None:
    os.setsid()
    os.ttyname(handle)
    # opening a terminal makes it that of a session which has none
    os.close(os.open(os.ttyname(handle), os.O_RDWR))
