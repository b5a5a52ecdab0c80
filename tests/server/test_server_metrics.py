"""The figures that a server tells."""

from __future__ import annotations

import re

import pytest
from scripted_backend import MODEL, TIMINGS, Fail, Say, ScriptedBackend
from server_kit import eventually, serving

from hipfire.engine.turn import TurnResult, TurnTimings, TurnUsage
from hipfire.server.errors import ReportedError
from hipfire.server.metrics import BUCKETS, Histogram, Metrics
from hipfire.server.reply import TurnTrace

GAUGES = {
    "hipfire_queue_depth": 3.0,
    "hipfire_queue_capacity": 64.0,
    "hipfire_turns_running": 2.0,
    "hipfire_uptime_seconds": 1.5,
    "hipfire_model_loaded": 1.0,
}


def result(timings: TurnTimings = TIMINGS) -> TurnResult:
    return TurnResult("stop", TurnUsage(12, 8, 5), timings, 7)


def value(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


@pytest.mark.parametrize(
    ("measured", "bucket"), [(0.5, "10"), (10, "10"), (10.1, "25"), (60_000, "60000"), (60_001, "+Inf")]
)
def test_bucket_holds_all_up_to_its_bound(measured: float, bucket: str) -> None:
    histogram = Histogram()
    histogram.observe(measured)
    lines = histogram.lines("x")
    first = next(line for line in lines if line.endswith(" 1"))
    assert first == f'x_bucket{{le="{bucket}"}} 1'
    assert lines[-2:] == [f"x_sum {measured:.6g}", "x_count 1"]
    # cumulative: everything above the first one counts it too
    assert [line for line in lines[:-2] if line.endswith(" 1")] == lines[lines.index(first) : -2]


def test_turns_are_counted_by_how_they_ended() -> None:
    metrics = Metrics()
    metrics.ended(TurnTrace(10.0, 10.02, 10.3, result(), committed=True))
    metrics.ended(TurnTrace(10.0))
    metrics.ended(TurnTrace(10.0, error=ReportedError("internal", "broken")))
    text = metrics.text(GAUGES)
    assert metrics.served == 1
    assert value(text, "hipfire_requests_failed_total") == 1
    assert value(text, "hipfire_requests_aborted_total") == 1
    assert value(text, 'hipfire_ttft_milliseconds_bucket{le="25"}') == 1
    assert value(text, 'hipfire_ttft_milliseconds_bucket{le="10"}') == 0
    assert value(text, "hipfire_request_latency_milliseconds_sum") == pytest.approx(300)
    assert value(text, "hipfire_decode_tokens_per_second_sum") == 40
    assert value(text, "hipfire_cached_tokens_total") == 8
    assert value(text, "hipfire_completion_tokens_total") == 5
    assert value(text, "hipfire_queue_depth") == 3
    assert metrics.recent_speed() == 40


def test_a_turn_whose_engine_died_during_the_commit_has_one_end() -> None:
    metrics = Metrics()
    died = ReportedError("transient", "the engine's process ended")
    metrics.ended(TurnTrace(10.0, 10.02, 10.3, result(), error=died, committed=True))
    assert metrics.served == 0
    assert value(metrics.text(GAUGES), "hipfire_requests_failed_total") == 1


def test_what_was_not_measured_is_not_counted_as_zero() -> None:
    metrics = Metrics()
    silent = TurnTimings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    metrics.ended(TurnTrace(10.0, None, 10.0, result(silent), committed=True))
    text = metrics.text(GAUGES)
    for name in ("ttft_milliseconds", "decode_tokens_per_second", "prefill_tokens_per_second"):
        assert value(text, f"hipfire_{name}_count") == 0
    assert metrics.recent_speed() == 0


def test_text_is_well_formed() -> None:
    lines = Metrics().text(GAUGES).splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    for line in lines:
        assert re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+(\{le=\"[^\"]+\"\})? [0-9.e+-]+", line), line
    bounds = [line for line in lines if line.startswith("hipfire_ttft_milliseconds_bucket")]
    assert len(bounds) == len(BUCKETS) + 1


def test_figures_of_a_server_follow_its_turns() -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    with serving(
        [Say("Hello!")], [Fail("internal", "broken")], backend=ScriptedBackend(cached_tokens=4)
    ) as live:
        assert live.get("/stats").json()["model"] is None
        assert live.post("/v1/chat/completions", chat).status_code == 200
        assert live.post("/v1/chat/completions", chat).status_code == 500
        assert live.post("/v1/chat/completions", {**chat, "model": "none"}).status_code == 404
        assert eventually(lambda: live.get("/stats").json()["requests_served"] == 1)
        stats = live.get("/stats").json()
        assert (stats["model"], stats["queue_depth"], stats["recent_tok_s"]) == (MODEL, 0, 40.0)
        assert stats["uptime_sec"] > 0
        assert stats["engine"] == {"max_seq": 2048, "arch": "llama"}
        response = live.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert value(response.text, "hipfire_requests_total") == 3
        assert value(response.text, "hipfire_requests_failed_total") == 2
        assert value(response.text, "hipfire_cached_tokens_total") == 4
        assert value(response.text, "hipfire_model_loaded") == 1
        assert live.get("/health").json()["model"] == MODEL
