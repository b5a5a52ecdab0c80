"""What a run of the harness leaves, as the tests look at it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("scripted_server.py")
GOOD = "The water rises because the moon pulls at it."


@dataclass(frozen=True)
class Run:
    """What a run of the harness left: its exit code, its report ({} if none), and what it printed."""

    code: int
    report: dict[str, Any]
    out: str
    err: str

    @property
    def proofs(self) -> dict[str, str]:
        return {proof["name"]: proof["state"] for proof in self.report["proofs"]}

    @property
    def evidence(self) -> dict[str, str]:
        return {proof["name"]: proof["evidence"] for proof in self.report["proofs"]}


Harness = Callable[..., Run]
Script = Callable[..., None]


def one_turn(folder: Path, **fields: Any) -> list[str]:
    """The flags for a single question, whose file is written into `folder`."""
    path = folder / "prompts.json"
    path.write_text(json.dumps([{"prompt": "Why are there tides?", **fields}]))
    return ["--prompts-file", str(path)]


def is_over(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected yet counts as ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"
