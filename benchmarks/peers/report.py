"""A run as tables, for a terminal and for a page of the documentation. This file measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hipfire.bench.summary import Summary
from peers.contest import Arm, Case, Rounds, Series, median_of_ratios, ratio_of_medians
from peers.matches import Match, Profile

PEER = "llama.cpp"
OWN = "hipfire"
MISSING = "-"


@dataclass(frozen=True, slots=True)
class Run:
    """All matches of a run, and facts about the machine and the programs."""

    facts: Mapping[str, str]
    matches: tuple[Match, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {"facts": dict(self.facts), "matches": [match.to_json() for match in self.matches]}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, names of columns, rows of cells, and lines of remarks."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table with aligned columns."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join([self.title, *(line.rstrip() for line in body), *self.remarks])

    def markdown(self) -> str:
        """Return the table under a heading."""
        rows = [self.header, tuple("---" for _ in self.header), *self.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n\n".join([f"### {self.title}", "\n".join(lines), *self.remarks])


def all_tables(run: Run) -> list[Table]:
    """Return every table of a run."""
    return [
        _speed_table(run),
        _files_table(run),
        _batch_table(run),
        *(_step_table(match) for match in run.matches),
        _memory_table(run),
    ]


def as_text(run: Run) -> str:
    """Return a run for a terminal."""
    facts = "\n".join(f"{name}: {value}" for name, value in run.facts.items())
    return "\n\n".join([facts, *(table.text() for table in all_tables(run))])


def as_markdown(run: Run, plot: str) -> str:
    """Return a run for a page; `plot` is the name of the picture beside it."""
    facts = "\n".join(f"- {name}: {value}" for name, value in run.facts.items())
    picture = f"![Tokens per second of {PEER} and {OWN}]({plot})"
    return "\n\n".join([facts, picture, *(table.markdown() for table in all_tables(run))])


def pairs(match: Match) -> Iterator[tuple[Arm, Case, Series, Series]]:
    """Yield (arm, case, its series, the peer's best series) for every case that both sides play."""
    rounds = match.rounds
    for arm in rounds.own:
        for case in rounds.cases:
            own, other = rounds.best(arm, case), rounds.best(rounds.peer, case)
            if own is not None and other is not None:
                yield arm, case, own, other


def spread(summary: Summary) -> str:
    """Return median, minimum and maximum in one cell."""
    return f"{summary.median:.1f} [{summary.low:.1f}-{summary.high:.1f}]"


def _speed_table(run: Run) -> Table:
    rows = []
    for match in run.matches:
        for arm, case, own, other in pairs(match):
            ratios = (f"{ratio(own, other):.2f}" for ratio in (ratio_of_medians, median_of_ratios))
            theirs = (other.arm.format, spread(other.tok_s))
            rows.append(
                (match.title, case.name, *theirs, arm.format, spread(own.tok_s), *ratios, other.way.name)
            )
    return Table(
        "Speed in tokens per second",
        (
            *("Model", "Test", "Peer's file", PEER, "Own file", OWN),
            *("Ratio of medians", "Median ratio of rounds", "Peer's fastest way"),
        ),
        tuple(rows),
        tuple(filter(None, [_samples_remark(run), _disturbance(run)])),
    )


def _files_table(run: Run) -> Table:
    rows = []
    for match in run.matches:
        for arm in match.rounds.arms:
            file = match.files[arm.name]
            held = MISSING if file.memory_bits is None else f"{file.memory_bits:.3f}"
            bits = (f"{file.file_bits:.3f}", f"{file.tensor_bits:.3f}", held)
            rows.append((match.title, arm.name, file.name, f"{file.nbytes / 1e6:.1f}", *bits))
    bits_header = ("Bits per weight: whole file", "Tensors in it", "In memory")
    return Table("Files", ("Model", "Arm", "File", "MB", *bits_header), tuple(rows))


def _batch_table(run: Run) -> Table:
    rows = []
    for match in run.matches:
        rounds = match.rounds
        for many in (case for case in rounds.cases if case.batch > 1):
            one = Case("tg", many.tokens)
            for arm in rounds.own:
                batch, single = rounds.best(arm, many), rounds.best(arm, one)
                if batch is None or single is None:
                    continue
                ratios = (f"{ratio(batch, single):.2f}" for ratio in (ratio_of_medians, median_of_ratios))
                figures = (spread(single.tok_s), str(many.batch), spread(batch.tok_s))
                rows.append((match.title, arm.format, *figures, *ratios))
    header = ("Model", "File", "Batch 1", "Batch", "All its sequences")
    return Table(
        f"Decoding several sequences at once with {OWN}, tokens per second",
        (*header, "Ratio of medians", "Median ratio of rounds"),
        tuple(rows),
    )


def _step_table(match: Match) -> Table:
    arms = match.rounds.own
    profiles = [match.profiles[arm.name] for arm in arms]
    names: dict[str, float] = {}
    for profile in profiles:
        for name, _, seconds in profile.kernels:
            names[name] = max(names.get(name, 0.0), seconds)
    rows = [
        (name, *(_kernel_cell(profile, name) for profile in profiles))
        for name in sorted(names, key=names.__getitem__, reverse=True)
    ]
    whole: list[tuple[str, Callable[[Profile], str]]] = [
        ("sum of these", lambda each: f"{1e3 * sum(seconds for _, _, seconds in each.kernels):.3f}"),
        ("the program in one call", lambda each: f"{1e3 * each.program:.3f} ({each.barriers} barriers)"),
        ("the step through the runner", lambda each: f"{1e3 * each.step:.3f}"),
        ("share of the step that is no program", lambda each: f"{1 - each.program / each.step:.1%}"),
    ]
    for name, cell in whole:
        rows.append((name, *(cell(each) if each.kernels else MISSING for each in profiles)))
    return Table(
        f"Decode step of {match.title} by operation, in milliseconds (rows of the program)",
        ("Operation", *(arm.format for arm in arms)),
        tuple(rows),
    )


def _kernel_cell(profile: Profile, name: str) -> str:
    found = next(((rows, seconds) for kernel, rows, seconds in profile.kernels if kernel == name), None)
    return MISSING if found is None else f"{1e3 * found[1]:.3f} ({found[0]})"


def _memory_table(run: Run) -> Table:
    rows = []
    for match in run.matches:
        rounds = match.rounds
        case = max((each for each in rounds.cases if each.kind == "tg" and each.batch == 1), key=_tokens)
        for arm in rounds.arms:
            best = rounds.best(arm, case)
            if best is not None:
                rows.append((match.title, case.name, arm.name, *_memory_cells(match, rounds, best)))
    return Table(
        "Memory traffic of decoding",
        (
            *("Model", "Test", "Arm", "MB of weights a token", "GB/s of weights"),
            *("GB/s of a plain read", "Share of it"),
        ),
        tuple(rows),
    )


def _memory_cells(match: Match, rounds: Rounds, best: Series) -> tuple[str, str, str, str]:
    nbytes = match.files[best.arm.name].step_bytes
    rate = [nbytes * tok_s for tok_s in best.tok_s.samples]
    share = statistics.median(each / whole for each, whole in zip(rate, rounds.notes, strict=True))
    return (
        f"{nbytes / 1e6:.1f}",
        f"{statistics.median(rate) / 1e9:.1f}",
        f"{statistics.median(rounds.notes) / 1e9:.1f}",
        f"{share:.0%}",
    )


def _tokens(case: Case) -> int:
    return case.tokens


def _samples_remark(run: Run) -> str:
    counts = sorted({len(series.samples) for match in run.matches for series in match.rounds.series})
    return f"Medians with minimum and maximum of {' or '.join(map(str, counts))} rounds." if counts else ""


def _disturbance(run: Run) -> str:
    """Return how much of a core others took meanwhile; empty if this system does not tell."""
    samples = [each for match in run.matches for series in match.rounds.series for each in series.samples]
    wall = sum(each.wall for each in samples)
    others = [each.others for each in samples if each.others is not None]
    waiting = [each.waiting for each in samples if each.waiting is not None]
    if not samples or len(others) < len(samples) or len(waiting) < len(samples):
        return ""
    return (
        f"While one side was measured, the waiting one used {sum(waiting) / wall:.1%} of a core and all "
        f"other programs {sum(others) / wall:.1%}."
    )


def warnings(run: Run, least_rounds: int, most_disturbance: float) -> Sequence[str]:
    """Return what makes a run unfit to be quoted."""
    found = []
    samples = [each for match in run.matches for series in match.rounds.series for each in series.samples]
    if any(len(series.samples) < least_rounds for match in run.matches for series in match.rounds.series):
        found.append(f"fewer than {least_rounds} rounds: the figures are a first impression")
    wall = sum(each.wall for each in samples)
    disturbed = sum((each.others or 0.0) + (each.waiting or 0.0) for each in samples)
    if wall and disturbed / wall > most_disturbance:
        found.append(f"others used {disturbed / wall:.0%} of a core meanwhile: repeat it on an idle machine")
    return found
