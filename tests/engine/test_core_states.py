"""The core over a model with a running state: a turn computes what is new, and says what a cold one says."""

from __future__ import annotations

from typing import Any

import pytest
from core_kit import OPEN_TEMPLATE, Stage, ids, limit
from state_kit import STATES, staged_reader

from hipfire.cache.states import state_nbytes
from hipfire.engine.turn import Failed, TurnKey

EACH = state_nbytes(STATES)
LONG = "a long question about nothing in particular, "


def stage(*, slots: int = 1, template: str = OPEN_TEMPLATE, **limits: Any) -> Stage:
    made = Stage(staged_reader(slots=slots, template=template), **limits)
    made.actor.always = ids("hm</think>yes")
    return made


def prompt_of(*turns: str) -> str:
    roles = ("user", "assistant")
    said = "".join(f"<|im_start|>{roles[n % 2]}\n{text}<|im_end|>\n" for n, text in enumerate(turns))
    return said + "<|im_start|>assistant\n<think>\n"


def chat(made: Stage, name: str, *turns: str) -> int:
    """Run a chat turn to its end; returns how many tokens of its prompt were computed."""
    before = len(made.actor.fed)
    made.chat(name, *turns)
    result = made.finish(name)
    assert made.started(name).cached_tokens == result.usage.cached
    assert (
        len(made.actor.fed) - before
        == result.usage.prompt - result.usage.cached + result.usage.completion - 1
    )
    return result.usage.prompt - result.usage.cached


def test_the_second_turn_computes_its_suffix_alone() -> None:
    made = stage()
    chat(made, "1", LONG)
    new = chat(made, "2", LONG, "yes", "why?")
    # the answer as the template writes it, the question, and what opens the next answer
    assert new == len(ids("<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n")) + len(
        ids("<|im_start|>assistant\n<think>\n")
    )
    # once more, edited, and from the first question on
    opening = len(ids("<|im_start|>assistant\n<think>\n"))
    assert chat(made, "3", LONG, "yes", "why?") == opening
    edited = chat(made, "4", LONG, "yes", "when?")
    assert edited == new + len("when?") - len("why?")
    assert chat(made, "5", LONG) == opening
    assert {made.text(name) for name in "12345"} == {made.text("1")}
    stats = made.core.stats()["checkpoints"]
    assert stats["hits"] == 4
    assert stats["bytes"] == stats["count"] * EACH > 0


@pytest.mark.parametrize("how", ["cancel", "abort", "deliver"])
def test_a_turn_that_was_given_up_leaves_nothing_behind(how: str) -> None:
    made = stage()
    chat(made, "1", LONG)
    made.chat("2", LONG, "yes", "why?")
    made.run(9)
    getattr(made.core, "cancel" if how == "cancel" else "abort")(TurnKey("2", 1))
    made.run()
    assert chat(made, "3", LONG, "yes", "what?") == chat(stage_after_one(), "x", LONG, "yes", "what?")


def stage_after_one() -> Stage:
    made = stage()
    chat(made, "1", LONG)
    return made


def test_a_fault_fails_its_turns_and_nothing_is_gone_on_from() -> None:
    made = stage(slots=2)
    chat(made, "1", LONG)
    made.actor.faults.add(ord("!"))
    made.chat("2", LONG, "yes", "why!")
    made.run()
    assert isinstance(made.events["2"][-1], Failed)
    made.actor.faults.clear()
    chat(made, "3", LONG, "yes", "why!")
    assert made.text("3") == made.text("1")


def test_conversations_beside_each_other_share_what_they_can() -> None:
    made = stage(slots=3)
    for name in "abc":
        made.chat(name, LONG, **limit(40))
    made.run()
    for name in "abc":
        made.commit(name)
    # the first computes the question, the others wait for it and copy its rows with its state
    opening = len(ids("<|im_start|>assistant\n<think>\n"))
    usages = [made.result(name).usage for name in "abc"]
    assert sorted(usage.prompt - usage.cached for usage in usages) == [opening, opening, usages[0].prompt]
    made.chat("d", LONG, "yes", "one")
    made.chat("e", LONG, "yes", "two")
    made.run()
    assert {made.text(name) for name in "abcde"} == {made.text("a")}


@pytest.mark.parametrize("budget", [0, EACH, 2 * EACH])
def test_a_small_budget_only_costs_time(budget: int) -> None:
    made = stage(state_budget=budget, state_interval=16)
    for number, question in enumerate(("why?", "when?", "why?")):
        chat(made, f"{number}", LONG, "yes", question)
    assert made.core.stats()["checkpoints"]["bytes"] <= budget
    assert len({made.text(f"{number}") for number in range(3)}) == 1


def test_plain_text_resumes_at_intervals() -> None:
    made = stage(state_interval=16)
    text = "0123456789" * 10
    for name, prompt in (("1", text), ("2", text[:70] + "x"), ("3", text)):
        made.submit(name, prompt, **limit(1))
        made.finish(name)
    assert [made.started(name).cached_tokens for name in "123"] == [0, 64, 64]


def test_a_reset_forgets_all_states() -> None:
    made = stage()
    chat(made, "1", LONG)
    made.core.reset()
    assert made.core.stats()["checkpoints"] == {"count": 0, "bytes": 0, "hits": 0}
    assert chat(made, "2", LONG) == len(ids(prompt_of(LONG)))
