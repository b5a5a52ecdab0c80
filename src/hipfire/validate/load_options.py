"""The flags of the load run, checked. This file starts nothing."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from hipfire.validate.harness_options import UsageError
from hipfire.validate.load_requests import KINDS

DEFAULT_PORT: Final = 11530
# the server gives an engine up that dies five times within a minute
MOST_KILLS: Final = 4
CLIENTS, REQUESTS, KILLS, SLOTS = 32, 600, 3, 4
REQUEST_TIMEOUT_S: Final = 120.0
WARM_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to run: `clients` at once, `requests` in total, `kills` of the engine, drawn from `seed`.

    Times are in seconds. UsageError for values that make no load.
    """

    model: str
    clients: int = CLIENTS
    requests: int = REQUESTS
    kills: int = KILLS
    seed: int = 0
    slots: int = SLOTS
    threads: int | None = None
    port: int = DEFAULT_PORT
    request_timeout_secs: float = REQUEST_TIMEOUT_S
    serve_warm_timeout_secs: float = WARM_TIMEOUT_S
    serve_log: Path | None = None
    server_command: tuple[str, ...] | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("--clients", self.clients, 1, 256),
            ("--requests", self.requests, len(KINDS), 100_000),
            ("--kills", self.kills, 0, MOST_KILLS),
            ("--seed", self.seed, 0, 2**63 - 1),
            ("--slots", self.slots, 1, 64),
            ("--threads", self.threads, 1, 4096),
            ("--port", self.port, 1, 65535),
            ("--request-timeout-secs", self.request_timeout_secs, 0.1, 86_400),
            ("--serve-warm-timeout-secs", self.serve_warm_timeout_secs, 0.1, 86_400),
        ):
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value:g} but must be from {low:g} to {high:g}")

    @property
    def max_queue(self) -> int:
        """Return how many turns may wait: so many that the queue is full now and then, but not often."""
        return self.clients + self.clients // 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="--help lists the flags")


def parse(words: Sequence[str]) -> LoadOptions:
    """Return the flags; UsageError for wrong ones."""
    parser = _Parser(
        prog="serve_load.py",
        allow_abbrev=False,
        description="Load a real server with clients that come, go and err, and kill its engine meanwhile.",
        epilog="exit codes: 0 pass, 1 fail, 2 refused, 3 incomplete, 130 interrupted",
    )
    add = parser.add_argument
    add("--model", required=True, help="path, tag or installed name of the model")
    add("--clients", type=int, default=CLIENTS, help=f"clients at once; {CLIENTS}")
    add("--requests", type=int, default=REQUESTS, help=f"requests in total; {REQUESTS}")
    add("--kills", type=int, default=KILLS, help=f"how often the engine is killed; {KILLS}")
    add("--seed", type=int, default=0, help="what is drawn: requests, patience, moments of kills; 0")
    add("--slots", type=int, default=SLOTS, help=f"turns that the server runs at once; {SLOTS}")
    add("--threads", type=int, help="CPU threads of the server")
    add("--port", type=int, default=DEFAULT_PORT, help=f"port on 127.0.0.1; {DEFAULT_PORT}")
    add(
        "--request-timeout-secs",
        type=float,
        default=REQUEST_TIMEOUT_S,
        help="after this a request hangs; 120",
    )
    add("--serve-warm-timeout-secs", type=float, default=WARM_TIMEOUT_S, help="wait for the model; 180")
    add("--serve-log", type=Path, metavar="FILE", help="where the server's log is appended")
    add("--server-command", metavar="WORDS", help="what to start instead of `python -m hipfire.cli`")
    add("--out", type=Path, metavar="FILE", help="where the report is written, in JSON")
    given = vars(parser.parse_args(list(words)))
    given["server_command"] = _command(given["server_command"])
    return LoadOptions(**given)


def _command(text: str | None) -> tuple[str, ...] | None:
    try:
        words = None if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--server-command: {error}") from error
    if words == ():
        raise UsageError("--server-command is empty", hint="leave it out for the usual server")
    return words
