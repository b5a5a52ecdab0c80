"""Measurements as tables of text. This file does not know how a table is aligned or where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hipfire.bench.results import DecodeResult, Measurements, PrefillResult, ReplyResult
from hipfire.bench.summary import Summary

HEADER: Final = ("TEST", "UNIT", "MEDIAN", "MEAN", "MIN", "MAX", "STDEV")
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A title, and rows of cells under `HEADER`."""

    title: str
    rows: tuple[Row, ...]


def tables(done: Measurements) -> tuple[Table, ...]:
    """Return the tables of synthetic prefills, synthetic decodes, and the real prompt's reply."""
    reply = done.reply
    return (
        Table("Prefill of synthetic tokens", tuple(_prefill_row(each) for each in done.prefill)),
        Table(
            "Decode of synthetic tokens, without sampling; tok/s of all sequences together",
            tuple(row for each in done.decode for row in _decode_rows(each)),
        ),
        Table(
            f"Prompt of {reply.prompt_tokens} tokens and greedy reply of {reply.tokens}, with sampling",
            _reply_rows(reply),
        ),
    )


def _prefill_row(result: PrefillResult) -> Row:
    return _row(f"pp{result.tokens}", "tok/s", result.tok_s)


def _decode_rows(result: DecodeResult) -> tuple[Row, Row]:
    name = f"tg{result.steps} ctx {result.ctx} batch {result.batch}"
    return _row(name, "tok/s", result.tok_s), _row(name, "ms/step", result.ms_step)


def _reply_rows(reply: ReplyResult) -> tuple[Row, ...]:
    return (
        _row("Prefill", "tok/s", reply.prefill_tok_s),
        _row("TTFT", "ms", reply.ttft_ms),
        _row("Decode", "tok/s", reply.decode_tok_s),
        _row("Wall", "tok/s", reply.wall_tok_s),
        _row("Decode", "ms/token", reply.decode_ms_token),
    )


def _row(name: str, unit: str, summary: Summary) -> Row:
    """Return one line; the spread of a single run is a dash."""
    figures = (summary.median, summary.mean, summary.low, summary.high)
    spread = "-" if summary.stdev is None else f"{summary.stdev:.2f}"
    return (name, unit, *(f"{figure:.2f}" for figure in figures), spread)
