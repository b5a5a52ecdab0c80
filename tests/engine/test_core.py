"""The core's promises: order of events, one terminal, two-phase end, bounds, faults kept apart."""

from __future__ import annotations

import random

import pytest
from core_kit import OPENING, Stage, ids, limit, staged

from hipfire.base.errors import ContextLengthError, HipfireError, ValidationError
from hipfire.engine.scheduler import BusyError, QueueFullError
from hipfire.engine.turn import TERMINALS, Aborted, Delta, Done, Event, Failed, Ready, Started, TurnKey


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def key(name: str, attempt: int = 1) -> TurnKey:
    return TurnKey(name, attempt)


def test_a_turn_from_its_arrival_to_its_commit() -> None:
    stage = Stage()
    stage.script("ask", "yes!")
    stage.submit("a", "ask")
    # nothing is told before a step runs
    assert stage.events["a"] == []
    stage.run()
    kinds = [type(event) for event in stage.events["a"]]
    assert kinds == [Started, Delta, Delta, Delta, Delta, Ready]
    assert stage.started("a") == Started(key("a"), False, 3, 0)
    assert stage.text("a") == "yes!"
    result = stage.finish("a")
    assert stage.events["a"][-1] == Done(key("a"), result)
    assert (result.finish, result.stop, result.calls) == ("stop", None, ())
    # the end token counts as one that was generated
    assert (result.usage.prompt, result.usage.cached, result.usage.completion) == (3, 0, 5)
    assert stage.core.live == 0
    assert stage.core.wait_s() is None


@pytest.mark.parametrize(
    ("tokens", "text", "finish"),
    [
        (0, "", "length"),
        (1, "y", "length"),
        (3, "yes", "length"),
        (4, "yes!", "length"),
        (5, "yes!", "stop"),
        (None, "yes!", "stop"),
    ],
)
def test_max_tokens_is_exact_and_so_is_the_count(tokens: int | None, text: str, finish: str) -> None:
    stage = Stage()
    stage.script("ask", "yes!")
    stage.submit("a", "ask", **limit(tokens))
    result = stage.finish("a")
    assert (stage.text("a"), result.finish) == (text, finish)
    assert result.usage.completion == len(text) + (finish == "stop")


def test_the_next_turn_reuses_all_that_a_committed_one_left() -> None:
    stage = Stage()
    stage.script("ask", "yes")
    stage.submit("a", "ask")
    stage.finish("a")
    stage.script("askyes", "so")
    stage.submit("b", "askyes and more")
    stage.run()
    # "ask" and "yes" were fed; the end token was drawn but never fed
    assert stage.started("b").cached_tokens == 6
    assert stage.result("b").usage.cached == 6


@pytest.mark.parametrize("end", ["abort", "cancel", "commit timeout"])
def test_a_turn_that_nobody_took_leaves_nothing_in_the_cache(end: str) -> None:
    clock = Clock()
    stage = Stage(staged(slots=1), clock=clock, commit_timeout_s=5.0)
    stage.submit("a", "shared first", **limit(2))
    stage.finish("a")
    stage.submit("b", "shared second", **limit(4))
    stage.run()
    assert stage.started("b").cached_tokens == len("shared ")
    if end == "commit timeout":
        clock.now += 4.9
        stage.run()
        assert stage.terminals("b") == []
        clock.now += 0.2
        assert stage.core.step()
    else:
        getattr(stage.core, end)(key("b"))
    assert isinstance(stage.events["b"][-1], Aborted)
    assert stage.core.stats()["cached_rows"] == len("shared ")
    stage.submit("c", "shared second", **limit(4))
    stage.run()
    assert stage.started("c").cached_tokens == len("shared ")


def test_commits_and_cancels_of_other_attempts_are_ignored() -> None:
    stage = Stage()
    stage.submit("a", "ask", **limit(3))
    stage.commit("a")
    for other in (key("a", 2), key("b")):
        stage.core.cancel(other)
        stage.core.abort(other)
        stage.core.commit(other)
    stage.run()
    assert stage.terminals("a") == []
    stage.commit("a")
    stage.commit("a")
    stage.core.abort(key("a"))
    assert [type(event) for event in stage.terminals("a")] == [Done]


