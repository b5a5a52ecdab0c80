"""What the words after `hipfire serve` mean: a model, a host, a port, or a host with a port, in any order.

This file looks names up. It fetches no model and binds nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hipfire.base.config import Config, require_key
from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import MODEL_SUFFIXES, Library
from hipfire.cli.remote_wire import Address
from hipfire.cli.serving import configured_address

BIND = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\s\[\]/\\]+)):(?P<port>[0-9]{1,5})")
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Target:
    """What to serve, as the user named it, and where."""

    model: str | None
    address: Address


def parse_words(words: Sequence[str], model: str | None, config: Config, library: Library) -> Target:
    """Return what the words mean; `model` is that of the flag. What is missing comes from the settings.

    Raises ValidationError for two words of one meaning, and for one that means nothing.
    """
    found: dict[str, str] = {} if model is None else {"model": model}
    for word in words:
        for kind, value in meaning(word, library).items():
            if kind in found:
                raise ValidationError(
                    f"two {kind}s are named: {found[kind]} and {value}", hint=f"give one {kind}"
                )
            found[kind] = value
    usual = configured_address(config)
    port = require_key("serve.port").check(int(found.get("port", usual.port)), source="command line")
    host = require_key("serve.host").check(found.get("host", usual.host), source="command line")
    name = found.get("model") or str(config.resolve("serve.default_model").value) or None
    return Target(name, Address(str(host), int(str(port))))


def meaning(word: str, library: Library) -> dict[str, str]:
    """Return what a word gives: a "model", a "host", a "port", or the latter two.

    A known model comes before a host of the same name, and only a part of a model's name comes after it.
    """
    if word.isdecimal() and word.isascii():
        return {"port": word}
    bind = BIND.fullmatch(word)
    if _is_model(word, library, quiet=bind is not None or _is_ip(word)):
        return {"model": word}
    if bind is not None:
        return {"host": bind["six"] or bind["host"], "port": bind["port"]}
    if _is_ip(word):
        return {"host": word.strip("[]")}
    if library.find(word) is not None:
        return {"model": word}
    if _is_host(word):
        return {"host": word}
    # neither: the nearest tags are the best advice
    library.registry.require(word)
    raise ValidationError(f"{word!r} is neither a model nor an address")


def _is_model(word: str, library: Library, *, quiet: bool) -> bool:
    with contextlib.suppress(*([ValidationError] if quiet else [])):
        return library.find(word, fuzzy=False) is not None or library.registry.resolve(word) is not None
    return False


def _is_ip(word: str) -> bool:
    try:
        ipaddress.ip_address(word.strip("[]"))
    except ValueError:
        return False
    return True


def _is_host(word: str) -> bool:
    if not HOST_NAME.fullmatch(word) or word.rpartition(".")[2].lower() in MODEL_SUFFIXES:
        return False
    try:
        return bool(socket.getaddrinfo(word, None))
    except (OSError, UnicodeError):
        return False
