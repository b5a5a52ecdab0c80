"""How the comparisons run as commands: progress, numbers on the command line, and every end in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from hipfire.base.errors import HipfireError
from hipfire.base.printable import one_line
from hipfire.cli.signals import EndedBySignal, Endings

INTERRUPTED = 130


def guarded(name: str, work: Callable[[], None]) -> int:
    """Run the program `name`; return its exit code. A failure or an interruption ends in one line."""
    try:
        with Endings():
            work()
    except HipfireError as error:
        print(f"{name}: {error.line()}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{name}: {one_line(str(error))}", file=sys.stderr)
        return 1
    except EndedBySignal as ended:
        return ended.code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def positive(text: str) -> int:
    """Return a number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return number