def test_a_live_key_is_refused_and_the_running_turn_goes_on() -> None:
    stage = Stage()
    stage.script("ask", "yes")
    stage.submit("a", "ask")
    with pytest.raises(ValidationError, match="already running"):
        stage.core.submit(stage.request("a", "other"), [].append)
    assert stage.finish("a").finish == "stop"
    assert stage.text("a") == "yes"


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "ready"])
def test_a_cancel_ends_a_turn_at_once_wherever_it_is(phase: str) -> None:
    stage = Stage(staged(slots=1))
    if phase == "queued":
        stage.submit("other", "x" * 20, **limit(5))
    stage.submit("a", "y" * 20, **limit(5))
    while stage.core.stats()["turns"][phase] == 0:
        assert stage.core.step()
    fed = len(stage.actor.fed)
    stage.core.cancel(key("a"))
    assert isinstance(stage.events["a"][-1], Aborted)
    assert len(stage.actor.fed) == fed
    told = list(stage.events["a"])
    stage.run()
    assert stage.events["a"] == told
    assert len(stage.terminals("a")) == 1
    assert stage.core.live == (phase == "queued")
    if phase == "queued":
        assert stage.finish("other").finish == "length"
    assert stage.core.stats()["slots_busy"] == 0


def test_a_full_queue_a_bad_request_and_a_long_prompt_change_nothing() -> None:
    stage = Stage(staged(slots=1, max_seq=40), max_queue=1)
    stage.submit("runs", "ask", **limit(9))
    stage.core.step()
    stage.submit("waits", "ask", **limit(1))
    before = stage.core.stats()
    with pytest.raises(QueueFullError) as caught:
        stage.core.submit(stage.request("more", "ask"), [].append)
    assert caught.value.kind == "transient"
    assert stage.core.stats() == before
    stage.core.cancel(key("waits"))
    before = stage.core.stats()
    for fields, kind in (
        ({"prompt": "x" * 41}, ContextLengthError),
        ({"prompt": "x" * 30, **limit(11)}, ContextLengthError),
        ({"prompt": ""}, ValidationError),
    ):
        with pytest.raises(kind):
            stage.core.submit(stage.request("bad", **fields), [].append)
    assert stage.core.stats() == before
    assert stage.finish("runs").usage.completion == 9


def test_waiting_too_long_is_told_as_an_error_that_may_be_retried() -> None:
    clock = Clock()
    stage = Stage(staged(slots=1), clock=clock, queue_timeout_s=10.0)
    stage.submit("runs", "ask", **limit(200))
    stage.core.step()
    stage.submit("waits", "ask")
    clock.now += 10.0
    stage.core.step()
    [event] = stage.events["waits"]
    assert isinstance(event, Failed)
    assert (event.kind, event.retryable) == ("transient", True)
    assert stage.terminals("runs") == []


@pytest.mark.parametrize("phase", ["queued", "decode"])
def test_a_turn_ends_when_its_deadline_has_passed(phase: str) -> None:
    clock = Clock()
    stage = Stage(staged(slots=1), clock=clock)
    if phase == "queued":
        stage.submit("other", "x", **limit(200))
        stage.core.step()
    stage.submit("a", "ask", deadline=3.0)
    while stage.core.stats()["turns"][phase] == 0:
        stage.core.step()
    clock.now += 2.9
    stage.core.step()
    assert stage.terminals("a") == []
    clock.now += 0.1
    stage.core.step()
    assert stage.events["a"][-1] == Aborted(key("a"), "its deadline has passed")


def test_how_long_the_owner_may_sleep() -> None:
    clock = Clock()
    stage = Stage(staged(slots=1), clock=clock, commit_timeout_s=30.0, queue_timeout_s=20.0)
    assert stage.core.wait_s() is None
    stage.submit("a", "ask", **limit(1))
    assert stage.core.wait_s() == 0
    stage.run()
    clock.now += 1
    assert stage.core.wait_s() == 29
    assert not stage.core.step()
    stage.submit("b", "ask")
    # the only slot is taken until the commit, so the queue's limit comes first
    assert stage.core.wait_s() == 20
    stage.commit("a")
    assert stage.core.wait_s() == 0


def test_logits_that_are_no_numbers_end_only_their_own_turn() -> None:
    stage = Stage(staged(slots=3))
    stage.actor.poison.add(ord("!"))
    for name, reply in (("a", "fine words"), ("b", "bad! never"), ("c", "other words")):
        stage.script(name, reply)
        stage.submit(name, name)
    stage.run()
    [event] = stage.terminals("b")
    assert isinstance(event, Failed)
    assert (event.kind, event.retryable) == ("internal", False)
    assert "unusable logits" in event.message
    assert stage.text("b") == "bad!"
    assert (stage.text("a"), stage.text("c")) == ("fine words", "other words")
    assert (stage.finish("a").finish, stage.finish("c").finish) == ("stop", "stop")


