"""The table of settings: every key's names, type, default, rule, scope and environment variable.

This file knows single values. It does not know files, layers or precedence (config.py). A key stands here
only when some part of hipfire reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hipfire.base import env
from hipfire.base.errors import ValidationError

Value = float | int | bool | str | None
Kind = Literal["float", "int", "bool", "text", "choice", "file", "host", "device"]
AUTO = "auto"
MAX_HOST_CHARS = 255
DEVICE = re.compile(r"auto|cpu|gpu(:[0-9]{1,4})?")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    `name` is the dotted name, `flat` the old short name; both are accepted everywhere. `default` None means
    "automatic", spelled `auto` in files and on the command line. Keys of `scope` "process" cannot differ per
    model.
    """

    name: str
    flat: str
    kind: Kind
    default: Value
    help: str
    env: str
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    choices: tuple[str, ...] = ()
    scope: Literal["model", "process"] = "model"

    @property
    def rule(self) -> str:
        """Return the values that are allowed, in words."""
        if self.kind == "choice":
            return "one of " + " ".join(self.choices)
        if self.kind in ("int", "float"):
            noun = "integer" if self.kind == "int" else "number"
            bounds = f"{noun} in {'(' if self.low_open else '['}{self.low:g}, {self.high:.10g}]"
            return f"{bounds} or {AUTO}" if self.default is None else bounds
        return {
            "bool": "true or false",
            "text": "text",
            "file": "path of an existing file, or empty",
            "host": "host name or address",
            "device": "auto, cpu, gpu, or a number as in gpu:1",
        }[self.kind]

    def check(self, value: object, *, source: str) -> Value:
        """Return `value` in the key's type; `source` names the file or variable in the error."""
        if self.kind in ("int", "float"):
            return self._number(value, source)
        if self.kind == "bool" and isinstance(value, bool):
            return value
        if self.kind == "choice" and isinstance(value, str) and value.lower() in self.choices:
            return value.lower()
        if self.kind in ("text", "file") and isinstance(value, str) and "\0" not in value:
            return self._file(value, source) if self.kind == "file" else value
        if self.kind == "host" and isinstance(value, str) and _is_host(value):
            return value
        if self.kind == "device" and isinstance(value, str) and DEVICE.fullmatch(value.lower()):
            return value.lower()
        raise self._fault(value, source)

    def parse(self, text: str, *, source: str) -> Value:
        """Return the value that `text` (a command-line word or an environment variable) spells."""
        word = text.strip()
        if self.kind == "bool":
            return env.parse_bool(word, what=f"{source}: {self.name}")
        if self.kind in ("int", "float") and word.lower() != AUTO:
            try:
                return self.check(int(word) if self.kind == "int" else float(word), source=source)
            except ValueError:
                raise self._fault(text, source) from None
        return self.check(text if self.kind == "text" else word, source=source)

    def stored(self, value: Value) -> float | int | bool | str:
        """Return `value` as it is written to a TOML file, which has no null."""
        return AUTO if value is None else value

    def _number(self, value: object, source: str) -> Value:
        if self.default is None and isinstance(value, str) and value.lower() == AUTO:
            return None
        allowed = int if self.kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise self._fault(value, source)
        above = value > self.low if self.low_open else value >= self.low
        if not (above and value <= self.high):
            raise self._fault(value, source)
        return float(value) if self.kind == "float" else value

    def _file(self, value: str, source: str) -> str:
        if not value:
            return value
        path = env.absolute(value, what=f"{source}: {self.name}")
        if not path.is_file():
            raise ValidationError(f"{source}: {self.name}: no file at {path}")
        return str(path)

    def _fault(self, value: object, source: str) -> ValidationError:
        return ValidationError(f"{source}: {self.name}: {value!r} is not allowed", hint=f"use {self.rule}")


