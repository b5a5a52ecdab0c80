"""What a load run must prove, from what was recorded: pure functions of outcomes and figures.

Nothing is proven by silence: where too little happened to say something, a proof is "unproven". This file
asks nobody.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hipfire.validate.harness_proofs import Proof, judged
from hipfire.validate.load_client import Outcome
from hipfire.validate.load_processes import Holdings
from hipfire.validate.load_requests import KINDS, RETRY_CODES, Request
from hipfire.validate.load_storm import Kill

# of the requests that want all of their answer, so many must get it although the engine dies
LEAST_ANSWERED: Final = 0.5
# how much more than at its start a process may hold after the load
MEMORY_SHARE: Final = 0.1
MEMORY_FLOOR: Final = 32 << 20
MORE_FILES: Final = 2
MORE_THREADS: Final = 4
SHOWN: Final = 3
_BAD_LOG: Final = re.compile(
    r"Traceback \(most recent call last\)|Fatal Python error|MemoryError|InternalError|internal error"
    r"|error: turn \S+ failed|a request failed|did not end turn|out of order|cannot be delivered"
)


@dataclass(frozen=True, slots=True)
class Quiet:
    """What an idle server tells: its /stats, its /health and its /metrics; None where it did not answer."""

    stats: Mapping[str, Any] | None
    health: Mapping[str, Any] | None
    metrics: Mapping[str, float] | None


def fault_of(outcome: Outcome) -> str:
    """Return why a request did not end as its kind may, or ""."""
    kind = KINDS[outcome.kind]
    if outcome.end not in kind.ends:
        told = f" with {outcome.status} {outcome.code}" if outcome.status else ""
        return f"{outcome.end}{told}: {outcome.detail}".rstrip(": ")
    # a refusal that takes longer than a stream's head may is told in the stream
    if outcome.end == "refused" and (outcome.code != kind.code or outcome.status not in (kind.status, 200)):
        return f"refused with {outcome.status} {outcome.code}, not {kind.status} {kind.code}"
    if outcome.end == "unavailable":
        if outcome.code not in RETRY_CODES:
            return f"unavailable as {outcome.code}: {outcome.detail}"
        if outcome.status == 503 and not outcome.retry_after:
            return "status 503 without Retry-After"
    return ""


def request_proofs(
    requests: Sequence[Request], outcomes: Sequence[Outcome], texts: Mapping[str, Sequence[str]]
) -> Iterator[Proof]:
    """Yield what the outcomes show. `texts` are those that each question gives when it is asked alone."""
    faults = [(each, fault) for each in outcomes if (fault := fault_of(each))]
    told = [f"request {each.number} ({each.kind}): {fault}" for each, fault in faults]
    yield judged(
        "one_end",
        not told and len(outcomes) == len(requests),
        _first(told) or f"{len(outcomes)} of {len(requests)} requests had exactly one end of their kind",
    )
    hung = [f"request {each.number} ({each.kind})" for each in outcomes if each.hung]
    yield judged("no_hang", not hung, _first(hung) or "each request ended within its time")
    missing = [name for name in KINDS if name not in {each.kind for each in outcomes}]
    evidence = f"not sent: {', '.join(missing)}" if missing else f"all {len(KINDS)} kinds were sent"
    yield Proof("kinds", "unproven" if missing else "ok", evidence)
    whole = [each for each in outcomes if KINDS[each.kind].whole]
    answered = sum(each.end == "answered" for each in whole)
    yield judged(
        "answered",
        bool(whole) and answered >= LEAST_ANSWERED * len(whole),
        f"{answered} of {len(whole)} requests that want all of their answer got it",
    )
    yield _same_under_load(requests, outcomes, texts)


def kill_proof(kills: Sequence[Kill], planned: int, engine_after: int | None) -> Proof:
    """Return whether the engine was killed as planned and another one runs now."""
    told = "; ".join(f"process {kill.pid} after {kill.after_requests} requests" for kill in kills)
    if len(kills) < planned:
        return Proof("kills", "unproven", f"{len(kills)} of {planned} kills: {told}")
    good = engine_after is not None and engine_after not in {kill.pid for kill in kills}
    return judged("kills", good, f"{told or 'none'}; the engine is now process {engine_after}")


def same_proof(name: str, before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> Proof:
    """Return whether every question gives the same texts again."""
    different = [question for question, texts in before.items() if after.get(question) != texts]
    evidence = _first(different) or f"{len(before)} questions give the same bytes again"
    return judged(name, bool(before) and not different, evidence)


def idle_proof(quiet: Quiet) -> Proof:
    """Return whether nothing runs or waits, and the server would work on a request."""
    stats, health, metrics = quiet.stats, quiet.health, quiet.metrics
    if stats is None or health is None or metrics is None:
        return judged("idle", False, "the server does not tell how it is")
    values = {
        "running": stats.get("running"),
        "queue_depth": stats.get("queue_depth"),
        "turns_running": metrics.get("hipfire_turns_running"),
    }
    told = ", ".join(f"{name} {value}" for name, value in values.items())
    well = health.get("status") == "ok" and health.get("ready") is True
    return judged("idle", well and all(value == 0 for value in values.values()), f"{told}, ready {well}")


def books_proof(quiet: Quiet) -> Proof:
    """Return whether every turn that was asked for is counted with one end: served, failed or aborted."""
    if quiet.stats is None or quiet.metrics is None:
        return Proof("books", "unproven", "the server does not tell its counts")
    asked = quiet.metrics.get("hipfire_requests_total")
    ends = {
        "served": quiet.stats.get("requests_served"),
        "failed": quiet.metrics.get("hipfire_requests_failed_total"),
        "aborted": quiet.metrics.get("hipfire_requests_aborted_total"),
    }
    if asked is None or None in ends.values():
        return Proof("books", "unproven", "the server does not tell all counts")
    told = " + ".join(f"{value:g} {name}" for name, value in ends.items() if value is not None)
    return judged("books", sum(filter(None, ends.values())) == asked, f"{asked:g} turns asked for, {told}")


def slots_proof(outcomes: Sequence[Outcome], slots: int) -> Proof:
    """Return whether all slots can still be used at once, by the turns that shared a step."""
    batch = max((each.batch for each in outcomes), default=0)
    return judged("slots", batch == slots, f"{batch} of {slots} turns shared a step")


def holdings_proofs(name: str, before: Holdings | None, after: Holdings | None) -> Iterator[Proof]:
    """Yield whether a process holds no more memory, files and threads than at its start."""
    if before is None or after is None:
        for what in ("memory", "files", "threads"):
            yield Proof(f"{name}_{what}", "unproven", "the system does not tell")
        return
    room = max(MEMORY_FLOOR, int(before.resident * MEMORY_SHARE))
    yield judged(
        f"{name}_memory",
        after.resident <= before.resident + room,
        f"{_mib(before.resident)} before, {_mib(after.resident)} after, tolerance {_mib(room)}",
    )
    for what, old, new, more in (
        ("files", before.files, after.files, MORE_FILES),
        ("threads", before.threads, after.threads, MORE_THREADS),
    ):
        yield judged(f"{name}_{what}", new <= old + more, f"{old} before, {new} after, tolerance {more}")


def log_proof(text: str) -> Proof:
    """Return whether the server's log tells of no fault; an engine that was killed is none."""
    bad = next((line for line in text.splitlines() if _BAD_LOG.search(line)), None)
    if not text:
        return Proof("log", "unproven", "the log is empty")
    return judged("log", bad is None, bad or "no fault in the log")


