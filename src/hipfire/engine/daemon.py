"""The engine's process: JSON lines on stdin and stdout, the log on stderr, one loop that does everything.

`python -m hipfire.engine.daemon` is how the server starts it. It ends on SIGTERM, or when its stdin ends as
its parent has; a fault of the core ends it too, and the server starts another. This file knows no model.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Final

from hipfire.base import env, log
from hipfire.base.errors import HipfireError
from hipfire.engine.daemon_parts import Loader
from hipfire.engine.daemon_state import DaemonState
from hipfire.engine.lock import DaemonLock
from hipfire.engine.wire import MAX_LINE

EXIT_LOCKED: Final = 1
EXIT_FAULT: Final = 75
_CHUNK: Final = 65536
# how often a write that waits for its reader looks whether the process shall end
_PATIENCE_MS: Final = 1000


class Daemon:
    """The loop over what comes in and what the core has to do.

    `source` and `target` are file descriptors of the protocol.
    """

    def __init__(self, loader: Loader, source: int, target: int) -> None:
        self._source = source
        self._target = target
        # None says that the process shall end
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ending = self._given_up = False
        self._writable = select.poll()
        self._writable.register(target, select.POLLOUT)
        self._state = DaemonState(loader, self._send, ending=lambda: self._ending)

    def end(self) -> None:
        """Let the loop end; may be called from a signal handler or another thread."""
        self._ending = True
        self._inbox.put(None)

    def run(self) -> int:
        """Serve until told to end; return the process's exit code."""
        threading.Thread(target=self._read, daemon=True, name="hipfire-reader").start()
        idle = True
        try:
            while not self._ending:
                try:
                    # messages come before steps: a cancel or a short prompt must not wait for a queue of work
                    line = self._inbox.get(block=idle, timeout=self._state.wait_s())
                except queue.Empty:
                    idle = not self._state.step()
                    continue
                if line is not None:
                    self._state.handle(line)
                    idle = False
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._state.fail_all(error)
            return EXIT_FAULT
        self._state.end("the engine ends")
        return 0

    def _read(self) -> None:
        try:
            for line in read_lines(self._source):
                self._inbox.put(line)
        finally:
            self.end()

    def _send(self, line: bytes) -> None:
        """Write a line; once the process shall end, a reader that takes nothing is given up."""
        rest = memoryview(b"" if self._given_up else line)
        try:
            while rest:
                if self._writable.poll(_PATIENCE_MS):
                    # so much fits into a pipe that has room at all: the write never blocks
                    rest = rest[os.write(self._target, rest[: select.PIPE_BUF]) :]
                elif self._ending:
                    self._given_up = True
                    return
        except OSError:
            # nobody reads any more
            self._given_up = True
            self.end()


def read_lines(source: int) -> Iterator[bytes]:
    """Yield the lines of a file descriptor without their ends, but no blank ones and no unfinished last one.

    Of a line longer than MAX_LINE no more than one byte too many is kept, which is enough to refuse it.
    """
    held = bytearray()
    while chunk := os.read(source, _CHUNK):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            held += piece
            if held.strip():
                yield bytes(held[: MAX_LINE + 1])
            held.clear()
        held += rest
        del held[MAX_LINE + 1 :]


def main(make_loader: Callable[[], Loader] | None = None) -> int:
    """Run the daemon and return its exit code; `make_loader` gives it something else to load models with."""
    debug = (env.get("HIPFIRE_DEBUG") or "0").lower() not in env.FALSE_WORDS
    log.configure(debug=debug)
    lock = DaemonLock(env.daemon_lock_path())
    try:
        lock.acquire()
    except HipfireError as error:
        sys.stderr.write(f"hipfire: FATAL: {error.line()}\n")
        return EXIT_LOCKED
    try:
        source, target = _private_streams()
        # the server decides about Ctrl-C and a closing terminal, and ends this process when it is done
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        daemon = Daemon((make_loader or _model_loader)(), source, target)
        signal.signal(signal.SIGTERM, lambda *_: daemon.end())
        return daemon.run()
    finally:
        lock.release()


def _private_streams() -> tuple[int, int]:
    """Return descriptors for the protocol; what else reads stdin finds it empty, what prints goes to the log.

    Libraries print, and programs that they start read: neither may touch the protocol's lines.
    """
    source, target = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    # Python's own prints would wait in a buffer, and be lost if the process is killed
    sys.stdout = sys.stderr
    return source, target


def _model_loader() -> Loader:
    env.let_threads_sleep()
    # torch takes a second or two to import, which a daemon that must not start is spared
    from hipfire.engine.daemon_model import ModelLoader  # noqa: PLC0415

    return ModelLoader()


if __name__ == "__main__":
    sys.exit(main())
