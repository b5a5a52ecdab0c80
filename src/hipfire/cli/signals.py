"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that what it left half done is cleaned up.

This file does not know what there is to clean up.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, NoReturn

# SIGHUP does not exist everywhere
NAMES = ("SIGTERM", "SIGHUP")


class EndedBySignal(KeyboardInterrupt):
    """A signal asked the process to end; `code` is the exit code that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class Endings:
    """While this context is entered, such a signal raises EndedBySignal in the main thread.

    A signal that the process was started to ignore, as under `nohup`, stays ignored. `code` is the exit code
    of the signal that came, also when another error followed from it; 0 if none did.
    """

    def __init__(self) -> None:
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Endings:
        # Python refuses to change signals from other threads
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
            handlers = {number: signal.getsignal(number) for number in numbers}
            self._before = {number: was for number, was in handlers.items() if was == signal.SIG_DFL}
            for number in self._before:
                signal.signal(number, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _end(self, number: int, _: FrameType | None) -> NoReturn:
        # a closing terminal sends more than one; the second must not cut the cleaning up short
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        ended = EndedBySignal(number)
        self.code = ended.code
        raise ended
