"""benchmarks/serve_peers.py: what is asked of two servers, how it is timed, and the rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from serve_stand_in import StandIn, serving

from hipfire.base.errors import ValidationError
from hipfire.validate.harness_client import Address, Reply
from peers import serve_measure
from peers.report import OWN, PEER
from peers.serve_measure import Plan, play
from peers.serve_requests import at_once, beside, chunk, count, long_alone, one_by_one
from peers.serve_servers import ServeError, Side
from peers.serve_texts import Texts

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a"),
    *("lazy", "dog", "while", "seven", "ships", "sail", "home"),
]
PLAN = Plan(rounds=2, warmups=1, chats=2, tokens=3, long=40, chunk=8, probes=2)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to calm down between two measurements of stand-ins."""
    monkeypatch.setattr(serve_measure, "PAUSE_SECONDS", 0.0)


def by_words(text: str) -> list[int]:
    return [int.from_bytes(word.encode()) for word in text.split()]


class FakeClock:
    """Every question takes 3 CPU seconds in all, of which each process has one."""

    def __init__(self) -> None:
        self.asked = 0

    def busy(self) -> float:
        self.asked += 1
        return 10.0 + 3.0 * self.asked

    def process(self, pid: int) -> float:
        return 1.0 * self.asked


TEXTS = Texts(by_words, WORDS)
QUESTIONS = [TEXTS.question(number) for number in range(4)]


def test_no_two_prompts_begin_alike_and_each_has_exactly_its_tokens() -> None:
    texts = [TEXTS.text(number, 50) for number in range(len(WORDS))]
    assert [len(by_words(text)) for text in texts] == [50] * len(WORDS)
    assert len({text.split()[0] for text in texts}) == len(WORDS)
    assert texts[3] == Texts(by_words, WORDS).text(3, 50)
    questions = [TEXTS.question(number) for number in range(256)]
    assert len(set(questions)) == 256
    assert all(one.split()[1] != other.split()[1] for one, other in pairwise(questions))


def test_words_of_several_tokens_are_filled_up_with_shorter_ones() -> None:
    def by_pieces(text: str) -> list[int]:
        return [index for word in text.split() for index in range(1 if word == "the" else 4)]

    text = Texts(by_pieces, WORDS[1:]).text(0, 30)
    assert len(by_pieces(text)) == 30
    assert text.endswith(" the the")


def test_a_tokenizer_that_allows_no_exact_length_is_refused() -> None:
    with pytest.raises(ValidationError, match="no text of exactly 7 tokens"):
        Texts(lambda text: by_words(text) * 2, WORDS).text(0, 7)


def test_chats_at_once_gain_at_a_server_that_works_in_parallel() -> None:
    with serving(StandIn(token_s=0.02)) as side:
        serial, together = one_by_one(side, QUESTIONS, 8), at_once(side, QUESTIONS, 8)
    assert together["together_tok_s"] > 2 * serial["serial_tok_s"]
    # 32 tokens in both; seven pauses of 20 ms a reply
    assert serial["serial_tok_s"] == pytest.approx(32 / serial["serial_s"])
    assert together["together_tok_s"] == pytest.approx(32 / together["together_s"])
    assert 10 < serial["decode_tok_s"] <= 50
    # the first token comes in the first half of a reply
    assert serial["ttft_ms"] < 500 * serial["serial_s"] / 4


def test_chats_at_once_gain_nothing_at_a_server_that_serves_one() -> None:
    with serving(StandIn(token_s=0.02, lock=True), PEER) as side:
        serial, together = one_by_one(side, QUESTIONS, 8), at_once(side, QUESTIONS, 8)
    assert together["together_tok_s"] < 1.5 * serial["serial_tok_s"]
    # the middle of four waits for one or two others
    assert together["together_ttft_ms"] > 140


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        (Reply(usage={"completion_tokens": 5}, finish="length"), 5),
        (Reply(finish="length", pieces=[(1.0, "a")]), 9),
        (Reply(finish="stop", pieces=[(1.0, "a"), (2.0, "b")]), 3),
    ],
)
def test_tokens_are_counted_by_the_best_that_a_server_tells(reply: Reply, tokens: int) -> None:
    assert count(reply, 9) == tokens


