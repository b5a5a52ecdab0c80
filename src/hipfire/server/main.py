"""Running the server: its address, its engine, its record on disk, and how signals end it.

This file knows no routes and no settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from hipfire.base import env, log
from hipfire.base.errors import TransportError, ValidationError
from hipfire.checkpoint.library import open_library
from hipfire.engine.lock import ProcessRecord, own_record, remove_pid_file, write_pid_file
from hipfire.server.access import read_token
from hipfire.server.app import create_app
from hipfire.server.backend import Backend
from hipfire.server.connections import limited
from hipfire.server.daemon_backend import DaemonBackend
from hipfire.server.options import ServeOptions
from hipfire.server.service import Service

BACKLOG = 1024
# how long a finished keep-alive connection may wait for its next request, in seconds
KEEP_ALIVE_S = 75
Ready = Callable[[str], None]


def run_server(options: ServeOptions, *, ready: Ready | None = None, backend: Backend | None = None) -> int:
    """Serve until a signal ends it; return the exit code.

    `ready` is told the address once requests are answered. `backend` replaces the daemon. The first SIGINT,
    SIGTERM or SIGHUP stops accepting and gives running replies `drain_timeout_s`; the second ends at once.

    Raises:
        ValidationError: an address that may not be bound, a token file that cannot be used, a model that is
            not there.
        TransportError: the address is in use, or the engine does not start.
    """
    token = read_token(options)
    sockets = bind(options.host, options.port)
    try:
        record = own_record(sockets[0].getsockname()[1])
        service = Service(options, backend or _daemon(options), open_library(), token=record.token or "")
        return asyncio.run(_run(options, service, sockets, record, token, ready))
    finally:
        for each in sockets:
            each.close()


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address that a host name stands for; port 0 takes a free one."""
    name = host.strip("[]")
    try:
        places = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValidationError(f"{host} is no address: {error}", hint="such as 127.0.0.1") from error
    made: list[socket.socket] = []
    fault: OSError | None = None
    for family, kind, protocol, _, place in dict.fromkeys(places):
        one = socket.socket(family, kind, protocol)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((place[0], made[0].getsockname()[1] if made else port, *place[2:]))
            made.append(one)
        except OSError as error:
            one.close()
            fault = error
            # a host name may stand for an address family that this machine has not got, but a port that
            # another program has is never shared with it
            if error.errno == errno.EADDRINUSE:
                break
    if made and (fault is None or fault.errno != errno.EADDRINUSE):
        return made
    for one in made:
        one.close()
    raise TransportError(
        f"{host}:{port} cannot be listened at: {fault.strerror if fault else 'no address'}",
        hint="another program may listen there; choose another port",
    )


def server_config(options: ServeOptions, app: FastAPI) -> uvicorn.Config:
    """Return how uvicorn is to serve the application."""
    return uvicorn.Config(
        app,
        http=limited(header_timeout_s=options.header_timeout_s, max_connections=options.max_connections),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.drain_timeout_s)),
    )


class Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and leaves signals to this file."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets=sockets)
        self._tell()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


async def _run(
    options: ServeOptions,
    service: Service,
    sockets: list[socket.socket],
    record: ProcessRecord,
    token: str | None,
    ready: Ready | None,
) -> int:
    host = f"[{options.host.strip('[]')}]" if ":" in options.host else options.host

    def started() -> None:
        if ready is not None:
            ready(f"http://{host}:{record.port}")

    app = create_app(options, service, token=token)
    server = Server(server_config(options, app), started)
    path = env.server_record_path()
    with _signals(server, service):
        try:
            await service.start()
            write_pid_file(path, record)
            await server.serve(sockets=sockets)
        finally:
            remove_pid_file(path, record)
            await service.close()
    return 0


@contextlib.contextmanager
def _signals(server: uvicorn.Server, service: Service) -> Iterator[None]:
    """Have signals end the server while this is entered."""

    def end() -> None:
        if server.should_exit:
            server.force_exit = True
            # newer Pythons wait for these when they close a listener
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            service.backend.kill()
            return
        log.logger().info("stopping: no new requests are taken, running ones are finished")
        service.closing = server.should_exit = True

    loop = asyncio.get_running_loop()
    taken = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # one that was ignored from the start, as under nohup, stays so; other threads may take none
        with contextlib.suppress(ValueError, RuntimeError):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                loop.add_signal_handler(number, end)
                taken.append((number, before))
    try:
        yield
    finally:
        for number, before in taken:
            loop.remove_signal_handler(number)
            signal.signal(number, before)


def _daemon(options: ServeOptions) -> DaemonBackend:
    command = options.daemon_command or (sys.executable, "-m", "hipfire.engine.daemon")
    return DaemonBackend(command, log_path=_own_log(), threads=options.threads)


def _own_log() -> Path | None:
    """Return the log file if this process's stderr goes there; the engine's last words are then found."""
    path = env.server_log_path()
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(2)):
            return path
    return None
