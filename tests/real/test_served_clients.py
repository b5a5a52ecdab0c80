"""SmolLM2 behind `hipfire serve`, talked to by the official clients of three APIs and by curl."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel
from serve_kit import MAX_SEQ, MODEL, SLOTS, Served, eventually, installed, serving
from served_talkers import TALKERS, OpenAITalker, Talker, openai_client, told

from hipfire import LLM, GenerationParams, LoadOptions
from hipfire.base.config_keys import KEYS
from hipfire.base.sampling import SamplingParams
from hipfire.engine.lock import is_alive, read_pid_file
from hipfire.engine.request import Completion

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
CAPITAL = "What is the capital of France?"
# enough that a chat's template is the smaller part of a prompt
STORY = "The keeper lit the lamp at dusk, and wrote the hour, the wind and the tide into a book. " * 6


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture(params=TALKERS)
def talker(request: pytest.FixtureRequest, served: Served) -> Talker:
    return TALKERS[request.param](served.url)


def settings_of_a_new_user() -> SamplingParams:
    """Greedy, and else what somebody without a settings file gets."""
    names = {each.name for each in fields(SamplingParams)}
    defaults = {key.flat: key.default for key in KEYS if key.flat in names}
    return SamplingParams(**{**defaults, "temperature": 0.0})  # type: ignore[arg-type]


def test_a_streamed_chat_of_two_turns(talker: Talker, served: Served) -> None:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    before = served.counters(*names)
    messages = user(f"I use {type(talker).__name__}. {CAPITAL}")
    usages, replies = [], []
    for limit in (24, 12):
        pieces = list(talker.stream(messages, limit))
        usage = told(talker)
        # a piece is a token or more: no half characters are sent, and the end of a turn is no text
        assert 3 < len(pieces) <= usage.completion <= limit
        assert usage.finish == ("length" if usage.completion == limit else "stop")
        usages.append(usage)
        replies.append("".join(pieces))
        messages = [*messages, {"role": "assistant", "content": replies[-1]}, *user("And of Italy?")]
    first, second = usages
    assert all(reply.strip() for reply in replies)
    assert second.prompt > first.prompt + first.completion
    prompts, cached, completions = map(int.__sub__, served.counters(*names), before)
    assert prompts == first.prompt + second.prompt
    assert completions == first.completion + second.completion
    # the second turn reads again what is new to it, at most
    if first.cached is not None and second.cached is not None:
        assert first.prompt <= second.cached < second.prompt
        assert cached == first.cached + second.cached
    assert cached >= first.prompt


@pytest.fixture(scope="module")
def offline() -> tuple[int, Completion]:
    """How long the question's prompt is, and what the offline API answers."""
    llm = LLM(installed().path, LoadOptions(max_seq=MAX_SEQ))
    completion = llm.chat(user(CAPITAL), settings_of_a_new_user(), GenerationParams(max_tokens=32))
    return len(llm.encode_chat(user(CAPITAL))), completion


def test_every_client_gets_the_text_that_the_offline_api_gives(
    talker: Talker, offline: tuple[int, Completion]
) -> None:
    prompt_tokens, completion = offline
    assert len(completion.text) > 20
    assert "".join(talker.stream(user(CAPITAL), 32)) == completion.text
    assert told(talker).prompt == prompt_tokens
    assert told(talker).completion == len(completion.tokens)


def test_a_reply_that_is_not_streamed_has_the_same_text(
    served: Served, offline: tuple[int, Completion]
) -> None:
    whole = served.chat(messages=user(CAPITAL), temperature=0, max_tokens=32)
    assert whole["choices"][0]["message"]["content"] == offline[1].text


