"""A run in words: the settings before it, a line for each reply, and everything about it at the end."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hipfire.base.printable import one_line
from hipfire.validate.harness_report import Report
from hipfire.validate.harness_resolve import Resolved


def preflight(resolved: Resolved, words: Sequence[str], config_text: str) -> Iterator[str]:
    """Yield every setting with its source, and what the server is started with."""
    yield "settings (value, where it came from):"
    yield from (f"  {line}" for line in resolved.lines())
    yield from (f"warning: {warning}" for warning in resolved.warnings)
    yield "server: " + " ".join(words)
    yield "its config.toml: " + " | ".join(line for line in config_text.splitlines() if line)


def row_line(row: Mapping[str, Any]) -> str:
    """Return one line about a reply."""
    if row["fault"]:
        return one_line(f"turn {row['turn']} {row['genre']}: {row['fault']}")
    flags = [name for name in ("empty", "runaway") if row[name]]
    if row["attractor"]["fired"]:
        flags.append(f"attractor({row['attractor']['rule']})")
    flags += [f"missing({', '.join(row['retrieval_missing'])})"] if row["retrieval_missing"] else []
    flags += [f"leak({' '.join(row['markup_leak'])})"] if row["markup_leak"] else []
    flags += [f"tool({row['tool_fault']})"] if row["tool_fault"] else []
    counts = f"ctx={row['ctx']} cached={row['cached']} gen={row['gen']} finish={row['finish']}"
    speed = f"ttft={_figure(row['ttft_s'], '.2f')}s decode={_figure(row['decode_tok_s'], '.1f')}tok/s"
    head = f"turn {row['turn']} {row['genre']}: {counts} {speed}"
    return one_line(f"{head} [{' '.join(flags) or 'ok'}] {row['ans_preview']}")


def summary(report: Report, label: str) -> Iterator[str]:
    """Yield totals, identities, the decoded text in full, proofs, what is not claimed, and the verdict."""
    counts = report["totals"]
    names = ("runaway", "empty", "attractor", "retrieval_miss", "markup_leak", "tool_faults", "faults")
    flags = " ".join(f"{name}={counts[name]}" for name in names)
    yield (
        f"[{label} DONE] turns={counts['turns']} completed={counts['completed']} {flags} "
        f"avg_prefill={_figure(counts['avg_prefill_tok_s'], '.1f')} "
        f"avg_decode={_figure(counts['avg_decode_tok_s'], '.1f')}"
    )
    for row in report["rows"]:
        hashes = f"prompt_md5={row['prompt_md5']} request_md5={row['request_md5']}"
        yield f"turn {row['turn']} step {row['step']}: {hashes}"
    source = report["source"]
    yield f"source: commit {source['commit']} dirty {source['dirty']} tree_sha256 {source['tree_sha256']}"
    for each in report["artifacts"]:
        yield f"{each['role']}: {each['path']} {each['bytes']} bytes sha256 {each['sha256']}"
    for row in report["rows"]:
        counts = f"finish {row['finish']} gen {row['gen']} cached {row['cached']}"
        yield f"--- turn {row['turn']} {row['genre']} {counts}"
        if row["reasoning_content"]:
            yield f"(reasoning) {row['reasoning_content']}"
        yield row["assistant_content"]
    yield "---"
    if report.get("log_tail"):
        yield "the end of the server's log:"
        yield report["log_tail"]
    yield from (f"proof {each['name']}: {each['state']}: {each['evidence']}" for each in report["proofs"])
    yield from (f"not claimed: {note}" for note in report["nonclaims"])
    yield from (f"reason: {reason}" for reason in report["reasons"])
    yield f"verdict: {report['verdict']}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def prepare() -> None:
    """Have what the terminal's code page lacks shown escaped: no reply of a model ends a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def show(line: str) -> None:
    """Write a line to stdout at once; nothing where stdout is closed. Raises OSError if it takes no more."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError:
        # what is still buffered must not raise again at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def fail(line: str, code: int) -> int:
    """Write a line to stderr, if anything takes it, and return the code."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"serve_harness: {line}\n")
    return code
