"""`hipfire serve` and `hipfire restart`: from words, flags and settings to a server that runs.

This file knows no route and no engine: `hipfire.server` does the serving.
"""

from __future__ import annotations

import errno
import socket
import sys
from typing import Annotated

from cyclopts import Parameter

from hipfire.base import env, log
from hipfire.base.config import Config
from hipfire.base.errors import TransportError, ValidationError
from hipfire.checkpoint.library import open_library
from hipfire.cli.background import end_server, start_in_background
from hipfire.cli.pull import installed
from hipfire.cli.remote import Health, Remote
from hipfire.cli.remote_wire import WILDCARDS, Address
from hipfire.cli.serve_options import ServeFlags, build_options, own_word
from hipfire.cli.serve_words import Target, parse_words
from hipfire.cli.serving import recorded_server
from hipfire.cli.settings import load_settings
from hipfire.engine.lock import ProcessRecord

EXIT_IN_USE = 3
NO_FLAGS = ServeFlags()

Detach = Annotated[bool, Parameter(name=["--detach", "-d", "--background"], negative="")]


class InUseError(TransportError):
    """A server of this user runs already, or a program listens at the address."""


def serve(
    *words: str,
    model: str | None = None,
    detach: Detach = False,
    flags: Annotated[ServeFlags, Parameter(name="*")] = NO_FLAGS,
) -> int:
    """Serve models over HTTP until Ctrl-C or `hipfire stop`.

    A registered model that is not installed is fetched first.

    Parameters
    ----------
    words
        A model, a host, a port, or HOST:PORT, in any order.
    model
        The model, where its name could be taken for something else.
    detach
        Run in the background; returns when the server answers.
    """
    return _serve(words, model, flags, detached=detach, replace=False)


def restart(
    *words: str,
    model: str | None = None,
    detach: Detach = False,
    flags: Annotated[ServeFlags, Parameter(name="*")] = NO_FLAGS,
) -> int:
    """Stop the server that runs, dropping its running replies, and serve.

    Parameters
    ----------
    words
        A model, a host, a port, or HOST:PORT, in any order.
    model
        The model, where its name could be taken for something else.
    detach
        Run in the background; returns when the server answers.
    """
    return _serve(words, model, flags, detached=detach, replace=True)


def _serve(
    words: tuple[str, ...], model: str | None, flags: ServeFlags, *, detached: bool, replace: bool
) -> int:
    config = load_settings()
    # a mistake on the command line is found before a server is stopped or a model is fetched
    for name in flags.values():
        config.resolve(name, cli=flags.values())
    library = open_library(config)
    target = parse_words(words, model, config, library)
    try:
        known = _replaceable(config, target.address, replace=replace)
        local = None if target.model is None else installed(library, target.model)
        if known is not None:
            # the web framework takes half a second to import
            from hipfire.server.access import read_token  # noqa: PLC0415

            # what would keep the new server from starting must not cost the old one
            read_token(build_options(config, flags, model=None, address=target.address, prewarm=False))
            end_server(known, force=True)
            log.logger().info(f"stopped process {known.pid}")
            check_free(target.address)
    except InUseError as error:
        log.logger().info(error.line())
        return EXIT_IN_USE
    target = Target(own_word(library, local), target.address)
    if detached:
        start_detached(target, flags)
        return 0
    prewarm = not (flags.no_prewarm or _says_no_prewarm())
    options = build_options(config, flags, model=target.model, address=target.address, prewarm=prewarm)
    # the web framework takes half a second to import
    from hipfire.server.main import run_server  # noqa: PLC0415

    return run_server(options, ready=lambda where: log.logger().info(f"serving at {where}"))


def start_detached(target: Target, flags: ServeFlags) -> Health:
    """Start a server in the background, wait until it answers, and say where it is."""
    model = [] if target.model is None else [f"--model={target.model}"]
    command = [sys.executable, "-m", "hipfire.cli", "serve", str(target.address), *model, *flags.words()]
    log_path = env.server_log_path()
    health = start_in_background(command, target.address, log_path)
    log.logger().info(
        f"serving at {Remote(target.address).address.base} as process {health.pid}; log: {log_path}"
    )
    return health


def check_free(address: Address) -> None:
    """Raise if a server could not listen there: InUseError if a program does, else ValidationError."""
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValidationError(f"{address.host} is no address: {error}", hint="such as 127.0.0.1") from error
    fault: OSError | None = None
    bound = False
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # its wildcard would claim the same port of IPv4 too
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(place)
                bound = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _bind_fault(address, error) from error
            # a name may stand for a kind of address that this machine has not got
            fault = error
    if fault is not None and not bound:
        raise _bind_fault(address, fault) from fault


def _bind_fault(address: Address, error: OSError) -> TransportError | ValidationError:
    if error.errno == errno.EADDRINUSE:
        health = Remote(address).health()
        who = "another program" if health is None else f"a hipfire server, process {health.pid},"
        return InUseError(
            f"{who} listens at {address} already",
            hint=f"choose another port, such as `hipfire serve {address.port + 1}`",
        )
    if error.errno == errno.EACCES:
        return ValidationError(f"this user may not listen at {address}", hint="choose a port above 1023")
    return ValidationError(
        f"{address} is no address of this machine: {error.strerror}",
        hint=f"use {WILDCARDS['0.0.0.0']}, or 0.0.0.0 for all of its addresses",
    )


def _replaceable(config: Config, address: Address, *, replace: bool) -> ProcessRecord | None:
    """Return the server that runs and is to be replaced; raise InUseError if it or another one stays."""
    known = recorded_server(config)
    if known is not None and known.alive and known.fault is None:
        if not replace:
            raise InUseError(
                f"a server runs already: process {known.record.pid} at {known.address}",
                hint="`hipfire stop` ends it, `hipfire restart` replaces it",
            )
        # a server is not stopped for one that could not start
        if known.address.port != address.port:
            check_free(address)
        return known.record
    check_free(address)
    return None


def _says_no_prewarm() -> bool:
    word = env.get("HIPFIRE_NO_PREWARM")
    return word is not None and env.parse_bool(word, what="HIPFIRE_NO_PREWARM")