def test_clients_that_leave_in_mid_stream_free_their_slots_and_are_forgotten(
    talker: Talker, served: Served
) -> None:
    (aborted,) = served.counters("requests_aborted")
    question = user(f"{type(talker).__name__}: {STORY}")
    for _ in range(SLOTS):
        # hundreds of tokens, of which three pieces are read
        with contextlib.closing(talker.stream(question, 700)) as pieces:
            assert len(list(islice(pieces, 3))) == 3
            assert served.stats()["running"] == 1
        assert served.idle()
    assert talker.usage is None
    assert served.counters("requests_aborted") == [aborted + SLOTS]
    # of what was read for them, nothing but the words that all chats begin with was kept
    usages = [served.chat(messages=question, temperature=0, max_tokens=2)["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] < usages[0]["prompt_tokens"] / 2
    assert cached[1] == usages[1]["prompt_tokens"] - 1


def test_a_stop_string_ends_a_reply_and_is_not_part_of_it(talker: Talker) -> None:
    whole = "".join(talker.stream(user(CAPITAL), 24))
    unstopped = told(talker).completion
    # from the middle of a word on
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    assert "".join(talker.stream(user(CAPITAL), 24, [stop, "never said"])) == whole[: whole.index(stop)]
    assert told(talker).finish == "stop"
    assert told(talker).completion < unstopped


def test_a_prompt_beyond_the_context_is_refused_by_name_and_harms_nothing(
    talker: Talker, served: Served
) -> None:
    status, said = talker.refused(user("word " * (MAX_SEQ + 50)))
    assert status == 400
    assert f"the context holds {MAX_SEQ}" in said
    kinds = {"OpenAITalker": "context_length_exceeded", "CurlTalker": "context_length_exceeded"}
    assert said.startswith(
        {**kinds, "AnthropicTalker": "invalid_request_error"}.get(type(talker).__name__, "")
    )
    assert served.idle()
    assert "".join(talker.stream(user(CAPITAL), 4))


class Colour(BaseModel):
    """What a reply must be."""

    colour: Literal["red", "green", "blue"]
    warm: bool


def test_a_reply_that_follows_a_schema_is_parsed_by_the_client(served: Served) -> None:
    completion = openai_client(served.url).chat.completions.parse(
        model=MODEL, messages=user("Red or blue?"), response_format=Colour, temperature=0, max_tokens=100
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Colour)


def test_choices_have_seeds_of_their_own(served: Served) -> None:
    def texts(**asked: Any) -> list[str]:
        reply = served.chat(messages=user("Tell me a story."), temperature=1, max_tokens=16, **asked)
        counts = reply["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        assert counts["completion_tokens"] <= 16 * len(reply["choices"])
        assert [choice["index"] for choice in reply["choices"]] == list(range(asked.get("n", 1)))
        return [choice["message"]["content"] for choice in reply["choices"]]

    both = texts(seed=7, n=2)
    assert both[0] != both[1]
    assert both == texts(seed=7) + texts(seed=8)


def test_sigterm_lets_a_reply_end_and_leaves_nothing_behind() -> None:
    with serving() as served:
        records = [read_pid_file(served.home / name) for name in ("serve.pid", "daemon.pid")]
        pids = [record.pid for record in records if record is not None]
        assert pids[0] == served.process.pid
        assert [is_alive(pid) for pid in pids] == [True, True]
        talker = OpenAITalker(served.url)
        pieces = talker.stream(user(STORY), 120)
        begun = list(islice(pieces, 3))
        served.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: refuses_connections(served))
        # the port is free while the reply is still written, to its end
        assert len(begun) + len(list(pieces)) > 20
        assert told(talker).finish in ("stop", "length")
        assert served.process.wait(30) == 0
        assert not any(is_alive(pid) for pid in pids)
        assert not (served.home / "serve.pid").exists()
        # a lock stays as a file, without an owner
        assert read_pid_file(served.home / "daemon.pid") is None
        assert "Traceback" not in (served.home / "log").read_text()


def refuses_connections(served: Served) -> bool:
    try:
        httpx.get(f"{served.url}/health", timeout=5, trust_env=False)
    except httpx.ConnectError:
        return True
    return False