@pytest.mark.parametrize("where", ["prompt", "reply"])
def test_a_step_that_fails_ends_the_turn_at_fault_and_no_other(where: str) -> None:
    stage = Stage(staged(slots=3))
    stage.actor.faults.add(ord("#"))
    stage.script("a", "fine words")
    stage.script("b#" if where == "prompt" else "b", "bad # never")
    stage.script("c", "other words")
    stage.submit("a", "a")
    stage.submit("b", "b#" if where == "prompt" else "b")
    stage.submit("c", "c")
    stage.run()
    [event] = stage.terminals("b")
    assert isinstance(event, Failed)
    assert event.kind == "internal"
    assert "RuntimeError: the device stumbled over 35" in event.message
    assert stage.text("a") == "fine words"
    assert stage.text("c") == "other words"
    # rows that a failed step may have written are nobody's
    stage.finish("a")
    stage.finish("c")
    stage.submit("again", "b!", **limit(1))
    stage.run()
    assert stage.started("again").cached_tokens == 0


def test_a_decoder_or_a_copy_that_fails_ends_its_own_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(staged(slots=3))
    stage.script("a:", "fine words")
    stage.script("b:", "bad")
    stage.submit("a", "a:")
    stage.submit("b", "b:")

    def broken(token: int) -> str:
        raise ValueError(f"{token} is no text")

    monkeypatch.setattr(stage.core._live[key("b")].reply._detokenizer, "push", broken)
    stage.core.step()
    stage.submit("c", "a:c", **limit(1))
    monkeypatch.setattr(stage.loaded.runner, "share_rows", lambda *_: 1 // 0)
    stage.run()
    for name, part in (("b", "is no text"), ("c", "ZeroDivisionError")):
        [event] = stage.terminals(name)
        assert isinstance(event, Failed)
        assert part in event.message
    assert stage.finish("a").finish == "stop"
    assert stage.text("a") == "fine words"


def test_a_client_whose_events_cannot_be_delivered_is_given_up() -> None:
    stage = Stage(staged(slots=1))
    stage.script("ask", "a long answer")
    told: list[Event] = []

    def sink(event: Event) -> None:
        told.append(event)
        if len(told) == 3:
            raise BrokenPipeError("gone")

    stage.core.submit(stage.request("a", "ask"), sink)
    stage.run()
    assert len(told) == 3
    assert stage.core.live == 0
    assert stage.core.stats()["cached_rows"] == 0


def test_turns_share_steps_and_prompts_are_read_in_between() -> None:
    stage = Stage(staged(slots=3, chunk=8))
    stage.submit("a", "a", **limit(30))
    stage.submit("b", "b", **limit(30))
    for _ in range(3):
        stage.core.step()
    stage.submit("long", "x" * 40, **limit(2))
    stage.actor.steps.clear()
    for _ in range(5):
        stage.core.step()
    # a decode step of both between any two chunks of the long prompt
    assert stage.actor.steps == [2, 8] * 5
    stage.run()
    assert stage.result("a").batch == 3
    assert stage.result("long").usage.completion == 2


def test_a_short_prompt_is_answered_while_a_long_one_is_read() -> None:
    stage = Stage(staged(slots=2, chunk=8))
    stage.submit("long", "x" * 200, **limit(1))
    stage.core.step()
    stage.submit("short", "hi", **limit(1))
    stage.core.step()
    assert isinstance(stage.events["short"][-1], Ready)
    assert stage.core.stats()["turns"]["prefill"] == 1


def test_short_prompts_are_read_together() -> None:
    stage = Stage(staged(slots=4, chunk=8))
    for name, prompt in (("a", "abc"), ("b", "de"), ("c", "fgh"), ("d", "ij")):
        stage.submit(name, prompt, **limit(1))
    stage.run()
    assert stage.actor.steps == [7, 3]
    assert all(stage.result(name).usage.completion == 1 for name in "abcd")


def test_prompts_that_begin_alike_are_read_one_after_the_other() -> None:
    stage = Stage(staged(slots=3, chunk=100))
    system = "You are a helpful assistant. "
    for name in "abc":
        stage.submit(name, system + name, **limit(1))
    stage.run()
    assert stage.actor.steps == [len(system) + 1, 2]
    assert [stage.started(name).cached_tokens for name in "abc"] == [0, len(system), len(system)]


def test_equal_prompts_that_arrive_together_are_read_once() -> None:
    stage = Stage(staged(slots=4, chunk=8))
    for name in "abcd":
        stage.submit(name, "the same long prompt", **limit(3))
    stage.run()
    length = len("the same long prompt")
    assert [stage.started(name).cached_tokens for name in "abcd"] == [0] + [length - 1] * 3
    read = [fed for fed in stage.actor.fed if fed[1] < length]
    assert len(read) == length + 3


def test_reset_drops_what_is_cached_and_is_refused_while_turns_run() -> None:
    stage = Stage()
    stage.submit("a", "ask", **limit(3))
    with pytest.raises(BusyError, match="1 turns are running"):
        stage.core.reset()
    stage.finish("a")
    stage.core.reset()
    assert stage.core.stats()["cached_rows"] == 0
    stage.submit("b", "ask", **limit(3))
    stage.run()
    assert stage.started("b").cached_tokens == 0


def test_abort_all_ends_every_turn_with_the_reason() -> None:
    stage = Stage(staged(slots=1))
    for name in "abc":
        stage.submit(name, "ask", **limit(5))
    stage.core.step()
    stage.core.abort_all("the model is unloaded")
    for name in "abc":
        assert stage.terminals(name) == [Aborted(key(name), "the model is unloaded")]
    stage.run()
    assert stage.core.stats()["totals"]["aborted"] == 3


def test_times_are_those_of_the_clock() -> None:
    clock = Clock()
    stage = Stage(staged(slots=1, chunk=4), clock=clock)

    def tick(*_: object) -> None:
        clock.now += 0.5

    plain = stage.loaded.runner.step

    def slow(*args: object, **rest: object) -> object:
        tick()
        return plain(*args, **rest)  # type: ignore[arg-type]

    stage.loaded.runner.step = slow  # type: ignore[assignment,method-assign]
    stage.script("askaskas", "yes")
    stage.submit("first", "other", **limit(1))
    stage.submit("a", "askaskas")
    stage.run()
    stage.commit("first")
    stage.run()
    timings = stage.result("a").timings
    # the first turn took two chunks of half a second each
    assert (timings.queue_ms, timings.prefill_ms, timings.ttft_ms) == (1000, 1000, 2000)
    assert timings.latency_ms == 2000 + 3 * 500
    assert (timings.prefill_tok_s, timings.decode_tok_s) == (8.0, 2.0)


def check_stage(stage: Stage, names: list[str]) -> None:
    stage.core.integrity_check()
    for name in names:
        events = stage.events[name]
        ends = [event for event in events if isinstance(event, TERMINALS)]
        assert len(ends) <= 1
        assert not ends or events[-1] is ends[0]
        assert sum(isinstance(event, Started) for event in events) <= 1
        if len(events) > len(ends):
            assert isinstance(events[0], Started)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_turn_ends_once_and_says_what_it_says_alone(seed: int) -> None:
    chance = random.Random(seed)
    clock = Clock()
    loaded = staged(slots=3, chunk=chance.choice([1, 5, 8]))
    stage = Stage(loaded, clock=clock, max_queue=4, queue_timeout_s=40, commit_timeout_s=15)
    stage.actor.faults.add(ord("#"))
    # each prompt ends with a mark, so that none is the beginning of another one's reply
    lines = {
        "ask:": "yes and no",
        "ask more:": "no #",
        "as:": "so it was",
        "other words:": "a b c d e f",
        ":": "p",
    }
    for prompt, reply in lines.items():
        stage.script(prompt, reply)
    names: list[str] = []
    prompts: dict[str, str] = {}
    for number in range(400):
        action = chance.random()
        if action < 0.25:
            name, prompt = f"t{number}", chance.choice(list(lines))
            try:
                stage.submit(name, prompt, deadline=chance.choice([None, 30.0]))
                names.append(name)
                prompts[name] = prompt
            except QueueFullError:
                assert stage.core.stats()["turns"]["queued"] >= 4
        elif action < 0.35 and names:
            name = chance.choice(names[-6:])
            chance.choice([stage.core.cancel, stage.core.abort])(key(name))
        elif action < 0.5:
            for name in names[-8:]:
                stage.commit(name)
        else:
            clock.now += chance.choice([0, 1, 5])
            stage.core.step()
        check_stage(stage, names)
    stage.run()
    stage.core.abort_all("over")
    check_stage(stage, names)
    assert stage.core.live == 0
    assert stage.core.stats()["slots_busy"] == 0
    finished = 0
    for name in names:
        assert len(stage.terminals(name)) == 1
        assert lines[prompts[name]].startswith(stage.text(name))
        if isinstance(stage.terminals(name)[0], Done):
            finished += 1
            assert stage.text(name) == lines[prompts[name]]
    assert finished > 10


def test_the_integrity_check_finds_rows_that_the_cache_does_not_hold() -> None:
    stage = Stage()
    stage.submit("a", "ask", **limit(3))
    stage.finish("a")
    stage.core.integrity_check()
    slot = next(slot for slot in stage.core._slots._slots if slot.rows)
    slot.tokens.append(ids("x")[0])
    with pytest.raises(HipfireError, match="claims 5 rows of 6 tokens"):
        stage.core.integrity_check()


def test_the_opening_of_a_chat_is_what_the_template_writes() -> None:
    stage = Stage()
    stage.script(f"<|im_start|>user\nhi<|im_end|>\n{OPENING}", " hello")
    stage.chat("a", "hi")
    assert stage.finish("a").finish == "stop"
    assert stage.text("a") == " hello"
