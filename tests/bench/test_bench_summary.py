"""Statistics of repeated figures, and the rates that follow from wall times."""

from __future__ import annotations

import json
import math

import pytest

from hipfire.base.errors import InternalError, ValidationError
from hipfire.bench.report import HEADER, tables
from hipfire.bench.results import DecodeResult, Measurements, PrefillResult, ReplyResult, ReplyTimes
from hipfire.bench.summary import rates, summarize


def test_the_figures_of_a_known_sample() -> None:
    found = summarize([4.0, 1.0, 10.0, 2.0])
    assert found.samples == (4.0, 1.0, 10.0, 2.0)
    assert (found.median, found.mean, found.low, found.high) == (3.0, 4.25, 1.0, 10.0)
    # squared deviations 0.0625 + 10.5625 + 33.0625 + 5.0625, over n - 1
    assert found.stdev == pytest.approx(math.sqrt(48.75 / 3), rel=1e-12)


def test_the_median_of_an_odd_number_is_a_sample_and_ignores_an_outlier() -> None:
    assert summarize([5.0, 1e9, 4.0]).median == 5.0


def test_one_sample_has_no_spread() -> None:
    found = summarize([7.0])
    assert (found.median, found.mean, found.low, found.high, found.stdev) == (7.0, 7.0, 7.0, 7.0, None)
    assert json.loads(json.dumps(found.to_json()))["stdev"] is None


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_what_has_no_statistics_is_refused(samples: list[float]) -> None:
    with pytest.raises(ValidationError):
        summarize(samples)


def test_a_rate_is_taken_of_each_time() -> None:
    found = rates(10, [1.0, 2.0, 5.0])
    assert found.samples == (10.0, 5.0, 2.0)
    # the mean of the rates, not the rate of the mean time
    assert found.mean == pytest.approx(17 / 3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_clock_that_stands_still_is_a_fault(bad: float) -> None:
    with pytest.raises(InternalError, match="clock"):
        rates(10, [1.0, bad])


def test_decode_counts_every_sequence_of_a_step() -> None:
    found = DecodeResult(batch=4, ctx=9, steps=10, seconds=(2.0, 4.0))
    assert found.tok_s.samples == (20.0, 10.0)
    assert found.ms_step.samples == (200.0, 400.0)


def test_the_figures_of_a_reply() -> None:
    # the first of 9 tokens comes after 0.6 s, the last one after 2.6 s
    reply = ReplyResult(50, 9, (ReplyTimes(0.5, 0.6, 2.6),))
    assert reply.prefill_tok_s.median == pytest.approx(100.0)
    assert reply.ttft_ms.median == pytest.approx(600.0)
    assert reply.decode_tok_s.median == pytest.approx(4.0)
    assert reply.wall_tok_s.median == pytest.approx(9 / 2.6)
    assert reply.decode_ms_token.median == pytest.approx(250.0)


def test_json_holds_every_sample_beside_its_median() -> None:
    done = Measurements(
        (PrefillResult(8, (2.0, 4.0)),),
        (DecodeResult(2, 5, 10, (4.0, 8.0)),),
        ReplyResult(6, 3, (ReplyTimes(1.0, 2.0, 4.0), ReplyTimes(3.0, 4.0, 8.0))),
    )
    found = json.loads(json.dumps(done.to_json()))
    (prefill,), (decode,), reply = found["prefill"], found["decode"], found["reply"]
    assert (prefill["tokens"], prefill["seconds"]) == (8, [2.0, 4.0])
    assert (prefill["tok_s"]["samples"], prefill["tok_s"]["median"]) == ([4.0, 2.0], 3.0)
    assert (decode["batch"], decode["ctx"], decode["tokens"], decode["seconds"]) == (2, 5, 10, [4.0, 8.0])
    assert (decode["tok_s"]["samples"], decode["tok_s"]["median"]) == ([5.0, 2.5], 3.75)
    assert (decode["ms_per_step"]["samples"], decode["ms_per_step"]["median"]) == ([400.0, 800.0], 600.0)
    assert reply["tokens"] == 3
    assert reply["seconds"][1] == {"prefill": 3.0, "first_token": 4.0, "last_token": 8.0}
    assert reply["prefill_tok_s"]["samples"] == [6.0, 2.0]
    assert reply["ttft_ms"]["samples"] == [2000.0, 4000.0]
    assert reply["decode_tok_s"]["samples"] == [1.0, 0.5]
    assert reply["wall_tok_s"]["samples"] == [0.75, 0.375]
    assert reply["decode_ms_per_token"]["samples"] == [1000.0, 2000.0]


def test_the_tables_show_each_figure_in_its_column() -> None:
    done = Measurements(
        (PrefillResult(8, (2.0, 4.0, 1.0)),),
        (DecodeResult(2, 5, 10, (4.0,)),),
        ReplyResult(6, 3, (ReplyTimes(1.0, 2.0, 4.0), ReplyTimes(3.0, 4.0, 8.0))),
    )
    prefill, decode, reply = tables(done)
    assert HEADER == ("TEST", "UNIT", "MEDIAN", "MEAN", "MIN", "MAX", "STDEV")
    # rates 4, 2 and 8: squared deviations from 14/3 add up to 56/3, over 2
    assert prefill.rows == (("pp8", "tok/s", "4.00", "4.67", "2.00", "8.00", "3.06"),)
    # a single run has no spread
    assert decode.rows == (
        ("tg10 ctx 5 batch 2", "tok/s", "5.00", "5.00", "5.00", "5.00", "-"),
        ("tg10 ctx 5 batch 2", "ms/step", "400.00", "400.00", "400.00", "400.00", "-"),
    )
    assert "Prompt of 6 tokens and greedy reply of 3" in reply.title
    assert [row[:3] for row in reply.rows] == [
        ("Prefill", "tok/s", "4.00"),
        ("TTFT", "ms", "3000.00"),
        ("Decode", "tok/s", "0.75"),
        ("Wall", "tok/s", "0.56"),
        ("Decode", "ms/token", "1500.00"),
    ]