def test_a_chunk_is_timed_by_the_server_where_it_tells_and_by_the_clock_elsewhere() -> None:
    text = TEXTS.text(0, 10)
    with serving(StandIn(read_s=0.002)) as side:
        found = chunk(side, text, 10)
    assert found["chunk_ms"] == 20.0
    assert found["chunk_wall_ms"] > 20.0
    with serving(StandIn(read_s=0.002, timed=False), PEER) as side:
        found = chunk(side, text, 10)
    assert found["chunk_ms"] == found["chunk_wall_ms"] > 20.0


@pytest.mark.parametrize(("tokens", "cached"), [(11, 0), (10, 4)])
def test_a_chunk_that_was_not_read_as_a_whole_is_no_measurement(tokens: int, cached: int) -> None:
    with serving(StandIn(cached=cached)) as side, pytest.raises(ServeError, match=f"instead of {tokens} new"):
        chunk(side, TEXTS.text(0, 10), tokens)


def test_a_short_request_waits_for_a_long_prompt_only_where_one_is_served_at_a_time() -> None:
    long = TEXTS.text(0, 600)
    with serving(StandIn(read_s=0.001)) as side:
        quick = beside(side, long, QUESTIONS[0], 0.05)
    with serving(StandIn(read_s=0.001, lock=True), PEER) as side:
        slow = beside(side, long, QUESTIONS[0], 0.05)
        assert long_alone(side, long)["long_s"] >= 0.6
    assert quick is not None
    assert slow is not None
    # 600 ms of reading, of which 50 are over when the short one comes
    assert quick["beside_ms"] < 400 < 450 < slow["beside_ms"]


def test_a_short_request_that_came_too_late_is_no_sample() -> None:
    with serving(StandIn()) as side:
        assert beside(side, TEXTS.text(0, 20), QUESTIONS[0], 0.2) is None


def refused(side: Side) -> object:
    return one_by_one(side, QUESTIONS, 3)


def chunk_refused(side: Side) -> object:
    return chunk(side, "a b", 2)


@pytest.mark.parametrize(
    ("behaviour", "measure", "line"),
    [
        (StandIn(status=503), refused, "hipfire did not answer: status 503: no such luck"),
        (StandIn(stream_error="lost"), refused, "hipfire did not answer: error in the stream: lost"),
        (StandIn(said=0), refused, "no reply of hipfire came in several pieces"),
        (StandIn(status=500), chunk_refused, "hipfire answered /v1/completions with status 500: {'error'"),
    ],
)
def test_a_reply_that_is_not_whole_ends_the_run(
    behaviour: StandIn, measure: Callable[[Side], object], line: str
) -> None:
    with serving(behaviour) as side, pytest.raises(ServeError) as caught:
        measure(side)
    assert caught.value.line().startswith(line)


def contents(behaviour: StandIn) -> list[str]:
    return [
        body["prompt"] if "prompt" in body else body["messages"][0]["content"] for body in behaviour.asked
    ]


def requests_of(behaviour: StandIn) -> Sequence[tuple[float, int]]:
    return [(body["temperature"], body["max_tokens"]) for body in behaviour.asked]


def test_rounds_ask_both_sides_the_same_and_never_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # short requests come at once, so that none is too late on a busy machine
    monkeypatch.setattr(serve_measure, "LAST_ARRIVAL", 0.0)
    monkeypatch.setattr(serve_measure, "FIRST_ARRIVAL", 0.0)
    own, peer = StandIn(token_s=0.001, read_s=0.002), StandIn(token_s=0.001, read_s=0.002, lock=True)
    said: list[str] = []
    with serving(own) as own_side, serving(peer, PEER) as peer_side:
        contest = play(own_side, peer_side, TEXTS, PLAN, FakeClock(), progress=said.append)
    assert said == ["warm-up 1 of 1", "round 1 of 2", "round 2 of 2"]
    # chats at once and beside each other come in any order
    assert sorted(contents(own)) == sorted(contents(peer))
    assert len(set(contents(own))) == len(contents(own)) == 3 * (2 + 2 + 1 + 1 + 2 * 2)
    assert {temperature for temperature, _ in requests_of(own)} == {0}
    assert sorted({tokens for _, tokens in requests_of(peer)}) == [1, 3, 8]
    assert all(("stream_options" in body) == ("messages" in body) for body in own.asked)
    assert not any("stream_options" in body for body in peer.asked)
    for figures in (contest.own, contest.peer):
        counts = {name: len(samples) for name, samples in figures.samples.items()}
        # two rounds, and two short requests in each
        assert (counts.pop("beside_ms"), figures.missed) == (4, 0)
        assert set(counts.values()) == {2}
    assert {name: each["server"] for name, each in zip("po", contest.to_json()["figures"], strict=True)} == {
        "p": PEER,
        "o": OWN,
    }


