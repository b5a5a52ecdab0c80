"""The daemon as its parent sees it: a child process that is asked, told, and may die at any moment.

Whoever waits for it when it dies gets a typed error. This file restarts nothing (keeper.py does) and knows no
HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hipfire.base import log
from hipfire.base.errors import HipfireError, InternalError, TransportError, ValidationError
from hipfire.base.printable import one_line
from hipfire.engine.turn import TERMINALS, Event, Info, Started, TurnKey, TurnRequest
from hipfire.engine.wire import (
    MAX_REPLY,
    decode_event,
    encode_key,
    encode_request,
    line_of,
    parse_line,
    request_line,
    request_number,
)
from hipfire.engine.wire_errors import error_of, failed

READY_SECONDS: Final = 120.0
CLOSE_SECONDS: Final = 10.0
_LOG_TAIL: Final = 4096

Progress = Callable[[Mapping[str, Any]], None]


class DaemonDiedError(TransportError):
    """The daemon's process has ended; what ran in it is lost, and may be asked again of the next one."""

    kind = "transient"


class Daemon:
    """One child process. Made by `start`; after `close`, or once it has died, it answers nothing more."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path | None, log_start: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._log_path, self._log_start = log_path, log_start
        self._numbers = itertools.count(1)
        self._replies: dict[int, tuple[asyncio.Future[dict[str, Any]], Progress | None]] = {}
        self._asked: dict[int, TurnKey] = {}
        self._turns: dict[TurnKey, asyncio.Queue[Event]] = {}
        self._death: HipfireError | None = None
        self._mourners: list[Callable[[], None]] = []
        self._closing = False
        self.model_loaded = False
        self._following = asyncio.create_task(self._follow())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        *,
        ready_seconds: float = READY_SECONDS,
    ) -> Daemon:
        """Start the process and return once it answers.

        Its log is appended to `log_path`, or goes where this process's own does. Raises TransportError with
        the last line of its log if it cannot be started, ends at once or does not answer in time.
        """
        try:
            with contextlib.ExitStack() as opened:
                # the child has a copy of the log's descriptor
                stderr = None if log_path is None else opened.enter_context(log_path.open("ab"))
                size = 0 if stderr is None else stderr.tell()
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env=None if env is None else dict(env),
                    limit=MAX_REPLY,
                )
        except OSError as error:
            raise TransportError(f"the engine cannot be started ({error})") from error
        daemon = cls(process, log_path, size)
        try:
            await asyncio.wait_for(daemon.request("ping"), ready_seconds)
        except BaseException as error:
            daemon.kill()
            await daemon._following
            if isinstance(error, TimeoutError):
                raise TransportError(f"the engine did not answer within {ready_seconds:g} s") from error
            raise
        return daemon

    @property
    def alive(self) -> bool:
        """Return whether the process runs, as far as is known."""
        return self._death is None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Return the process's number."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Return whether a request waits for its reply; a load may take its time."""
        return bool(self._replies)

    def when_dead(self, callback: Callable[[], None]) -> None:
        """Call back once when the process has ended and all who waited were told; at once if it has."""
        if self._death is None:
            self._mourners.append(callback)
        else:
            callback()

    async def request(
        self, kind: str, /, *, progress: Progress | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send a message and return its reply; `progress` gets the replies that come before the last.

        Raises the HipfireError that the daemon answers with, or DaemonDiedError.
        """
        if self._death is not None:
            # each raise would add to the one error's traceback
            raise self._death.with_traceback(None)
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = (reply, progress)
        try:
            await self._write({"type": kind, **fields, "request": number})
            return await reply
        finally:
            del self._replies[number]

    async def generate(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Run a turn and yield its events, the terminal last.

        A turn that is refused, or whose daemon dies, ends with Failed. Closing the generator early aborts the
        turn. Raises ValidationError for a key that is in use and a request too long for a line.
        """
        key = request.key
        if key in self._turns:
            raise ValidationError(f"turn {key.id!r}, attempt {key.attempt}, is running already")
        number = next(self._numbers)
        record = {**encode_request(request), "request": number}
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._turns[key], self._asked[number] = events, key
        started = ended = False
        try:
            if self._death is None:
                await self._write(record)
            else:
                events.put_nowait(failed(key, self._death))
            while not ended:
                event = await events.get()
                ended = isinstance(event, TERMINALS)
                if not ended and not isinstance(event, Info):
                    if isinstance(event, Started) is started:
                        raise InternalError(f"the engine sent a {type(event).__name__} out of order")
                    started = True
                yield event
        finally:
            del self._turns[key], self._asked[number]
            if not ended:
                self.abort(key)

    def commit(self, key: TurnKey) -> None:
        """Say that a Ready turn's client has everything."""
        self._tell("commit", key)

    def abort(self, key: TurnKey) -> None:
        """Say that a turn's client is gone."""
        self._tell("abort", key)

    def cancel(self, key: TurnKey) -> None:
        """Stop a turn that waits or runs."""
        self._tell("cancel", key)

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the process: running turns are aborted, and what has not ended after so long is killed."""
        self._closing = True
        self._stdin.close()
        await asyncio.wait({self._following}, timeout=seconds)
        if not self._following.done():
            self.kill()
        await self._following

    def kill(self) -> None:
        """End the process at once; all who wait are told when it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    def _tell(self, kind: str, key: TurnKey) -> None:
        if self._death is None and not self._closing:
            self._stdin.write(line_of(encode_key(kind, key)))

    async def _write(self, record: Mapping[str, Any]) -> None:
        line = request_line(record)
        try:
            self._stdin.write(line)
            await self._stdin.drain()
        except OSError:
            # the process is gone; whoever waits is told when that is certain
            return

    async def _follow(self) -> None:
        """Read until the process closes its stdout, see to it that it ends, and tell all who wait."""
        try:
            while line := await self._stdout.readline():
                self._take(parse_line(line, MAX_REPLY))
        except Exception as error:
            # nobody could say what else such a process gets wrong, and nobody may wait for it for ever
            log.logger().error(f"the engine (process {self.pid}) sent what cannot be read: {error}")
            self.kill()
        try:
            code = await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self.kill()
            code = await self._process.wait()
        self._die(code)

    def _take(self, record: Mapping[str, Any]) -> None:
        """Give a message to whoever waits for it; what nobody waits for any more is dropped."""
        kind, number = record.get("type"), request_number(record)
        if isinstance(record.get("model_loaded"), bool) or kind in ("loaded", "unloaded"):
            self.model_loaded = record.get("model_loaded", kind == "loaded")
        if "id" in record:
            event = decode_event(record)
            if event.key in self._turns:
                self._turns[event.key].put_nowait(event)
        elif number in self._asked:
            key = self._asked[number]
            self._turns[key].put_nowait(failed(key, error_of(record)))
        elif number in self._replies:
            self._answer(record, *self._replies[number])
        elif kind == "error":
            log.logger().warning(f"the engine: {error_of(record)}")

    def _answer(
        self, record: Mapping[str, Any], reply: asyncio.Future[dict[str, Any]], progress: Progress | None
    ) -> None:
        if record["type"] == "loading":
            if progress is not None:
                progress(record)
        elif reply.done():
            return
        elif record["type"] == "error":
            reply.set_exception(error_of(record))
        else:
            reply.set_result(dict(record))

    def _die(self, code: int) -> None:
        self._death = error = DaemonDiedError(self._obituary(code), hint="ask again")
        self.model_loaded = False
        for reply, _ in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        for key, events in self._turns.items():
            events.put_nowait(failed(key, error))
        mourners, self._mourners = self._mourners, []
        for callback in mourners:
            callback()

    def _obituary(self, code: int) -> str:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        words = self._last_words()
        return f"the engine's process ended ({how})" + (f": {words}" if words else "")

    def _last_words(self) -> str:
        """Return the last line that this process wrote into its log."""
        if self._log_path is None:
            return ""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - _LOG_TAIL, self._log_start))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return one_line(next((line for line in reversed(lines) if line.strip()), ""))
