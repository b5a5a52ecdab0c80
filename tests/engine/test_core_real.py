"""The core with SmolLM2: equal bytes in any company, a chat whose turns reuse one another, a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.checkpoint.library import open_library
from hipfire.engine.core import CoreLimits, EngineCore
from hipfire.engine.generate import Generation
from hipfire.engine.request import Request
from hipfire.engine.turn import (
    Delta,
    Event,
    Ready,
    ResponseFormat,
    Started,
    TurnKey,
    TurnRequest,
    TurnResult,
)
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue? " * 8,
    "Write one short sentence about a lighthouse.",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model = open_library().find("smollm2:135m")
    if model is None:
        pytest.skip("not run: smollm2:135m is not installed (hipfire pull smollm2:135m)")
    return load_model(model.path, LoadOptions(kv_cache="q8", max_seq=1024, slots=4, prefill_chunk=128))


def submit(core: EngineCore, name: str, messages: list[dict[str, str]], **fields: Any) -> list[Event]:
    events: list[Event] = []
    request = TurnRequest(
        TurnKey(name, 1),
        messages=tuple(messages),
        sampling=SamplingParams(temperature=0.0),
        generation=GenerationParams(max_tokens=14),
        **fields,
    )
    core.submit(request, events.append)
    return events


def run(core: EngineCore) -> None:
    while core.step():
        pass
    core.integrity_check()


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def offline(loaded: LoadedModel, question: str) -> str:
    """What the single-stream API says."""
    assert loaded.templates is not None
    prompt = loaded.tokenizer.encode_chat(loaded.templates.chat.render([user(question)]))
    greedy, limit = SamplingParams(temperature=0.0), GenerationParams(max_tokens=14)
    return "".join(Generation(loaded, Request(tuple(prompt), greedy, limit), continues=False))


def test_equal_requests_give_equal_bytes_whatever_runs_beside_them(loaded: LoadedModel) -> None:
    core, alone = EngineCore(loaded, CoreLimits(prefill_chunk=128)), []
    for number, question in enumerate(QUESTIONS):
        events = submit(core, str(number), [user(question)])
        run(core)
        alone.append(said(events))
        core.abort(TurnKey(str(number), 1))
        core.reset()
    assert alone == [offline(loaded, question) for question in QUESTIONS]
    assert len(set(alone)) == len(QUESTIONS)
    for chunk in (16,):
        core = EngineCore(loaded, CoreLimits(prefill_chunk=chunk))
        together = [submit(core, str(n), [user(question)]) for n, question in enumerate(QUESTIONS)]
        run(core)
        assert [said(events) for events in together] == alone
        results: list[TurnResult] = [e.result for each in together for e in each if isinstance(e, Ready)]
        assert max(result.batch for result in results) == 4


def test_every_turn_of_a_chat_reuses_all_before_it_and_says_what_a_cold_one_says(
    loaded: LoadedModel,
) -> None:
    core, messages, cached, replies = EngineCore(loaded, CoreLimits()), [], [], []
    for turn, question in enumerate(QUESTIONS[:2] + QUESTIONS[3:]):
        messages.append(user(question))
        events = submit(core, str(turn), messages)
        run(core)
        core.commit(TurnKey(str(turn), 1))
        cached.append(next(event.cached_tokens for event in events if isinstance(event, Started)))
        replies.append(said(events))
        if turn:
            # the whole conversation but for the end of its last reply and the new question
            prompt = next(event.prompt_tokens for event in events if isinstance(event, Started))
            assert cached[-1] > 0.6 * prompt
        messages.append({"role": "assistant", "content": replies[-1]})
    assert cached[0] == 0
    assert cached == sorted(set(cached))
    core.reset()
    cold = submit(core, "cold", messages[:-1])
    run(core)
    assert said(cold) == replies[-1]


def test_a_real_vocabulary_follows_a_schema(loaded: LoadedModel) -> None:
    core = EngineCore(loaded, CoreLimits())
    messages = [user("Name a large city and how many people live there, as JSON.")]
    events = submit(core, "a", messages, response_format=ResponseFormat("json_schema", SCHEMA))
    plain = submit(core, "b", [user(QUESTIONS[0])])
    run(core)
    result = next(event.result for event in events if isinstance(event, Ready))
    if result.finish == "stop":
        made = json.loads(said(events))
        assert set(made) == {"city", "people"}
        assert isinstance(made["people"], int)
    else:
        assert said(events).lstrip().startswith('{"city')
    assert said(plain) == offline(loaded, QUESTIONS[0])