def test_the_first_turn_goes_round_and_the_use_of_the_machine_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[tuple[str, str]] = []

    def measure(name: str, found: dict[str, float]) -> Callable[..., dict[str, float]]:
        def noted(side: Side, *_: object) -> dict[str, float]:
            turns.append((name, side.name))
            return found

        return noted

    for name in ("one_by_one", "at_once", "chunk"):
        monkeypatch.setattr(serve_measure, name, measure(name, {f"{name}_s": 1.0}))
    monkeypatch.setattr(serve_measure, "long_alone", measure("long", {"long_s": 10.0}))
    monkeypatch.setattr(serve_measure, "beside", measure("beside", {"beside_ms": 5.0}))
    monkeypatch.setattr(Side, "pids", lambda side: (1,) if side.name == OWN else (2, 3))
    own, peer = (Side(name, Address("127.0.0.1", 1), "some", 1) for name in (OWN, PEER))
    contest = play(own, peer, TEXTS, PLAN, FakeClock())
    assert [side for name, side in turns if name == "chunk"] == [PEER, OWN, PEER, OWN, OWN, PEER]
    # 3 s of all CPUs, less one for the client and for each process of either side: two of the peer's
    assert {use.others for use in contest.uses} == {-1.0}
    assert [use.waiting for use in contest.uses[:2]] == [1.0, 2.0]
    assert {use.client for use in contest.uses} == {1.0}


def test_a_short_request_that_came_too_late_is_sent_anew_and_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str, float]] = []

    def late(side: Side, long: str, question: str, delay: float) -> dict[str, float] | None:
        sent.append((long, question, delay))
        return None if len(sent) % 3 else {"beside_ms": 7.0}

    for name in ("one_by_one", "at_once", "chunk"):
        monkeypatch.setattr(serve_measure, name, lambda *_: {})
    monkeypatch.setattr(serve_measure, "long_alone", lambda *_: {"long_s": 8.0})
    monkeypatch.setattr(serve_measure, "beside", late)
    own, peer = (Side(name, Address("127.0.0.1", 1), "some", 1) for name in (OWN, PEER))
    contest = play(own, peer, TEXTS, PLAN, FakeClock())
    assert contest.own.samples["beside_ms"] == [7.0] * 4
    assert contest.own.missed == contest.peer.missed == 8
    for first in range(0, len(sent), 3):
        delays = [delay for _, _, delay in sent[first : first + 3]]
        assert 0.8 <= delays[0] <= 5.6
        assert delays == [delays[0], delays[0] / 2, delays[0] / 4]
        # what a server has read in vain it must not get again
        assert len({long for long, _, _ in sent[first : first + 3]}) == 3
        assert len({question for _, question, _ in sent[first : first + 3]}) == 3


def test_figures_without_a_single_probe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_measure, "beside", lambda *_: None)
    with serving(StandIn()) as own, serving(StandIn(), PEER) as peer, pytest.raises(ServeError) as caught:
        play(own, peer, TEXTS, PLAN, FakeClock())
    assert caught.value.line().endswith("use more --probes")


def test_a_contest_needs_rounds() -> None:
    side = Side(OWN, Address("127.0.0.1", 1), "some", 1)
    plan = Plan(rounds=0, warmups=1, chats=2, tokens=3, long=40, chunk=8, probes=1)
    with pytest.raises(ValidationError, match="at least 1"):
        play(side, side, TEXTS, plan, FakeClock())
