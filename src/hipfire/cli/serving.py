"""Which server is this user's: where it should listen, whether it answers, and what its record proves.

This file starts and ends nothing (background.py does).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hipfire.base import env, log
from hipfire.base.config import Config
from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import Library
from hipfire.cli.pull import installed
from hipfire.cli.remote import Health, Remote
from hipfire.cli.remote_wire import Address
from hipfire.engine.lock import ProcessRecord, is_alive, ownership_fault, read_pid_file

MAX_TOKEN_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Found:
    """A server that answers, and what it said."""

    remote: Remote
    health: Health


@dataclass(frozen=True, slots=True)
class Recorded:
    """What `serve.pid` says, where that server should be, and what was found out about it.

    `alive` tells whether the process runs; `fault` is why it is not proven to be the server, None if it is.
    """

    record: ProcessRecord
    address: Address
    health: Health | None
    alive: bool
    fault: str | None


def configured_address(config: Config) -> Address:
    """Return where the settings say that the server listens."""
    host, port = config.resolve("serve.host").value, config.resolve("serve.port").value
    return Address(str(host), int(str(port)))


def connect(config: Config, address: Address) -> Remote:
    """Return a client for a server, with the token that the settings name."""
    return Remote(address, token=read_token(str(config.resolve("serve.token_file").value)))


def read_token(path: str) -> str | None:
    """Return the token in a file, without the white space around it; an empty path is no token."""
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"serve.token_file: {path} cannot be read: {error}") from error
    if not token or not token.isprintable() or not token.isascii():
        raise ValidationError(f"serve.token_file: {path} holds no token", hint="write one line of ASCII text")
    return token


def find_server(config: Config) -> Found | None:
    """Return the server at the configured address, else the one that the record of this user names."""
    remote = connect(config, configured_address(config))
    health = remote.health()
    if health is not None:
        return Found(remote, health)
    known = recorded_server(config)
    if known is not None and known.health is not None and known.fault is None:
        return Found(connect(config, known.address), known.health)
    return None


def recorded_server(config: Config) -> Recorded | None:
    """Return what the record of the running server says and what is true of it, or None without a record."""
    record = read_pid_file(env.server_record_path(config.environment))
    if record is None:
        return None
    usual = configured_address(config)
    address = usual if record.port is None else Address(usual.host, record.port)
    alive = is_alive(record.pid)
    health = Remote(address).health() if alive else None
    facts = None if health is None else asdict(health)
    return Recorded(record, address, health, alive, ownership_fault(record, health=facts))


def served_name(found: Found, library: Library, name: str) -> str | None:
    """Return what the server calls a model that the user calls `name`; fetch a registered one first.

    None if the server does not offer it, such as a file outside the models folder.
    """
    offered = found.remote.models()
    if name in offered:
        return name
    local = installed(library, name)
    spellings = (local.name, local.path.name)
    # what was only just fetched is in a later list
    for names in (offered, found.remote.models()):
        for spelling in spellings:
            if spelling in names:
                return spelling
    log.logger().info(f"the server at {found.remote.address} does not offer {name}")
    return None
