"""A contest of two servers as tables, for a terminal and for a page. This file measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hipfire.bench.summary import Summary, summarize
from peers.report import OWN, PEER, Table
from peers.serve_measure import Contest, Figures

# what the design asks of this server: chats at once against one by one, and the wait of a short request
# against the time of one chunk
GAIN_GOAL, WAIT_GOAL = 2.5, 1.5
# a round's figures of the first table: name, what it is, digits, whether more is better
ROWS = (
    ("serial_s", "{chats} chats one by one: seconds", 2, False),
    ("serial_tok_s", "{chats} chats one by one: tokens/s", 1, True),
    ("together_s", "{chats} chats at once: seconds", 2, False),
    ("together_tok_s", "{chats} chats at once: tokens/s", 1, True),
    ("together_ttft_ms", "{chats} chats at once: ms to the first token", 1, False),
    ("ttft_ms", "one request alone: ms to the first token", 1, False),
    ("decode_tok_s", "one request alone: tokens/s after it", 1, True),
    ("long_s", "a prompt of {long} tokens alone: seconds to the first token", 2, False),
)


@dataclass(frozen=True, slots=True)
class ServeRun:
    """A contest, and facts about the machine and the programs."""

    facts: Mapping[str, str]
    contest: Contest

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        goals = {name: {"figure": figure, "met": met} for name, figure, _, met in goals_of(self.contest)}
        return {"facts": dict(self.facts), "goals": goals, **self.contest.to_json()}


def as_text(run: ServeRun) -> str:
    """Return a run for a terminal."""
    facts = "\n".join(f"{name}: {value}" for name, value in run.facts.items())
    return "\n\n".join([facts, *(table.text() for table in tables(run.contest))])


def as_markdown(run: ServeRun) -> str:
    """Return a run for a page."""
    facts = "\n".join(f"- {name}: {value}" for name, value in run.facts.items())
    return "\n\n".join([facts, *(table.markdown() for table in tables(run.contest))])


def tables(contest: Contest) -> list[Table]:
    """Return every table of a contest."""
    return [_speed(contest), _waits(contest), _goals(contest)]


def gain(figures: Figures) -> list[float]:
    """Return, for every round, how many times more tokens per second chats at once make than one by one."""
    samples = figures.samples
    pairs = zip(samples["together_tok_s"], samples["serial_tok_s"], strict=True)
    return [together / serial for together, serial in pairs]


def wait(figures: Figures) -> float:
    """Return the short request's time to the first token as a multiple of a chunk's time, by medians."""
    return _median(figures, "beside_ms") / _median(figures, "chunk_ms")


def goals_of(contest: Contest) -> list[tuple[str, float, str, bool]]:
    """Return (goal, figure, what was asked, whether it is met) of hipfire."""
    gained, waited = statistics.median(gain(contest.own)), wait(contest.own)
    chats = contest.plan.chats
    return [
        (
            f"{chats} chats at once, against one by one",
            gained,
            f"at least {GAIN_GOAL} times the tokens/s",
            gained >= GAIN_GOAL,
        ),
        (
            "first token of a short request beside a long prompt",
            waited,
            f"at most {WAIT_GOAL} times a chunk",
            waited <= WAIT_GOAL,
        ),
    ]


def warnings(contest: Contest, least_rounds: int, most_disturbance: float) -> Sequence[str]:
    """Return what makes a run unfit to be quoted."""
    found = []
    if contest.plan.rounds < least_rounds:
        found.append(f"fewer than {least_rounds} rounds: the figures are a first impression")
    wall = sum(use.wall for use in contest.uses)
    disturbed = sum((use.others or 0.0) + (use.waiting or 0.0) for use in contest.uses)
    if wall and disturbed / wall > most_disturbance:
        found.append(f"others used {disturbed / wall:.0%} of a core meanwhile: repeat it on an idle machine")
    for figures in (contest.peer, contest.own):
        if figures.missed:
            found.append(
                f"{figures.missed} short requests came when {figures.side.name} had read the long prompt"
            )
    return found


def _speed(contest: Contest) -> Table:
    own, peer, plan = contest.own, contest.peer, contest.plan
    rows: list[tuple[str, ...]] = [
        _row(label.format(chats=plan.chats, long=f"{plan.long:,}"), digits, own, peer, name, more=more)
        for name, label, digits, more in ROWS
    ]
    mine, theirs = gain(own), gain(peer)
    label = f"{plan.chats} chats at once, against one by one: tokens/s"
    rows.insert(4, (label, _spread(summarize(theirs), 2), _spread(summarize(mine), 2), "-", "-"))
    header = ("Test", PEER, OWN, "Ratio of medians", "Median ratio of rounds")
    remark = (
        f"Medians with minimum and maximum of {plan.rounds} rounds; at most {plan.tokens} tokens a reply."
        f" Ratios above 1 are in favour of {OWN}."
    )
    return Table("Chats", header, tuple(rows), tuple(filter(None, [remark, _disturbance(contest)])))


def _row(label: str, digits: int, own: Figures, peer: Figures, name: str, *, more: bool) -> tuple[str, ...]:
    mine, theirs = own.samples[name], peer.samples[name]
    ratio = statistics.median(mine) / statistics.median(theirs)
    ratios = statistics.median(ours / other for ours, other in zip(mine, theirs, strict=True))
    shown = (f"{each if more else 1 / each:.2f}" for each in (ratio, ratios))
    return (label, _spread(summarize(theirs), digits), _spread(summarize(mine), digits), *shown)


def _waits(contest: Contest) -> Table:
    rows = []
    for figures in (contest.peer, contest.own):
        cells = (
            _spread(summarize(figures.samples[name]), 0)
            for name in ("ttft_ms", "beside_ms", "chunk_ms", "chunk_wall_ms")
        )
        rows.append((figures.side.name, *cells, f"{wait(figures):.2f}", f"{_later(contest, figures):.2f}"))
    header = (
        *("Server", "Alone", "Beside the long prompt", "A chunk", "A chunk as a request"),
        *("Beside / chunk", "Beside / mean chunk of the long prompt"),
    )
    remark = f"A chunk has {contest.plan.chunk} tokens here; {_probes(contest)}."
    title = f"First token of a short request beside a prompt of {contest.plan.long:,} tokens, in milliseconds"
    return Table(title, header, tuple(rows), (remark,))


def _probes(contest: Contest) -> str:
    counts = [len(figures.samples["beside_ms"]) for figures in (contest.peer, contest.own)]
    return f"medians with minimum and maximum of {counts[0]} and {counts[1]} short requests"


def _later(contest: Contest, figures: Figures) -> float:
    """Return the wait as a multiple of the long prompt's own chunks, which grow with what was read before."""
    chunks = contest.plan.long / contest.plan.chunk
    return _median(figures, "beside_ms") / (1000 * _median(figures, "long_s") / chunks)


def _goals(contest: Contest) -> Table:
    rows = tuple(
        (name, f"{figure:.2f}", asked, "met" if met else "not met")
        for name, figure, asked, met in goals_of(contest)
    )
    return Table(f"Goals of {OWN}", ("Figure", "Measured", "Goal", ""), rows)


def _disturbance(contest: Contest) -> str:
    """Return how much of a core others took meanwhile; empty if this system does not tell."""
    uses = contest.uses
    others = [use.others for use in uses if use.others is not None]
    waiting = [use.waiting for use in uses if use.waiting is not None]
    client = [use.client for use in uses if use.client is not None]
    if not uses or min(len(others), len(waiting), len(client)) < len(uses):
        return ""
    shares = (sum(each) / sum(use.wall for use in uses) for each in (waiting, client, others))
    idle, asking, rest = (f"{share:.1%}" for share in shares)
    return (
        f"While one server was measured, the waiting one used {idle} of a core, the client {asking}, and all"
        f" other programs {rest}."
    )


def _median(figures: Figures, name: str) -> float:
    return statistics.median(figures.samples[name])


def _spread(summary: Summary, digits: int) -> str:
    return f"{summary.median:.{digits}f} [{summary.low:.{digits}f}-{summary.high:.{digits}f}]"
