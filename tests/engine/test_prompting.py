"""What a request's fields mean: sampling defaults, limits, thinking, history, tools; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from core_kit import (
    GREEDY,
    OPEN_TEMPLATE,
    OPENING,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    ids,
    limit,
    staged,
)

from hipfire.base.errors import ContextLengthError, UnsupportedError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.prompting import Prepared, Prompting
from hipfire.engine.turn import ResponseFormat, Thinking, ToolChoice, TurnKey, TurnRequest
from hipfire.runtime.load import LoadedModel
from tiny_models import TEMPLATE

USER = {"role": "user", "content": "hi"}


def prepared(
    loaded: LoadedModel | None = None,
    *messages: dict[str, Any],
    defaults: SamplingParams = GREEDY,
    default_max_tokens: int | None = None,
    **fields: Any,
) -> Prepared:
    if "prompt" not in fields:
        fields["messages"] = messages or (USER,)
    request = TurnRequest(TurnKey("a", 1), **fields)
    return Prompting(loaded or staged(), defaults, default_max_tokens).prepare(request)


def text(loaded: LoadedModel, turn: Prepared) -> str:
    return loaded.tokenizer.decode(turn.prompt, skip_special=False)


FILE = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}


def test_sampling_comes_from_the_request_then_the_file_then_the_defaults() -> None:
    loaded = staged(generation_config=FILE)
    defaults = SamplingParams(temperature=0.3, min_p=0.05, top_k=7)
    asked = SamplingParams(temperature=0.0, top_p=1.0, seed=0)
    given = frozenset({"temperature", "top_p", "seed"})
    turn = prepared(loaded, defaults=defaults, sampling=asked, sampling_given=given)
    # an explicit 0 or neutral value is a choice, and stays
    assert turn.sampling == SamplingParams(
        temperature=0.0, top_p=1.0, seed=0, top_k=20, min_p=0.05, repeat_penalty=1.1
    )
    nothing = prepared(loaded, defaults=defaults, sampling_given=frozenset())
    assert (nothing.sampling.temperature, nothing.sampling.top_p) == (0.6, 0.9)
    # without a word on it, all fields are chosen
    assert prepared(loaded, defaults=defaults, sampling=asked).sampling == asked


def test_a_file_that_does_not_sample_is_greedy() -> None:
    loaded = staged(generation_config={"do_sample": False})
    assert prepared(loaded, defaults=SamplingParams(), sampling_given=frozenset()).sampling.greedy


def test_a_value_of_the_file_that_is_not_allowed_is_passed_over_and_reported() -> None:
    loaded = staged(generation_config={"temperature": 9.0, "top_p": 0.5})
    prompting = Prompting(loaded, SamplingParams(temperature=0.3), None)
    [warning] = prompting.warnings
    assert "temperature is 9.0" in warning
    turn = prompting.prepare(TurnRequest(TurnKey("a", 1), prompt="x", sampling_given=frozenset()))
    assert (turn.sampling.temperature, turn.sampling.top_p) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("asked", "default", "fit", "budget"),
    [
        (None, None, False, 17),
        (None, 5, False, 5),
        (None, 99, False, 17),
        (9, 5, False, 9),
        (99, 5, True, 17),
    ],
)
def test_how_long_a_reply_may_be(asked: int | None, default: int | None, fit: bool, budget: int) -> None:
    loaded = staged(max_seq=20)
    turn = prepared(loaded, prompt="ask", default_max_tokens=default, fit=fit, **limit(asked))
    assert turn.budget == budget


def test_an_explicit_limit_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="21 tokens requested but the context holds 20"):
        prepared(staged(max_seq=20), prompt="ask", **limit(18))


def test_a_default_limit_yields_to_the_least_that_is_asked_for() -> None:
    generation = GenerationParams(min_tokens=8)
    assert prepared(prompt="ask", default_max_tokens=5, generation=generation).budget == 8


def test_a_base_model_continues_text_only() -> None:
    loaded = staged(template=None)
    assert prepared(loaded, prompt="ask").prompt == ids("ask")
    with pytest.raises(UnsupportedError, match="no chat template"):
        prepared(loaded)


@pytest.mark.parametrize(
    "fields", [{"tools": ({"name": "f"},)}, {"thinking": Thinking(True)}, {"thinking": Thinking(None, "low")}]
)
def test_plain_text_has_no_tools_and_no_thinking(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="need a conversation"):
        prepared(prompt="ask", **fields)


def test_control_tokens_in_the_callers_words_are_text() -> None:
    loaded = staged()
    turn = prepared(loaded, {"role": "user", "content": "<|im_end|>"})
    assert turn.prompt.count(257) == 1
    assert "<|im_end|><|im_end|>" in text(loaded, turn)


@pytest.mark.parametrize(
    ("template", "thinking", "ending", "warnings"),
    [
        (THINKING_TEMPLATE, Thinking(False), "<think>\n\n</think>\n\n", []),
        (THINKING_TEMPLATE, Thinking(True), OPENING, []),
        (THINKING_TEMPLATE, Thinking(), OPENING, []),
        (TEMPLATE, Thinking(False), OPENING, []),
        (TEMPLATE, Thinking(True), OPENING, ["does not think"]),
        (TEMPLATE, Thinking(cap=5), OPENING, ["cap of 5"]),
        (THINKING_TEMPLATE, Thinking(False, "high", 5), "</think>\n\n", ["effort", "cap of 5"]),
        (THINKING_TEMPLATE, Thinking(True, "high", 5), OPENING, ["effort 'high'"]),
        (OPEN_TEMPLATE, Thinking(True), "<think>\n", []),
        (OPEN_TEMPLATE, Thinking(False), "<think>\n</think>\n\n", []),
        (OPEN_TEMPLATE + "{{ reasoning_effort }}", Thinking(effort="low"), "<think>\nlow", []),
        (OPEN_TEMPLATE + "{{ reasoning_effort is defined }}", Thinking(), "<think>\nFalse", []),
    ],
)
def test_the_three_axes_of_thinking(
    template: str, thinking: Thinking, ending: str, warnings: list[str]
) -> None:
    loaded = staged(template=template)
    turn = prepared(loaded, thinking=thinking)
    assert text(loaded, turn).endswith(ending)
    assert len(turn.warnings) == len(warnings)
    assert all(part in line for part, line in zip(warnings, turn.warnings, strict=True))
    # a cap that has no effect is not kept
    assert turn.cap == (5 if thinking.enabled and thinking.cap and template == THINKING_TEMPLATE else 0)


def test_reasoning_in_the_history_is_told_apart_from_the_answer() -> None:
    template = TEMPLATE.replace("{{ m['content'] }}", "[{{ m.reasoning_content }}]{{ m['content'] }}")
    loaded = staged(template=template + "{{ '<think>' if false }}")
    for message in (
        {"content": "<think>hm</think>fine"},
        {"content": "fine", "reasoning_content": "hm"},
        {"content": "fine", "reasoning": "hm"},
        {"content": "<think>old</think>fine", "reasoning": "hm"},
    ):
        turn = prepared(loaded, USER, {"role": "assistant", **message}, USER)
        assert "assistant\n[hm]fine<|im_end|>" in text(loaded, turn)


def test_a_model_that_does_not_think_gets_its_words_back_as_they_were() -> None:
    loaded = staged()
    turn = prepared(loaded, USER, {"role": "assistant", "content": "write <think>x</think>"}, USER)
    assert "assistant\nwrite <think>x</think><|im_end|>" in text(loaded, turn)


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([], "system\nAnswer by calling one of the given functions.<|im_end|>"),
        (
            [{"role": "system", "content": "Be brief."}],
            "system\nBe brief.\n\nAnswer by calling one of the given functions.<|im_end|>",
        ),
        (
            [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
            "system\nBe brief.\nAnswer by calling one of the given functions.<|im_end|>",
        ),
    ],
)
def test_a_required_call_is_asked_for_in_the_system_message(
    first: list[dict[str, Any]], expected: str
) -> None:
    loaded = staged(template=TOOL_TEMPLATE, max_seq=1500)
    turn = prepared(loaded, *first, USER, tools=(LOOK,), tool_choice=ToolChoice("required"))
    assert expected in text(loaded, turn)


def test_a_request_may_not_bring_its_own_template() -> None:
    with pytest.raises(ValidationError, match="chat_template"):
        prepared(template_arguments={"chat_template": "{{ 1 }}"})
    loaded = staged(template=TEMPLATE + "{{ mood }}")
    assert text(loaded, prepared(loaded, template_arguments={"mood": "glad"})).endswith("glad")


def test_a_schema_without_a_schema_is_refused() -> None:
    with pytest.raises(ValidationError, match="no schema"):
        prepared(response_format=ResponseFormat("json_schema"))
    assert prepared(response_format=ResponseFormat("json_object")).grammar is not None
    assert prepared().grammar is None


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_cannot_fit_is_not_even_cut_into_tokens(
    chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, long = staged(), "x" * 40_000
    encode = type(loaded.tokenizer)._encode

    def noting(self: Any, piece: str, ordinary: Any) -> list[int]:
        assert len(piece) < 1000, "the text was tokenized"
        return encode(self, piece, ordinary)

    monkeypatch.setattr(type(loaded.tokenizer), "_encode", noting)
    messages = ({"role": "user", "content": long},) if chat else ()
    with pytest.raises(ContextLengthError) as caught:
        prepared(loaded, *messages, **({} if chat else {"prompt": long}))
    assert caught.value.requested >= 40_000 // loaded.tokenizer.longest_token > loaded.max_seq
