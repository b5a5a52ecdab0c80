"""Chats as the official `openai` client holds them, against a real server and a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from scripted_backend import MODEL, Call, End, Fail, Note, Say, ScriptedBackend, think
from server_kit import Live, eventually, serving

from hipfire.engine.turn import ResponseFormat, Thinking, ToolChoice

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def client_of(live: Live) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=live.url + "/v1",
        api_key="unused",
        max_retries=0,
        timeout=10,
        http_client=openai.DefaultHttpxClient(verify=False, trust_env=False),
    )


def test_streamed_two_turn_chat_replays_what_was_said() -> None:
    with serving([think("They greet."), Say("Good day!")], [Say("It is noon.")]) as live:
        client, messages = client_of(live), list(HELLO)
        answers = []
        for question in ("What time is it?", None):
            stream = client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            texts = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            answers.append("".join(delta.content or "" for delta in texts))
            reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in texts)
            assert reasoning == ("They greet." if question else "")
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.prompt_tokens == 12
            messages += [{"role": "assistant", "content": answers[-1]}]
            messages += [{"role": "user", "content": question}] if question else []
        assert answers == ["Good day!", "It is noon."]
        assert [message["content"] for message in live.backend.seen[1].messages or ()] == [
            "Hello",
            "Good day!",
            "What time is it?",
        ]
        assert eventually(lambda: list(live.backend.ended.values()) == ["done", "done"])


def test_whole_reply_has_everything_in_its_place() -> None:
    script = [think("Hm."), Say("Good day!"), Note("slow disk"), End(warnings=("effort dropped",), stop="\n")]
    with serving(script, backend=ScriptedBackend(cached_tokens=9)) as live:
        reply = client_of(live).chat.completions.create(model=MODEL, messages=HELLO)
        body = reply.model_dump()
        assert body["choices"][0]["finish_reason"] == "stop"
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Good day!", "Hm.")
        assert body["usage"]["completion_tokens"] == 4
        assert body["usage"]["total_tokens"] == 16
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 9
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
        assert body["timings"]["ttft_ms"] == 25.0
        assert body["hipfire"]["config_warnings"] == ["effort dropped", "slow disk"]
        assert body["hipfire"]["stop_sequence"] == "\n"
        assert body["hipfire"]["seed"] == 7
        assert body["id"].startswith("chatcmpl-")


def test_choices_run_at_once_and_have_seeds_of_their_own() -> None:
    def script(request: Any) -> list[Any]:
        return [Say(f"seed {request.sampling.seed}")]

    with serving(script, slots=2) as live:
        reply = client_of(live).chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=5)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert [choice.message.content for choice in reply.choices] == ["seed 5", "seed 6", "seed 7"]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (12, 6)
        stream = client_of(live).chat.completions.create(
            model=MODEL, messages=HELLO, n=2, seed=1, stream=True
        )
        texts = {0: "", 1: ""}
        ends = []
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            ends += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
        assert texts == {0: "seed 1", 1: "seed 2"}
        assert sorted(ends) == [0, 1]
        assert eventually(lambda: list(live.backend.ended.values()) == ["done"] * 5)
        assert live.backend.most_running > 1


def test_several_calls_have_indices_ids_and_arguments_of_their_own() -> None:
    calls = [Call("weather", {"city": "Köln"}), Call("weather", {"city": "Bonn"}), Call("news", {})]
    news = {"type": "function", "function": {"name": "news"}}
    with serving([Say("  "), *calls], [Say("Let me see."), calls[0]]) as live:
        client, tools = client_of(live), [WEATHER, news]
        whole = client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        made = whole.choices[0].message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in made] == [  # type: ignore[union-attr]
            {"city": "Köln"},
            {"city": "Bonn"},
            {},
        ]
        assert len({call.id for call in made}) == 3
        assert live.backend.seen[0].tool_choice == ToolChoice("required", parallel=False)
        live.backend.scripts = [calls]
        deltas = [
            call
            for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools, stream=True)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert [call.index for call in deltas] == [0, 1, 2]
        assert len({call.id for call in deltas} | {call.id for call in made}) == 6
        assert [call.function.name for call in deltas if call.function] == ["weather", "weather", "news"]
        assert json.loads(deltas[1].function.arguments) == {"city": "Bonn"}  # type: ignore[union-attr]


def test_tool_results_reach_the_engine_with_their_calls() -> None:
    with serving([Say("It rains.")]) as live:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"X"}'},
        }
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
        client_of(live).chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
        sent = live.backend.seen[0].messages or ()
        assert sent[1]["tool_calls"] == [call]
        assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        assert live.backend.seen[0].tools == (WEATHER,)


def test_logprobs_are_the_same_streamed_and_whole() -> None:
    with serving([think("abc"), Say("Good day!")]) as live:
        client = client_of(live)
        for top in (None, 0, 2, 20):
            options: Any = {"logprobs": True, **({} if top is None else {"top_logprobs": top})}
            whole = client.chat.completions.create(model=MODEL, messages=HELLO, **options)
            assert whole.choices[0].logprobs is not None
            content = whole.choices[0].logprobs.content or []
            assert "".join(token.token for token in content) == "Good day!"
            assert all(len(token.top_logprobs) == (top or 0) for token in content)
            assert bytes(content[0].bytes or []) == b"Goo"
            streamed = [
                token
                for chunk in client.chat.completions.create(
                    model=MODEL, messages=HELLO, stream=True, **options
                )
                if chunk.choices[0].logprobs
                for token in chunk.choices[0].logprobs.content or []
            ]
            assert streamed == content
        assert client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].logprobs is None


def test_schema_goes_to_the_engine_and_its_refusal_comes_back() -> None:
    refusal = Fail("validation", "the schema's minLength is not supported", before_start=True)
    with serving([Say('{"a": 1}')], [refusal]) as live:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        client = client_of(live)
        reply = client.chat.completions.create(model=MODEL, messages=HELLO, response_format=wanted)
        assert reply.choices[0].message.content == '{"a": 1}'
        assert live.backend.seen[0].response_format == ResponseFormat("json_schema", SCHEMA)
        with pytest.raises(openai.BadRequestError, match="minLength"):
            client.chat.completions.create(model=MODEL, messages=HELLO, response_format=wanted)


def test_errors_before_the_first_piece_have_their_status() -> None:
    kinds = {
        "validation": openai.BadRequestError,
        "context_length": openai.BadRequestError,
        "unsupported": openai.BadRequestError,
        "internal": openai.InternalServerError,
        "transient": openai.InternalServerError,
        "memory": openai.InternalServerError,
    }
    with serving() as live:
        client = client_of(live)
        for kind, error in kinds.items():
            live.backend.scripts = [[Fail(kind, "no room for it", before_start=True, hint="try less")]]
            for stream in (False, True):
                with pytest.raises(error, match="no room for it; try less") as caught:
                    client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
                assert ("retry-after" in caught.value.response.headers) is (caught.value.status_code == 503)
                code = "context_length_exceeded" if kind == "context_length" else kind
                assert caught.value.code == code


def test_unknown_model_is_404_and_names_the_field() -> None:
    with serving() as live, pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        client_of(live).chat.completions.create(model="gpt-5", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_thinking_reaches_the_engine() -> None:
    with serving() as live:
        client_of(live).chat.completions.create(
            model=MODEL,
            messages=HELLO,
            reasoning_effort="high",
            extra_body={"max_think_tokens": 99, "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
        )
        assert live.backend.seen[0].thinking == Thinking(True, "high", 99)
        assert live.backend.seen[0].template_arguments == {"x": 1}


def test_preserved_thinking_stands_in_the_content_too() -> None:
    with serving([think("Hm.\n"), Say("Yes.")]) as live:
        body: Any = {"chat_template_kwargs": {"preserve_thinking": True}}
        reply = client_of(live).chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
        assert reply.choices[0].message.content == "<think>\nHm.\n</think>\n\nYes."


def test_length_without_an_answer_is_an_empty_text() -> None:
    with serving([think("Hm"), End("length")]) as live:
        reply = client_of(live).chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("length", "")


def test_models_are_listed_and_described() -> None:
    with serving() as live:
        client = client_of(live)
        assert [model.id for model in client.models.list()] == ["other", MODEL]
        assert client.models.retrieve(MODEL).owned_by == "hipfire"
        assert client.models.retrieve(f"{MODEL}:latest").id == MODEL
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")
