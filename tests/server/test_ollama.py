"""Ollama's API as its own client sees it, over a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from scripted_backend import MODEL, Call, End, Fail, Hold, Note, Say, Script, Wait, think
from server_kit import OTHER, Live, eventually, serving

from hipfire.base.errors import MemoryLimitError

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with serving(head_delay_s=0.15, keepalive_s=0.05, idle_timeout_s=300) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> ollama.Client:
    return ollama.Client(host=server.url)


def script(server: Live, *scripts: Script, cached: int = 0) -> None:
    server.backend.scripts[:] = scripts
    server.backend.cached_tokens = cached


def lines(server: Live, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return a stream's objects, one a line, as they came."""
    response = server.post(path, {"model": MODEL, **fields})
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def ended(server: Live) -> str:
    """Return how the last turn ended, once it has."""
    key = server.backend.seen[-1].key
    assert eventually(lambda: key in server.backend.ended)
    return server.backend.ended[key]


def test_a_streamed_chat_of_two_turns(server: Live, client: ollama.Client) -> None:
    script(server, [Say("Hällo, 世界!")], [Say("Goodbye!")], cached=8)
    messages: list[Any] = list(HELLO)
    first = list(client.chat(MODEL, messages, stream=True))
    text = "".join(part.message.content or "" for part in first)
    assert text == "Hällo, 世界!"
    assert [part.done for part in first[-2:]] == [False, True]
    assert first[-1].done_reason == "stop"
    assert ended(server) == "done"

    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    second = list(client.chat(MODEL, messages, stream=True))
    assert "".join(part.message.content or "" for part in second) == "Goodbye!"
    assert (second[-1].prompt_eval_count, second[-1].eval_count) == (12, 3)
    assert server.backend.seen[-1].messages == tuple(messages)


def test_the_default_is_to_stream_and_times_are_in_utc(server: Live) -> None:
    script(server, [Say("Hi", size=9)])
    told = lines(server, "/api/chat", messages=HELLO)
    assert [part["message"]["content"] for part in told] == ["Hi", ""]
    for part in told:
        made = datetime.fromisoformat(part["created_at"])
        assert part["created_at"].endswith("Z")
        assert abs(datetime.now(UTC) - made) < timedelta(minutes=1)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls(server: Live, client: ollama.Client, stream: bool) -> None:
    calls = [Call("weather", {"city": "Köln"}), Call("weather", {"days": [1, 2]})]
    script(server, [think("I must look."), Say("Looking."), *calls])
    if stream:
        parts = list(client.chat(MODEL, HELLO, tools=[TOOL], think=True, stream=True))
    else:
        parts = [client.chat(MODEL, HELLO, tools=[TOOL], think=True)]
    assert "".join(part.message.thinking or "" for part in parts) == "I must look."
    assert "".join(part.message.content or "" for part in parts) == "Looking."
    made = [call.function for part in parts for call in part.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in made] == [
        ("weather", {"city": "Köln"}),
        ("weather", {"days": [1, 2]}),
    ]
    assert server.backend.seen[-1].thinking.enabled is True


