"""The daemon: one reply to every message, one terminal to every turn, whatever else goes wrong."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from daemon_kit import Bench, types
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_core import ScriptedCore

from hipfire.engine.turn import TurnKey
from hipfire.engine.wire import MAX_LINE, TYPES, encode_key

KEY = TurnKey("a", 1)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def loaded(bench: Bench) -> Bench:
    assert bench.load()[-1]["type"] == "loaded"
    return bench


def test_a_turn_is_committed_in_two_phases(loaded: Bench) -> None:
    assert loaded.generate("think:hm say:Hello say:you") == []
    events = loaded.run()
    assert types(events) == ["gen_start", "reasoning", "token", "token", "commit_ready"]
    assert [event.get("text") for event in events[1:4]] == ["hm", "Hello", "you"]
    assert {(event["id"], event["attempt_id"]) for event in events} == {("a", 1)}
    done = loaded.tell(encode_key("commit", KEY))
    assert types(done) == ["done"]
    assert {**done[0], "type": "commit_ready"} == events[-1]
    # a second commit, or an abort that comes too late, is about nobody
    assert loaded.tell(encode_key("commit", KEY)) == loaded.tell(encode_key("abort", KEY)) == []


@pytest.mark.parametrize("kind", ["cancel", "abort"])
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_a_turn_ends_with_one_terminal_wherever_it_is_stopped(loaded: Bench, kind: str, steps: int) -> None:
    loaded.generate("say:a say:b say:c")
    for _ in range(steps):
        loaded.state.step()
    assert types(loaded.tell(encode_key(kind, KEY))) == ["aborted"]
    assert loaded.run() == []
    assert loaded.diag()["turns"] == 0


def test_messages_about_stale_attempts_touch_nothing(loaded: Bench) -> None:
    loaded.generate("say:a wait wait", attempt=2)
    loaded.state.step()
    for kind in ("cancel", "commit", "abort"):
        assert loaded.tell(encode_key(kind, TurnKey("a", 1))) == []
        assert loaded.tell(encode_key(kind, TurnKey("b", 2))) == []
    assert types(loaded.run()) == ["token", "commit_ready"]


def test_a_running_turns_key_is_not_given_twice(loaded: Bench) -> None:
    loaded.generate("say:a")
    (refusal,) = loaded.generate("say:b", request=17)
    # under the turn's own key the refusal would end the turn that runs
    assert (refusal["type"], refusal["class"], refusal["request"]) == ("error", "validation", 17)
    assert "id" not in refusal
    assert types(loaded.run()) == ["gen_start", "token", "commit_ready"]
    loaded.tell(encode_key("commit", KEY))
    loaded.generate("say:c")
    assert types(loaded.run()) == ["gen_start", "token", "commit_ready"]


def test_a_refused_turn_is_told_so_under_its_key(loaded: Bench) -> None:
    (refusal,) = loaded.generate("too-long")
    assert (refusal["type"], refusal["id"], refusal["attempt_id"]) == ("error", "a", 1)
    assert (refusal["class"], refusal["retryable"]) == ("context_length", False)
    assert "9000" in refusal["message"]
    assert "4096" in refusal["message"]
    (refusal,) = loaded.generate("x", temperature=5)
    assert (refusal["class"], refusal["id"]) == ("validation", "a")
    for number in range(8):
        loaded.generate("wait", name=str(number))
    (refusal,) = loaded.generate("wait", name="one too many")
    assert (refusal["class"], refusal["retryable"], refusal["id"]) == ("transient", True, "one too many")


def test_a_failing_turn_leaves_the_others_running(loaded: Bench) -> None:
    for number, prompt in enumerate(["say:a fail say:b", "say:a nan say:b", "say:a say:b"]):
        loaded.generate(prompt, name=str(number))
    ends = {event["id"]: event["type"] for event in loaded.run()}
    assert ends == {"0": "error", "1": "error", "2": "commit_ready"}
    assert loaded.diag()["turns"] == 1


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"{", "malformed"), (b"\xff", "malformed"), (b"[1]", "malformed"), (b'{"type": 1e999}', "malformed"),
        (b"x" * (MAX_LINE + 1), "malformed"), (b"{}", "validation"), (b'{"type": "img_load"}', "unsupported"),
        (b'{"type": "generate"}', "validation"), (b'{"type": "commit", "id": "a"}', "validation"),
        (b'{"type": "load"}', "validation"), (b'{"type": "ping", "x": 1}', "validation"),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_bad_line_is_answered_and_harms_nothing(loaded: Bench, line: bytes, kind: str) -> None:
    loaded.generate("say:a")
    (answer,) = loaded.tell(line)
    assert (answer["type"], answer["class"], answer["retryable"]) == ("error", kind, False)
    assert "id" not in answer
    assert types(loaded.run()) == ["gen_start", "token", "commit_ready"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = ["id", "attempt_id", "prompt", "messages", "request", "force", "config", "params", "tokens", "stop"]


@settings(max_examples=80, deadline=None)
@given(
    st.binary(max_size=60)
    | st.builds(
        lambda kind, fields: json.dumps({**fields, "type": kind}).encode(),
        st.sampled_from(TYPES),
        st.dictionaries(st.sampled_from(names), anything, max_size=4),
    )
)
def test_no_line_is_fatal_and_each_is_answered_at_most_once_under_its_own_name(line: bytes) -> None:
    bench = Bench()
    bench.generate("say:a", name="other")
    bench.load()
    answers = bench.tell(line)
    assert len(answers) <= 1
    # what is silent is a turn that was taken, or a word about one that does not run
    if not answers:
        assert json.loads(line)["type"] in ("generate", "cancel", "commit", "abort")
    assert types(bench.tell({"type": "ping"})) == ["pong"]


def test_replies_carry_the_number_of_their_request(loaded: Bench) -> None:
    for number, record in enumerate(
        [{"type": "ping"}, {"type": "diag"}, {"type": "nonsense"}, {"type": "load"}]
    ):
        assert [reply["request"] for reply in loaded.tell({**record, "request": number})] == [number]
    assert "request" not in loaded.tell({"type": "ping"})[0]
    notes = loaded.load(request=9)
    assert types(notes) == ["loading", "loading", "loaded"]
    assert [note["request"] for note in notes] == [9, 9, 9]
    assert (notes[1]["done"], notes[1]["total"], notes[1]["what"]) == (2, 2, "reading weights")


def test_a_load_that_is_not_admitted_leaves_the_resident_model_serving(loaded: Bench) -> None:
    (refusal,) = loaded.load("refused")
    assert (refusal["type"], refusal["class"], refusal["model_loaded"]) == ("error", "memory", True)
    assert (refusal["required"], refusal["available"]) == (2**31, 2**30)
    assert loaded.loader.reclaimed == 0
    loaded.generate("say:a")
    assert types(loaded.run()) == ["gen_start", "token", "commit_ready"]
    assert loaded.diag()["model"] == "model"


def test_a_load_that_fails_late_says_that_no_model_is_left(loaded: Bench) -> None:
    *_, failure = loaded.load("broken")
    assert (failure["type"], failure["class"], failure["model_loaded"]) == ("error", "artifact", False)
    assert loaded.loader.reclaimed == 1
    (refusal,) = loaded.generate("say:a")
    assert (refusal["class"], refusal["retryable"]) == ("transient", True)
    assert "no model is loaded" in refusal["message"]
    assert loaded.diag()["model_loaded"] is False
    assert loaded.load("other")[-1]["model"] == "other"


@pytest.mark.parametrize(
    "record",
    [{"type": "load", "model": "other"}, {"type": "unload"}, {"type": "reset", "attempt_id": 1}],
    ids=["load", "unload", "reset"],
)
def test_running_turns_are_ended_only_by_force(loaded: Bench, record: dict[str, Any]) -> None:
    loaded.generate("say:a wait")
    loaded.state.step()
    (refusal,) = loaded.tell(record)
    assert (refusal["class"], refusal["retryable"]) == ("transient", True)
    assert loaded.diag()["turns"] == 1
    answers = loaded.tell({**record, "force": True})
    assert answers[0]["type"] == "aborted"
    assert answers[0]["id"] == "a"
    assert answers[-1]["type"] == {"load": "loaded", "unload": "unloaded", "reset": "reset"}[record["type"]]
    assert loaded.diag()["turns"] == 0


def test_measuring_needs_an_idle_model_and_drops_cached_prefixes(bench: Bench) -> None:
    prefill = {"type": "bench_prefill", "tokens": 64}
    assert "no model is loaded" in bench.tell(prefill)[0]["message"]
    bench.load()
    bench.generate("say:a")
    assert bench.tell(prefill)[0]["class"] == "transient"
    bench.tell(encode_key("cancel", KEY))
    assert bench.tell(prefill)[0] == {"type": "prefill_result", "tokens": 64, "ms": 2.0, "tok_s": 32000.0}
    (answer,) = bench.tell({"type": "bench_decode", "context_tokens": 16, "iterations": 8})
    assert (answer["type"], answer["tok_s"]) == ("decode_result", 50.0)
    assert bench.diag()["stats"]["calls"].count("reset") == 2


def test_reset_answers_with_the_attempt_and_a_new_epoch(loaded: Bench) -> None:
    first, second = (loaded.tell({"type": "reset", "attempt_id": number})[0] for number in (4, 5))
    assert (first["attempt_id"], second["attempt_id"]) == (4, 5)
    assert second["state_epoch"] == first["state_epoch"] + 1
    assert (first["seq_pos"], first["conversation_len"], first["rolled_back"]) == (0, 0, False)


def test_recordings_are_compared_on_an_idle_model(bench: Bench) -> None:
    shadow = {"type": "redline_shadow", "context_tokens": 8, "positions": 3, "batch": 2}
    assert "no model is loaded" in bench.tell(shadow)[0]["message"]
    bench.load()
    bench.generate("say:a")
    assert bench.tell({"type": "redline_capture"})[0]["class"] == "transient"
    bench.tell(encode_key("cancel", KEY))
    (captured,) = bench.tell({"type": "redline_capture", "context_tokens": 8, "batch": 2})
    assert captured == {
        "type": "redline_capture_result", "context": 8, "launches": 20, "kernels": 3,
        "sequence_hash": "00000000000000ab",
    }  # fmt: skip
    (compared,) = bench.tell(shadow)
    assert compared["plan"] == {"context": 8, "positions": 3, "batch": 2}
    for broken in ({"positions": 0}, {"batch": 65}, {"context_tokens": 0}):
        assert bench.tell({**shadow, **broken})[0]["class"] == "validation"


def test_configure_comes_before_the_first_load(bench: Bench) -> None:
    (answer,) = bench.tell({"type": "configure", "config": {"threads": 3}})
    assert (answer["type"], answer["pid"]) == ("configured", os.getpid())
    assert bench.diag()["threads"] == 3
    bench.load()
    (answer,) = bench.tell({"type": "configure", "config": {"threads": 4}})
    assert answer["class"] == "validation"
    assert bench.diag()["threads"] == 3


def test_an_idle_core_checks_its_books_once_after_work(bench: Bench) -> None:
    bench.load("leaky")
    bench.run()
    assert bench.diag()["stats"]["calls"] == []
    bench.generate("say:a")
    bench.run()
    # the turn still holds its slot
    assert bench.diag()["integrity"] == "ok"
    bench.tell(encode_key("commit", KEY))
    bench.run()
    bench.run()
    answer = bench.diag()
    assert answer["stats"]["calls"] == ["check"]
    assert answer["integrity"] == "slot 2 is nobody's"
    # the next model's books are its own
    bench.load()
    assert bench.diag()["integrity"] == "ok"


def test_unexpected_errors_are_answered_as_faults_of_the_engine(
    loaded: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: ScriptedCore, *_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(ScriptedCore, "submit", broken)
    monkeypatch.setattr(ScriptedCore, "reset", broken)
    (failure,) = loaded.generate("say:a")
    assert (failure["class"], failure["id"], failure["retryable"]) == ("internal", "a", False)
    (failure,) = loaded.tell({"type": "reset", "attempt_id": 1, "request": 3})
    assert (failure["class"], failure["request"]) == ("internal", 3)
    # the log has what a report of the fault needs
    assert "Traceback" in capsys.readouterr().err
    assert loaded.diag()["turns"] == 0


def test_the_end_of_the_daemon_ends_every_turn(loaded: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.generate("say:a", name="a")
    loaded.generate("say:a", name="b")
    monkeypatch.setattr(ScriptedCore, "abort_all", lambda self, reason: self.turns.popitem())
    before = len(loaded.sent)
    loaded.state.end("the engine ends")
    # also those that the core has lost
    assert sorted((event["id"], event["type"]) for event in loaded.sent[before:]) == [
        ("a", "aborted"),
        ("b", "aborted"),
    ]
