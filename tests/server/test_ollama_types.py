"""What requests of Ollama's API mean, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from hipfire.base.errors import HipfireError
from hipfire.engine.turn import ResponseFormat, Thinking, TurnKey, TurnRequest
from hipfire.server.ollama_types import (
    OllamaRequest,
    keep_warnings,
    needs,
    read_chat,
    read_duration,
    read_generate,
)

KEY = TurnKey("ollama-1", 1)
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> OllamaRequest:
    return read_chat({"model": "tiny", "messages": HELLO, **fields}, KEY)


def generate(**fields: Any) -> OllamaRequest:
    return read_generate({"model": "tiny", "prompt": "Hello", **fields}, KEY)


def turn_of(asked: OllamaRequest) -> TurnRequest:
    assert asked.turn is not None
    return asked.turn


def test_a_plain_request_streams_and_leaves_the_rest_to_the_model() -> None:
    asked = chat()
    turn = turn_of(asked)
    assert asked.stream
    assert turn.messages == ({"role": "user", "content": "Hello"},)
    assert turn.generation.max_tokens is None
    assert turn.sampling_given == frozenset()
    assert turn.thinking == Thinking()
    assert not chat(stream=False).stream


def test_each_optional_field_as_null_is_as_if_absent() -> None:
    shared = ("stream", "options", "format", "think", "keep_alive", "logprobs", "top_logprobs")
    assert chat(**dict.fromkeys((*shared, "tools"))) == chat()
    own = ("system", "raw", "suffix", "template", "context", "images", "width")
    assert generate(**dict.fromkeys((*shared, *own))) == generate()


def test_options_reach_the_sampler_and_an_explicit_zero_is_a_choice() -> None:
    options = {
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.0,
        "repeat_penalty": 1.1,
        "repeat_last_n": 32,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 0,
        "num_predict": 7,
        "stop": ["END", "STOP"],
    }
    turn = turn_of(chat(options=options))
    sampling = turn.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 5, 0.5, 0.0)
    assert (sampling.repeat_penalty, sampling.penalty_window, sampling.seed) == (1.1, 32, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert turn.sampling_given is not None
    assert {"temperature", "min_p", "seed", "penalty_window"} <= turn.sampling_given
    assert (turn.generation.max_tokens, turn.generation.stop) == (7, ("END", "STOP"))


@pytest.mark.parametrize("limit", [-1, -2])
def test_a_negative_limit_is_until_the_end(limit: int) -> None:
    turn = turn_of(chat(options={"num_predict": limit, "seed": -1, "stop": "END"}))
    assert turn.generation.max_tokens is None
    assert turn.fit
    assert turn.sampling.seed is None
    assert turn.sampling_given == frozenset()
    assert turn.generation.stop == ("END",)


def test_options_that_ask_for_what_happens_anyway_are_taken() -> None:
    options = {"tfs_z": 1.0, "typical_p": 1, "mirostat": 0, "low_vram": False, "num_gpu": -1, "num_ctx": 512}
    # these say nothing without mirostat and without a context that is cut
    options |= {"mirostat_tau": 5.0, "mirostat_eta": 0.1, "num_keep": 24, "penalize_newline": True}
    asked = chat(options=options)
    assert (asked.context, asked.notes) == (512, ())


def test_options_of_speed_are_taken_and_the_client_is_told() -> None:
    asked = chat(options={"num_gpu": 99, "num_thread": 8, "num_batch": 512, "use_mmap": True, "seed": 1})
    assert [note.split()[0] for note in asked.notes] == [
        "options.num_batch",
        "options.num_gpu",
        "options.use_mmap",
        "options.num_thread",
    ]


@pytest.mark.parametrize(
    ("think", "expected"),
    [(True, Thinking(True)), (False, Thinking(False)), ("high", Thinking(True, "high"))],
)
def test_think(think: object, expected: Thinking) -> None:
    assert turn_of(chat(think=think)).thinking == expected


def test_format() -> None:
    schema = {"type": "object"}
    assert turn_of(chat(format="json")).response_format == ResponseFormat("json_object")
    assert turn_of(chat(format=schema)).response_format == ResponseFormat("json_schema", schema)
    assert turn_of(chat(format="")).response_format == ResponseFormat()


def test_a_tool_loop_becomes_calls_and_results() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "thinking": "I must look.",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "Rain"},
    ]
    turn = turn_of(chat(messages=messages, tools=[WEATHER]))
    assert turn.messages is not None
    assert list(turn.messages[2:]) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I must look.",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Köln"}},
                }
            ],
        },
        {"role": "tool", "content": "Rain", "name": "weather"},
    ]
    assert turn.tools == ({"type": "function", **WEATHER},)


def test_generate_is_a_chat_unless_it_is_raw() -> None:
    turn = turn_of(generate(system="Be brief."))
    assert turn.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    )
    raw = turn_of(generate(raw=True))
    assert (raw.prompt, raw.messages) == ("Hello", None)


def test_nothing_to_answer_only_loads_the_model() -> None:
    assert chat(messages=[]).turn is None
    assert generate(prompt="").turn is None
    assert generate(prompt="", raw=True).turn is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(300, 300), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("0", 0), (0, 0), ("1.5s", 1.5)],
)
def test_durations(value: object, seconds: float) -> None:
    assert read_duration(value, "keep_alive") == pytest.approx(seconds)


@pytest.mark.parametrize("value", [-1, "-1", "-5m", -0.5])
def test_negative_durations_are_for_ever(value: object) -> None:
    assert read_duration(value, "keep_alive") == float("inf")


def test_a_keep_alive_without_effect_is_told() -> None:
    assert keep_warnings(300, 300) == ()
    assert keep_warnings(None, 300) == ()
    assert keep_warnings(float("inf"), 0) == ()
    assert "300 s" in keep_warnings(1800, 300)[0]
    assert "always" in keep_warnings(60, 0)[0]


def test_more_context_than_the_model_was_loaded_with_is_refused() -> None:
    needs(None, 2048)
    needs(2048, 2048)
    with pytest.raises(HipfireError, match=r"num_ctx is 4096 .* 2048"):
        needs(4096, 2048)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": ""}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": "x", "thinking": "y"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "audio": "y"}]}, "messages[0].audio"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"think": "very"}, "think"),
        ({"format": "xml"}, "format"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx"),
        ({"options": {"num_gpu": "all"}}, "options.num_gpu"),
        ({"options": {"penalize_newline": False}}, "options.penalize_newline"),
        ({"options": {"mirostat_tau": "x"}}, "options.mirostat_tau"),
        ({"options": {"f16_kv": True}}, "options.f16_kv"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"temprature": 1}}, "did you mean temperature"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"streaming": True}, "did you mean stream"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(HipfireError) as caught:
        chat(**fields)
    assert caught.value.kind in ("validation", "unsupported")
    assert named in caught.value.line()


@pytest.mark.parametrize("name", ["suffix", "template", "context", "images", "width", "tools"])
def test_what_generate_cannot_do_is_refused_by_name(name: str) -> None:
    value = {"context": [1], "images": ["aGk="], "width": 5, "tools": [WEATHER]}.get(name, "x")
    with pytest.raises(HipfireError, match=name):
        generate(**{name: value})
    with pytest.raises(HipfireError, match="system"):
        generate(raw=True, system="Be brief.")