def test_generate_with_a_system_prompt_and_raw(server: Live, client: ollama.Client) -> None:
    script(server, [Say("Once"), End("length")])
    made = client.generate(MODEL, "Hello", system="Be brief.", options={"num_predict": 1})
    assert (made.response, made.done_reason) == ("Once", "length")
    assert server.backend.seen[-1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    )
    parts = list(client.generate(MODEL, "Upon a", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == "Once"
    assert server.backend.seen[-1].prompt == "Upon a"


def test_durations_are_nanoseconds_that_add_up(server: Live, client: ollama.Client) -> None:
    script(server, [Wait(0.2), Say("Hi")])
    began = time.monotonic_ns()
    made = client.chat(MODEL, HELLO)
    waited = time.monotonic_ns() - began
    assert made.total_duration is not None
    assert made.load_duration is not None
    assert 0.2e9 < made.total_duration < waited
    assert 0 < made.load_duration < made.total_duration
    assert made.prompt_eval_duration == 20_000_000
    assert made.eval_duration == 104_000_000


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Live, client: ollama.Client, stream: bool) -> None:
    script(server, [Say("Hello!")])
    fields: Any = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    parts = list(client.chat(**fields, stream=True)) if stream else [client.chat(**fields)]
    tokens = [token for part in parts for token in part.logprobs or []]
    assert [(token.token, token.logprob) for token in tokens] == [("Hel", -0.5), ("lo!", -0.5)]
    assert [len(token.top_logprobs or []) for token in tokens] == [2, 2]


def test_warnings_are_told(server: Live) -> None:
    script(server, [Note("no such effort"), Say("Hi")])
    last = lines(server, "/api/chat", messages=HELLO, keep_alive="30m")[-1]
    keep, note = last["hipfire"]["config_warnings"]
    assert "keep_alive has no effect" in keep
    assert note == "no such effort"


def test_options_without_effect_are_told_at_the_end(server: Live) -> None:
    script(server, [Say("Hi")])
    body = {"model": MODEL, "options": {"num_thread": 8}, "keep_alive": "2h", "stream": False}
    for messages in (HELLO, []):
        made = server.post("/api/chat", {**body, "messages": messages}).json()
        told = [text.split()[0] for text in made["hipfire"]["config_warnings"]]
        assert told == ["options.num_thread", "keep_alive"]


def test_an_empty_conversation_loads_the_model(server: Live, client: ollama.Client) -> None:
    script(server, [Say("Hi")])
    assert client.chat(OTHER, []).done_reason == "load"
    assert server.backend.loads[-1][0].stem == OTHER
    assert [model.model for model in client.ps().models] == [OTHER]
    made = client.generate(MODEL, "")
    assert (made.done, made.done_reason, made.response) == (True, "load", "")
    assert [model.model for model in client.ps().models] == [MODEL]
    assert ended(server) == "aborted"
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        client.generate(MODEL, "", keep_alive=0)


def test_a_name_with_and_without_latest_is_the_same(server: Live, client: ollama.Client) -> None:
    script(server, [Say("Hi")])
    for name in (OTHER, f"{OTHER}:latest"):
        assert client.chat(name, HELLO).message.content == "Hi"
        assert server.backend.loads[-1][0].stem == OTHER


def test_models_are_listed(server: Live, client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {MODEL, OTHER}
    assert listed[MODEL].size == 5
    assert listed[MODEL].modified_at is not None
    script(server, [Say("Hi")])
    client.chat(MODEL, HELLO)
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == (MODEL, 2048)
    assert loaded.expires_at is not None
    assert timedelta() < loaded.expires_at - datetime.now(UTC) <= timedelta(seconds=300)
    # clients compare the version
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_word_is_a_response(
    server: Live, client: ollama.Client, stream: bool
) -> None:
    script(server, [Fail("context_length", "5000 tokens requested but the context holds 2048")])
    fields: Any = {"stream": stream}
    with pytest.raises(ollama.ResponseError, match=r"5000 .* 2048") as caught:
        list(client.chat(MODEL, HELLO, **fields))
    assert caught.value.status_code == 400


def test_a_failure_in_mid_stream_is_the_last_line(server: Live, client: ollama.Client) -> None:
    script(server, [Say("Hel"), Fail("transient", "the engine died")])
    told: list[str] = []
    with pytest.raises(ollama.ResponseError, match="the engine died"):
        told.extend(part.message.content or "" for part in client.chat(MODEL, HELLO, stream=True))
    assert told == ["Hel"]


def test_errors_have_a_status_and_one_line(server: Live, client: ollama.Client) -> None:
    script(server, [Say("Hi")])
    with pytest.raises(ollama.ResponseError, match="no-such-model") as caught:
        client.chat("no-such-model", HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="num_ctx") as caught:
        client.chat(MODEL, HELLO, options={"num_ctx": 4096})
    assert caught.value.status_code == 400
    assert ended(server) == "aborted"
    with pytest.raises(ollama.ResponseError, match="/api/pull") as caught:
        client.pull(MODEL)
    assert caught.value.status_code == 404
    broken = server.post("/api/chat", b"[]")
    assert (broken.status_code, list(broken.json())) == (400, ["error"])


def test_a_model_that_does_not_fit_is_told_with_both_numbers(server: Live, client: ollama.Client) -> None:
    server.backend.load_error = MemoryLimitError(8 * 2**30, 2**30, what="the model")
    resident = server.backend.loaded()
    assert resident is not None
    name = OTHER if resident.path.stem == MODEL else MODEL
    try:
        with pytest.raises(ollama.ResponseError, match=r"8192 MiB .* 1024 MiB") as caught:
            client.chat(name, HELLO)
    finally:
        server.backend.load_error = None
    assert caught.value.status_code == 503


def test_silence_is_filled_with_what_json_skips(server: Live, client: ollama.Client) -> None:
    script(server, [Wait(0.3), Say("Hi"), Wait(0.15), Say("!")])
    raw = server.post("/api/chat", {"model": MODEL, "messages": HELLO}).text
    assert raw.startswith(" ")
    parts = list(client.chat(MODEL, HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Hi!"


def test_a_client_that_leaves_stops_its_turn(server: Live, client: ollama.Client) -> None:
    never = threading.Event()
    script(server, [Say("Hello"), Hold(never), Say("World")])
    stream: Any = client.chat(MODEL, HELLO, stream=True)
    next(iter(stream))
    left = time.monotonic()
    stream.close()
    assert ended(server) == "aborted"
    assert time.monotonic() - left < 2
    assert server.backend.seen[-1].key not in server.backend.commits
    assert eventually(lambda: server.service.stats()["running"] == 0)


def test_show_tells_of_a_file_that_is_no_model(server: Live, client: ollama.Client, tmp_path: Path) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.show(MODEL)
    assert caught.value.status_code == 500
    with pytest.raises(ollama.ResponseError) as caught:
        client.show("no-such-model")
    assert caught.value.status_code == 404
