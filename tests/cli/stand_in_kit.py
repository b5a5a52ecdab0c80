"""Starting stand-ins for servers, and free ports for them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hipfire.cli.remote import Remote
from hipfire.cli.remote_wire import Address

STAND_IN = Path(__file__).with_name("hipfire_stand_in.py")
SECONDS = 20.0


def free_port() -> int:
    """Return a port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(behaviour: str, port: int) -> list[str]:
    """Return the words that start a stand-in."""
    return [sys.executable, str(STAND_IN), behaviour, str(port)]


@contextmanager
def stand_in(behaviour: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a stand-in that answers; it is killed when the context is left."""
    process = subprocess.Popen(command(behaviour, port), stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + SECONDS
        while Remote(Address("127.0.0.1", port)).health() is None:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def other_program(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that does nothing, with these words on its command line."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", *words], stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
