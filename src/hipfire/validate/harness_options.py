"""The flags of the serve harness, as they were given; those that this version cannot honour are refused.

This file does not know defaults that depend on the model (harness_resolve.py) and starts nothing.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

from hipfire.base.errors import UnsupportedError, ValidationError

Mode = Literal["battery", "chain", "session"]
MODES: Final = ("battery", "chain", "session")
# caps of a thinking span in tokens; "off" needs none, and 0 is no cap
THINKING_CAPS: Final = {
    "low": 512,
    "med": 2048,
    "high": 8192,
    "xhigh": 24576,
    "max": 32768,
    "uncapped": 0,
}
EFFORTS: Final = ("none", "low", "medium", "high", "xhigh", "max")
KV_MODES: Final = ("auto", "q8", "bf16", "f32")
FEEDBACK: Final = ("rich", "plain")
FATAL: Final = ("empty", "attractor", "runaway")
DEFAULT_PORT: Final = 11520

# flags of the original's harness whose subject does not exist here: the values that change nothing
_ONLY: Final = {
    "--kv-backend": ("contiguous",),
    "--dflash": ("off",),
    "--mtp": ("off",),
    "--ngram": ("off",),
    "--speculation": ("off",),
}
_ABSENT: Final = ("--draft", "--replay-route-proof-log", "--assert-glimmer-cache-trace")
_ABSENT_PREFIX: Final = "--mtp-ngram"


class UsageError(ValidationError):
    """The words on the command line cannot be understood."""


@dataclass(frozen=True, slots=True)
class HarnessOptions:
    """Flags as given; None where a flag was left out."""

    model: str | None = None
    tag: str | None = None
    registry: Path | None = None
    mode: Mode = "battery"
    thinking: str | None = None
    thinking_effort: str | None = None
    sampling: str = "registry"
    kv: str | None = None
    max_seq: int | None = None
    max_tokens: int | None = None
    threads: int | None = None
    prompt_file: Path | None = None
    prompts_file: Path | None = None
    niah_file: Path | None = None
    session: Path | None = None
    seed: int | None = None
    port: int = DEFAULT_PORT
    home: Path | None = None
    serve_log: Path | None = None
    serve_warm_timeout_secs: float = 180.0
    request_timeout_secs: float = 1800.0
    spawn: bool = True
    cold: bool = False
    server_command: tuple[str, ...] | None = None
    show_config: bool = False
    out: Path | None = None
    self_test: bool = False
    compare_transcript: Path | None = None
    feedback_shape: str = "rich"
    fail_on: tuple[str, ...] = ("empty", "attractor")

    def __post_init__(self) -> None:
        if self.model is None and not self.self_test:
            raise UsageError("--model is required", hint="give the path, tag or name of a model")
        given = [self.prompt_file, self.prompts_file, self.niah_file, self.session]
        if sum(path is not None for path in given) > 1:
            raise UsageError("--prompt-file, --prompts-file, --niah-file and --session exclude each other")
        if (self.session is not None) != (self.mode == "session"):
            raise UsageError("--mode session and --session FILE belong together")
        if self.cold and not self.spawn:
            raise UsageError("--cold starts a server for every turn, which --no-spawn forbids")
        for name, value, low, high in (
            ("--port", self.port, 1, 65535),
            ("--max-seq", self.max_seq, 512, 1_048_576),
            ("--max-tokens", self.max_tokens, 1, 393_216),
            ("--threads", self.threads, 1, 4096),
            ("--seed", self.seed, 0, 2**64 - 1),
        ):
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value} but must be from {low} to {high}")
        for name, seconds in (
            ("--serve-warm-timeout-secs", self.serve_warm_timeout_secs),
            ("--request-timeout-secs", self.request_timeout_secs),
        ):
            if not 0 < seconds <= 86_400:
                raise UsageError(f"{name} is {seconds:g} but must be above 0 and at most 86400")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="--help lists the flags")


def parse(words: Sequence[str]) -> HarnessOptions:
    """Return the flags; UsageError for wrong ones, UnsupportedError for those that nothing here honours."""
    for word in words:
        flag = word.partition("=")[0]
        if flag in _ABSENT or flag.startswith(_ABSENT_PREFIX):
            raise UnsupportedError(f"{flag} is not available in this version", hint="leave it out")
    given = vars(_parser().parse_args(list(words)))
    for flag, allowed in _ONLY.items():
        value = given.pop(flag[2:].replace("-", "_"))
        if value is not None and value not in allowed:
            raise UnsupportedError(
                f"{flag} {value} is not available in this version", hint=f"use {allowed[0]} or leave it out"
            )
    given["fail_on"] = _words(given["fail_on"])
    given["server_command"] = _command(given["server_command"])
    return HarnessOptions(**given)


def _words(text: str) -> tuple[str, ...]:
    """Return the flags that are fatal; "none" is an empty list."""
    names = tuple(name for name in text.split(",") if name and name != "none")
    unknown = [name for name in names if name not in FATAL]
    if unknown:
        raise UsageError(f"--fail-on: {unknown[0]!r} is not known", hint="use " + ", ".join((*FATAL, "none")))
    return names


def _command(text: str | None) -> tuple[str, ...] | None:
    """Return the words of a command as a shell would split them."""
    try:
        words = None if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--server-command: {error}") from error
    if words == ():
        raise UsageError("--server-command is empty", hint="leave it out for the usual server")
    return words


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="serve_harness.py",
        allow_abbrev=False,
        description="Drive a real server as a client does, and report what it answered.",
        epilog="exit codes: 0 pass, 1 fail, 2 refused, 3 incomplete, 130 interrupted",
    )
    _add_model_flags(parser)
    _add_prompt_flags(parser)
    _add_run_flags(parser)
    for flag, allowed in _ONLY.items():
        parser.add_argument(flag, help=f"only {' or '.join(allowed)} in this version")
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="path, tag or installed name of the model")
    add("--tag", help="registry tag whose settings apply; else the tag of the model's file")
    add("--registry", type=Path, metavar="FILE", help="registry to use instead of the usual one")
    add("--thinking", choices=("off", *THINKING_CAPS), help="thinking off, or its cap in tokens by name")
    add("--thinking-effort", choices=EFFORTS, help="how hard to think, told to the template")
    add("--sampling", default="registry", help="registry[:PROFILE], greedy, recipe:NAME or json:{...}")
    add("--kv", choices=KV_MODES, help="cache of keys and values")
    add("--max-seq", type=int, help="context length in tokens; else the server's choice")
    add("--max-tokens", type=int, help="longest reply in tokens; 2048")
    add("--threads", type=int, help="CPU threads of the server")
    add("--seed", type=int, help="seed of every request")


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mode", choices=MODES, default="battery", help="conversations of one turn each, or one that grows")
    add("--prompt-file", type=Path, metavar="FILE", help="one prompt, its bytes as they are")
    add("--prompts-file", type=Path, metavar="FILE", help="JSON list of {genre, prompt, expect}")
    add("--niah-file", type=Path, metavar="FILE", help="JSON records of needles in haystacks")
    add("--session", type=Path, metavar="FILE", help="turns of --mode session, in JSON")
    add("--feedback-shape", choices=FEEDBACK, default="rich", help="whether reasoning goes back as history")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=int, default=DEFAULT_PORT, help=f"port on 127.0.0.1; {DEFAULT_PORT}")
    add("--home", type=Path, metavar="DIR", help="isolated home; else a temporary one")
    add("--serve-log", type=Path, metavar="FILE", help="where the server's log is appended")
    add("--serve-warm-timeout-secs", type=float, default=180.0, help="longest wait for a model; 180")
    add("--request-timeout-secs", type=float, default=1800.0, help="longest wait for a reply; 1800")
    add("--no-spawn", dest="spawn", action="store_false", help="use the server that runs on the port")
    add("--cold", action="store_true", help="start a fresh server for every turn: nothing is reused")
    add("--server-command", metavar="WORDS", help="what to start instead of `python -m hipfire.cli`")
    add("--show-config", action="store_true", help="print every setting and its source, and stop")
    add("--out", type=Path, metavar="FILE", help="where the report is written, in JSON")
    add("--compare-transcript", type=Path, metavar="FILE", help="report that must have the same answers")
    add("--fail-on", default="empty,attractor", help="which of empty, attractor, runaway fail a run; or none")
    add("--self-test", action="store_true", help="plant faults and see that each is found; needs no model")
