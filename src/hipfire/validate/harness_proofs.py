"""What a run must prove besides its answers: which server gave them, and that requests were honoured.

A proof is "ok", "failed", or "unproven" where nothing can be said; an explicit request that nobody can show
to have been honoured is unproven, however good the answers look. This file starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal

from hipfire.validate.harness_client import get_json
from hipfire.validate.harness_resolve import Resolved
from hipfire.validate.harness_server import HEALTH_TIMEOUT_S, LogSlice, Server
from hipfire.validate.harness_turns import Row

State = Literal["ok", "failed", "unproven"]
# names under which a server may tell what it runs with
_FACTS = {"kv": ("kv_mode", "kv_cache"), "max_seq": ("max_seq",)}


@dataclass(frozen=True, slots=True)
class Proof:
    """A named claim about a run and the evidence for or against it."""

    name: str
    state: State
    evidence: str

    def to_json(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return asdict(self)


def judged(name: str, good: bool, evidence: str) -> Proof:
    """Return a proof that is ok or failed."""
    return Proof(name, "ok" if good else "failed", evidence)


def server_proofs(server: Server, resolved: Resolved) -> Iterator[Proof]:
    """Yield what a warm server shows of itself: whose it is, its model, and settings that were asked for."""
    health, address = server.health, server.plan.address
    if server.process is None:
        yield Proof("own_server", "unproven", "the server was not started here")
    else:
        # `start` returns a server only if its process answers
        yield Proof("own_server", "ok", f"process {health.get('pid')}, attempt {server.attempts}")
    yield judged("loopback", address.host == "127.0.0.1", f"{address.host}:{address.port}")
    yield Proof("model", "ok", f"{health['model']} is {server.plan.model.name}")
    told = [get_json(address, path, HEALTH_TIMEOUT_S) for path in ("/stats", "/health")]
    for name, keys in _FACTS.items():
        setting = resolved.settings[name]
        if setting.value not in (None, "auto"):
            log = server.log.text() if server.log is not None else ""
            yield _honoured(name, setting.value, facts(told, keys) or _logged(log, keys))


def facts(document: object, keys: Sequence[str]) -> list[str]:
    """Return the values of these keys anywhere in a JSON value, as text."""
    if isinstance(document, Mapping):
        own = [str(value) for name, value in document.items() if name in keys and value is not None]
        return own + [fact for value in document.values() for fact in facts(value, keys)]
    if isinstance(document, list):
        return [fact for value in document for fact in facts(value, keys)]
    return []


def log_proof(logs: Sequence[LogSlice]) -> Proof:
    """Return whether the logs of this run's attempts tell of no failure."""
    if not logs:
        return Proof("log", "unproven", "the server was not started here")
    lines = [line for log in logs if (line := log.fatal_line()) is not None]
    return judged("log", not lines, lines[0] if lines else "no failure in this attempt's log")


def reuse_proof(rows: Sequence[Row], *, cold: bool, fresh: bool) -> Proof:
    """Return whether a growing conversation was read from the cache: more with each request, or never.

    `cold`: nothing may be reused. `fresh`: the server had answered nothing before the first request.
    """
    name = "cold" if cold else "prefix_reuse"
    counts = [row["cached"] for row in rows]
    evidence = "cached " + " -> ".join(str(count) for count in counts)
    if any(count is None for count in counts) or not counts:
        return Proof(name, "unproven", evidence)
    if cold:
        return judged(name, not any(counts), evidence)
    grows = all(before < after for before, after in pairwise(counts))
    within = all(row["cached"] < row["ctx"] for row in rows if row["ctx"] is not None)
    return judged(name, grows and within and not (fresh and counts[0]), evidence)


def transcript_proof(rows: Sequence[Row], previous: Sequence[Row]) -> Proof:
    """Return whether two runs are equal, request for request and byte for byte."""
    faults = [] if len(rows) == len(previous) else [f"{len(rows)} requests against {len(previous)}"]
    for number, (row, other) in enumerate(zip(rows, previous, strict=False), 1):
        for name in ("prompt_md5", "request_md5", "finish", "tool_calls", "reasoning_content", "content"):
            if row[name] != other.get(name):
                faults.append(f"request {number}: {_difference(name, row[name], other.get(name))}")
    evidence = "; ".join(faults[:3]) or f"{len(rows)} requests and replies are byte-identical"
    return judged("transcript", not faults, evidence)


def _difference(name: str, ours: object, theirs: object) -> str:
    if not isinstance(ours, str) or not isinstance(theirs, str) or not name.endswith("content"):
        return f"{name} {ours!r} against {theirs!r}"
    same = next(
        (index for index, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two),
        min(len(ours), len(theirs)),
    )
    return (
        f"{name} differs at character {same}: {ours[same : same + 20]!r} against {theirs[same : same + 20]!r}"
    )


def _honoured(name: str, asked: object, found: Sequence[str]) -> Proof:
    if not found:
        return Proof(name, "unproven", f"{asked} was asked for, the server does not tell what it uses")
    # a server may tell of keys and values apart, such as q8/q8
    good = all(set(value.split("/")) == {str(asked)} for value in found)
    return judged(name, good, f"{asked} was asked for, the server uses {', '.join(dict.fromkeys(found))}")


def _logged(log: str, keys: Sequence[str]) -> list[str]:
    names = "|".join(map(re.escape, keys))
    return re.findall(rf"\b(?:{names})[ =:]+['\"]?([\w/]+)", log)