def parse_metrics(text: str) -> dict[str, float]:
    """Return the plain values of Prometheus' text."""
    values = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if not line.startswith("#") and "{" not in name:
            try:
                values[name] = float(value)
            except ValueError:
                continue
    return values


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many requests of each kind ended how, and the errors that were told, by code and message."""
    errors = Counter(
        f"{each.status} {each.code}: {each.detail[:80]}" for each in outcomes if each.end == "unavailable"
    )
    kinds: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    for each in outcomes:
        kinds[each.kind][each.end] += 1
    return {
        "requests": len(outcomes),
        "ends": dict(Counter(each.end for each in outcomes)),
        "kinds": {name: dict(counts) for name, counts in kinds.items()},
        "unavailable": dict(errors.most_common()),
        "longest_s": round(max((each.wall_s for each in outcomes), default=0.0), 3),
    }


def _same_under_load(
    requests: Sequence[Request], outcomes: Sequence[Outcome], texts: Mapping[str, Sequence[str]]
) -> Proof:
    """Return whether answers under load are those given alone; one that broke off, their beginning."""
    faults, equal, begun = [], 0, 0
    for request, outcome in zip(requests, outcomes, strict=False):
        if not request.question or not outcome.texts:
            continue
        alone = texts.get(request.question)
        if outcome.end == "answered":
            good = alone == outcome.texts
            equal += good
        else:
            good = alone is not None and all(map(str.startswith, alone, outcome.texts))
            begun += good
        if not good:
            faults.append(f"request {request.number} ({request.question}): {outcome.texts!r} not {alone!r}")
    evidence = _first(faults) or f"{equal} answers are those of a quiet server, {begun} broke off within them"
    return judged("same_under_load", equal > 0 and not faults, evidence)


def _first(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
