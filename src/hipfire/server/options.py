"""What a server is told when it starts: plain values, checked once.

The command line makes these from settings and flags. This file knows no settings file and opens no socket.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.base.sampling import SamplingParams
from hipfire.checkpoint.library import LocalModel
from hipfire.engine.turn import Thinking

MIN_REQUEST_BYTES = 4096


@dataclass(frozen=True)
class ModelSettings:
    """What the user's settings say about one model; empty values say nothing.

    `sampling` holds the fields of SamplingParams that somebody chose: they stand in for what a request leaves
    out and win over the model file's own. `load` holds load parameters that differ from the server's.
    """

    sampling: Mapping[str, float | int] = field(default_factory=dict)
    max_tokens: int | None = None
    system: str = ""
    thinking: Thinking = field(default_factory=Thinking)
    load: Mapping[str, Any] = field(default_factory=dict)


def no_settings(model: LocalModel) -> ModelSettings:
    """Return settings that say nothing."""
    del model
    return ModelSettings()


@dataclass(frozen=True)
class ServeOptions:
    """How to serve. Raises ValidationError (field, value, what is allowed) when constructed.

    Times are seconds and 0 switches a limit off. `model` is loaded at start if `prewarm`; requests name their
    own. `device`, `max_seq`, `kv_cache`, `kv_backend`, `tp`, `activations`, `weights`, `threads`, `slots`
    and `prefill_chunk` are what the engine loads models with. States of recurrent layers are kept every
    `state_interval` tokens, `state_budget` MiB of them at most. `token_file` holds the bearer token that
    every request but GET /health must show; binding to other than a loopback address needs one, or
    `allow_open_bind`. `allow_origins` names web origins other than this machine's whose pages may use the
    server. `allow_request_paths` lets a request name a model by its path. `normalize` tidies the whitespace
    of what users and systems say. A `daemon_command` of None is the usual engine. `settings_of` tells what is
    set for one model; where it says nothing, the request, the model file and then `default_*` decide.
    """

    host: str = "127.0.0.1"
    port: int = 11435
    model: str | None = None
    prewarm: bool = True
    idle_timeout_s: float = 300.0
    slots: int = 4
    max_seq: int | None = None
    kv_cache: str = "auto"
    weights: str = "auto"
    threads: int | None = None
    device: str = "auto"
    kv_backend: str = "auto"
    tp: int = 1
    activations: str = "int8"
    prefill_chunk: int | None = None
    state_budget: int = 2048
    state_interval: int = 4096
    max_queue: int = 64
    queue_timeout_s: float = 600.0
    request_timeout_s: float = 0.0
    max_request_bytes: int = 64 * 2**20
    max_connections: int = 512
    header_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    head_delay_s: float = 15.0
    keepalive_s: float = 15.0
    token_file: Path | None = None
    allow_open_bind: bool = False
    allow_origins: tuple[str, ...] = ()
    allow_request_paths: bool = False
    normalize: bool = True
    default_system: str = ""
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    default_max_tokens: int = 4096
    daemon_command: tuple[str, ...] | None = None
    settings_of: Callable[[LocalModel], ModelSettings] = no_settings

    def __post_init__(self) -> None:
        if not self.host or any(char.isspace() for char in self.host) or len(self.host) > 255:
            raise ValidationError(f"host {self.host!r} is not a host name or address")
        # 0 lets the system choose a port, which run_server's `ready` tells
        _within("port", self.port, 0, 65535)
        _within("slots", self.slots, 1, 64)
        _within("prefill_chunk", self.prefill_chunk or 1, 1, 2**20)
        _within("state_budget", self.state_budget, 0, 2**20)
        _within("state_interval", self.state_interval, 0, 2**20)
        _within("max_queue", self.max_queue, 0, 2**20)
        _within("max_request_bytes", self.max_request_bytes, MIN_REQUEST_BYTES, 4 * 2**30)
        _within("max_connections", self.max_connections, 1, 2**20)
        _within("default_max_tokens", self.default_max_tokens, 1, 393_216)
        for name in ("idle_timeout_s", "queue_timeout_s", "request_timeout_s", "header_timeout_s"):
            _within(name, getattr(self, name), 0, 31_536_000)
        for name in ("head_delay_s", "keepalive_s", "drain_timeout_s"):
            _within(name, getattr(self, name), 0, 86_400)

    @property
    def loopback(self) -> bool:
        """Return whether only programs of this machine can reach the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address (IPv6 with or without brackets) means this machine only."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValidationError(f"{name} is {value} but must be from {low:g} to {high:.10g}")
