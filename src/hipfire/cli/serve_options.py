"""The flags of `hipfire serve`, and the options that they and the settings make for the server.

Every model has settings of its own, so the server asks for them by model. This file starts nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from hipfire.base.config import Config, Resolved
from hipfire.base.config_keys import Value
from hipfire.base.errors import ValidationError
from hipfire.base.sampling import SamplingParams
from hipfire.checkpoint.library import Library, LocalModel
from hipfire.cli.overrides import chosen_thinking, model_settings
from hipfire.cli.remote_wire import Address
from hipfire.cli.settings import WHOLE
from hipfire.server.options import ModelSettings, ServeOptions

# fields of SamplingParams, which have the names of their settings
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class ServeFlags:
    """Settings for this server alone; None leaves a setting to the files."""

    device: str | None = None
    """What computes: auto, cpu, gpu, or a number as in gpu:1."""

    kv_mode: str | None = None
    """Cache of keys and values: auto, q8, bf16 or f32."""

    kv_backend: str | None = None
    """How a GPU gets memory for keys and values: auto, vmm or legacy."""

    tp: Annotated[int | None, WHOLE] = None
    """Devices that share the model, each with a part of every matrix."""

    weights: str | None = None
    """How weights are held: auto, panels, decoded or packed."""

    max_seq: Annotated[int | None, WHOLE] = None
    """Context length in tokens."""

    threads: Annotated[int | None, WHOLE] = None
    """CPU threads."""

    slots: Annotated[int | None, WHOLE, Parameter(name=["--slots", "--continuous-batch-size"])] = None
    """Requests of one model that run at once."""

    prefill_chunk: Annotated[int | None, WHOLE] = None
    """Tokens of a prompt that are read before other requests get their next token."""

    state_budget: Annotated[int | None, WHOLE] = None
    """Most MiB of kept states of models with recurrent layers; 0 is none."""

    state_interval: Annotated[int | None, WHOLE] = None
    """Tokens of a prompt after which such a state is kept; 0 is never."""

    idle_timeout: Annotated[int | None, WHOLE] = None
    """Seconds without a request after which the model leaves memory; 0 is never."""

    max_queue: Annotated[int | None, WHOLE] = None
    """Most requests that wait; 0 is no limit."""

    token_file: str | None = None
    """File with the bearer token that requests must carry."""

    allow_origins: str | None = None
    """Web origins whose pages may use the server, with commas between."""

    allow_request_paths: bool | None = None
    """Let a request name any model file by its path."""

    allow_open_bind: Annotated[bool, Parameter(negative="")] = False
    """Listen on an address that others can reach without asking them for a token."""

    no_prewarm: Annotated[bool, Parameter(name="--no-prewarm", negative="")] = False
    """Load the model with the first request, not at start."""

    def values(self) -> dict[str, Value]:
        """Return the values by setting, without those that are flags only."""
        plain = ("allow_open_bind", "no_prewarm")
        renamed = {"kv_mode": "kv_cache"}
        return {renamed.get(name, name): value for name, value in vars(self).items() if name not in plain}

    def words(self) -> list[str]:
        """Return the command-line words that give the same flags."""
        made: list[str] = []
        for name, value in vars(self).items():
            option = name.replace("_", "-")
            if value is True:
                made.append(f"--{option}")
            elif value is False and name == "allow_request_paths":
                made.append(f"--no-{option}")
            elif value is not None and value is not False:
                made.append(f"--{option}={value}")
        return made


def build_options(
    config: Config, flags: ServeFlags, *, model: str | None, address: Address, prewarm: bool
) -> ServeOptions:
    """Return the server's options; `model` is what it is started with, by name or path."""
    given = flags.values()

    def value(name: str) -> Any:
        return config.resolve(name, cli=given).value

    token_file = value("serve.token_file")
    return ServeOptions(
        host=address.host,
        port=address.port,
        model=model,
        prewarm=prewarm,
        idle_timeout_s=value("serve.idle_timeout_seconds"),
        slots=value("serve.slots"),
        max_seq=value("memory.max_seq"),
        kv_cache=value("memory.kv_cache"),
        weights=value("memory.weights"),
        threads=value("hardware.threads"),
        device=value("hardware.device"),
        kv_backend=value("memory.kv_backend"),
        tp=value("hardware.tp"),
        activations=value("hardware.activations"),
        prefill_chunk=value("serve.prefill_chunk"),
        state_budget=value("memory.state_budget"),
        state_interval=value("memory.state_interval"),
        max_queue=value("serve.max_queue"),
        queue_timeout_s=value("serve.queue_timeout_ms") / 1000,
        max_request_bytes=value("serve.max_request_bytes"),
        token_file=Path(token_file) if token_file else None,
        allow_open_bind=flags.allow_open_bind,
        allow_origins=tuple(value("serve.allow_origins").replace(",", " ").split()),
        allow_request_paths=value("serve.allow_request_paths"),
        normalize=value("prompt.normalize"),
        default_system=value("prompt.system"),
        default_sampling=SamplingParams(**{name: _default(config, name) for name in SAMPLING}),
        default_max_tokens=int(_default(config, "max_tokens")),
        settings_of=lambda local: settings_for(model_settings(config, given, local)),
    )


def settings_for(resolve: Callable[..., Resolved]) -> ModelSettings:
    """Return what somebody has set for one model; built-in defaults say nothing."""

    def chosen(name: str) -> Any:
        found = resolve(name)
        return None if found.winner.origin == "default" else found.value

    sampling = {name: value for name in SAMPLING if (value := chosen(name)) is not None}
    load: Mapping[str, Any] = {
        "max_seq": chosen("memory.max_seq"),
        "kv_mode": chosen("memory.kv_cache"),
        "weights": chosen("memory.weights"),
        "kv_backend": chosen("memory.kv_backend"),
        "template_file": chosen("prompt.chat_template") or None,
    }
    return ModelSettings(
        sampling=sampling,
        max_tokens=chosen("generation.max_tokens"),
        system=str(resolve("prompt.system").value),
        thinking=chosen_thinking(resolve),
        load={name: value for name, value in load.items() if value is not None},
    )


def own_word(library: Library, local: LocalModel | None) -> str | None:
    """Return what names a model without doubt: its short name, or its path where that means another file."""
    if local is None:
        return None
    found = None
    with contextlib.suppress(ValidationError):
        found = library.find(local.name, fuzzy=False)
    return local.name if found is not None and found.path == local.path else str(local.path)


def _default(config: Config, name: str) -> Any:
    return config.resolve(name).key.default