KEYS: tuple[Key, ...] = (
    Key("generation.temperature", "temperature", "float", 0.3,
        "Randomness of the draw; 0 takes the most likely token.", "HIPFIRE_TEMPERATURE", 0, 2),
    Key("generation.top_p", "top_p", "float", 0.8,
        "Keep the smallest set of tokens with this probability.", "HIPFIRE_TOP_P", 0, 1, low_open=True),
    Key("generation.top_k", "top_k", "int", 20,
        "Keep this many of the most likely tokens.", "HIPFIRE_TOP_K", 1, 100_000),
    Key("generation.min_p", "min_p", "float", 0.0,
        "Drop tokens below this share of the best token's probability.", "HIPFIRE_MIN_P", 0, 1),
    Key("generation.presence_penalty", "presence_penalty", "float", 0.0,
        "Subtracted once from the score of tokens seen before.", "HIPFIRE_PRESENCE_PENALTY", 0, 2),
    Key("generation.frequency_penalty", "frequency_penalty", "float", 0.0,
        "Subtracted from a token's score for each time it was seen.", "HIPFIRE_FREQUENCY_PENALTY", 0, 2),
    Key("generation.repeat_penalty", "repeat_penalty", "float", 1.05,
        "Divides the score of tokens seen before.", "HIPFIRE_REPEAT_PENALTY", 1, 3),
    Key("generation.max_tokens", "max_tokens", "int", 4096,
        "Longest reply, in tokens.", "HIPFIRE_MAX_TOKENS", 1, 393_216),
    Key("memory.max_seq", "max_seq", "int", None,
        "Context length, in tokens; auto is the model's own, at most 32768.", "HIPFIRE_MAX_SEQ",
        512, 1_048_576),
    Key("memory.kv_cache", "kv_cache", "choice", AUTO,
        "How keys and values are stored.", "HIPFIRE_KV_MODE", choices=(AUTO, "q8", "bf16", "f32")),
    Key("memory.weights", "weights", "choice", AUTO,
        "How weights are held: panels (fast, int8 products), decoded (float32), packed (small).",
        "HIPFIRE_WEIGHTS", choices=(AUTO, "panels", "decoded", "packed")),
    Key("memory.kv_backend", "kv_backend", "choice", AUTO,
        "How a GPU gets memory for keys and values: vmm as sequences grow, legacy all at once.",
        "HIPFIRE_KV_BACKEND", choices=(AUTO, "vmm", "legacy")),
    Key("memory.state_budget", "state_budget", "int", 2048,
        "Most MiB of kept states from which models with recurrent layers take up a conversation; 0 is none.",
        "HIPFIRE_STATE_BUDGET", 0, 1 << 20, scope="process"),
    Key("memory.state_interval", "state_interval", "int", 4096,
        "Tokens of a prompt after which such a state is kept, besides the ends of messages; 0 is never.",
        "HIPFIRE_STATE_INTERVAL", 0, 1 << 20, scope="process"),
    Key("prompt.system", "system_prompt", "text", "",
        "System message of a conversation that has none.", "HIPFIRE_SYSTEM_PROMPT"),
    Key("prompt.chat_template", "chat_template", "file", "",
        "Jinja chat template that replaces the model's own.", "HIPFIRE_CHAT_TEMPLATE_FILE"),
    Key("prompt.normalize", "prompt_normalize", "bool", True,
        "Tidy a prompt: plain line ends and spaces, no trailing spaces, no tall gaps.",
        "HIPFIRE_NORMALIZE_PROMPT"),
    Key("hardware.device", "device", "device", AUTO,
        "What computes; auto is the first GPU that can be used, else the CPU.", "HIPFIRE_DEVICE",
        scope="process"),
    Key("hardware.tp", "tp", "int", 1,
        "Devices that share a model, each with a part of every matrix.", "HIPFIRE_TP", 1, 64,
        scope="process"),
    Key("hardware.activations", "activations", "choice", "int8",
        "On a GPU, decode steps of one or two sequences round activations to int8, unless float is chosen.",
        "HIPFIRE_ACTIVATIONS", choices=("int8", "float"), scope="process"),
    Key("hardware.threads", "threads", "int", None,
        "CPU threads; auto takes the fast physical cores that it may use.", "HIPFIRE_THREADS", 1, 4096,
        scope="process"),
    Key("reasoning.mode", "thinking", "choice", AUTO,
        "Whether the model thinks before it answers; auto leaves it to the model.", "HIPFIRE_THINKING",
        choices=(AUTO, "on", "off")),
    Key("reasoning.effort", "reasoning_effort", "choice", AUTO,
        "How hard the model is told to think; none switches thinking off.", "HIPFIRE_REASONING_EFFORT",
        choices=(AUTO, "none", "low", "medium", "high", "xhigh", "max")),
    Key("reasoning.budget", "thinking_budget", "choice", AUTO,
        "Most tokens of one span of thinking: low 512, med 2048, high 8192, xhigh 24576, max 32768.",
        "HIPFIRE_THINKING_BUDGET", choices=(AUTO, "low", "med", "high", "xhigh", "max", "uncapped")),
    Key("reasoning.max_tokens", "max_think_tokens", "int", None,
        "The same as a number, which wins over the name; 0 is no bound.", "HIPFIRE_MAX_THINK_TOKENS",
        0, 393_216),
    Key("serve.host", "host", "host", "127.0.0.1",
        "Address that the server listens on.", "HIPFIRE_HOST", scope="process"),
    Key("serve.port", "port", "int", 11435,
        "Port that the server listens on.", "HIPFIRE_PORT", 1, 65_535, scope="process"),
    Key("serve.default_model", "default_model", "text", "",
        "Model to serve and to chat with when none is named.", "HIPFIRE_MODEL", scope="process"),
    Key("serve.idle_timeout_seconds", "idle_timeout", "int", 300,
        "Seconds without a request after which the model leaves memory; 0 is never.",
        "HIPFIRE_IDLE_TIMEOUT", 0, 86_400, scope="process"),
    Key("serve.max_request_bytes", "max_request_bytes", "int", 64 << 20,
        "Largest request body, in bytes.", "HIPFIRE_MAX_REQUEST_BYTES", 4096, 4 << 30, scope="process"),
    Key("serve.max_queue", "max_queue", "int", 64,
        "Most requests that wait; 0 is no limit.", "HIPFIRE_SERVE_MAX_QUEUE", 0, 1_000_000, scope="process"),
    Key("serve.queue_timeout_ms", "queue_timeout_ms", "int", 600_000,
        "Milliseconds that a request waits at most; 0 is no limit.", "HIPFIRE_SERVE_QUEUE_TIMEOUT_MS",
        0, 86_400_000, scope="process"),
    Key("serve.slots", "slots", "int", 4,
        "Requests of one model that run at once; each has a cache of its own.", "HIPFIRE_SERVE_SLOTS",
        1, 64, scope="process"),
    Key("serve.prefill_chunk", "prefill_chunk", "int", None,
        "Tokens of a prompt that are read before other requests get their next token; auto is 512 on the "
        "CPU, 2048 on a GPU.",
        "HIPFIRE_SERVE_PREFILL_CHUNK", 16, 8192, scope="process"),
    Key("serve.token_file", "token_file", "file", "",
        "File with the bearer token that requests must carry; clients of this machine read it too.",
        "HIPFIRE_SERVE_TOKEN_FILE", scope="process"),
    Key("serve.allow_origins", "allow_origins", "text", "",
        "Web origins besides those of this machine whose pages may use the server, with commas between.",
        "HIPFIRE_SERVE_ALLOW_ORIGINS", scope="process"),
    Key("serve.allow_request_paths", "allow_request_paths", "bool", False,
        "Let a request name any model file by its path.", "HIPFIRE_SERVE_ALLOW_REQUEST_PATHS",
        scope="process"),
    Key("serve.local", "local", "bool", False,
        "Run a prompt in the command's own process although a server is up.", "HIPFIRE_LOCAL",
        scope="process"),
)  # fmt: skip

BY_NAME: Mapping[str, Key] = MappingProxyType(
    {key.name: key for key in KEYS} | {key.flat: key for key in KEYS}
)


def find_key(name: str) -> Key | None:
    """Return the key with this dotted or flat name, or None."""
    return BY_NAME.get(name.strip().lower())


def _is_host(text: str) -> bool:
    return 0 < len(text) <= MAX_HOST_CHARS and text.isprintable() and not any(map(str.isspace, text))
