"""Plain completions as the official `openai` client asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_backend import MODEL, End, Say, Step
from server_kit import Live, eventually, frames, serving

from hipfire.engine.turn import TurnRequest

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as running:
        yield running


def echo(request: TurnRequest) -> list[Step]:
    return [Say(f" after {request.prompt}")]


def test_text_goes_on_streamed_and_whole(live: Live) -> None:
    live.backend.scripts = [[Say(" upon a time"), End("length")]]
    client = openai.OpenAI(
        base_url=live.url + "/v1",
        api_key="unused",
        max_retries=0,
        timeout=10,
        http_client=openai.DefaultHttpxClient(verify=False, trust_env=False),
    )
    whole = client.completions.create(model=MODEL, prompt="Once ", max_tokens=3)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" upon a time", "length")
    assert whole.id.startswith("cmpl-")
    assert whole.usage is not None
    assert whole.usage.total_tokens == 16
    # the prompt is the client's, to the last space
    assert live.backend.seen[-1].prompt == "Once "
    assert live.backend.seen[-1].messages is None
    chunks = list(client.completions.create(model=MODEL, prompt="Once ", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " upon a time"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert eventually(lambda: set(live.backend.ended.values()) == {"done"})


def test_several_prompts_and_choices_keep_their_order(live: Live) -> None:
    live.backend.scripts = [echo]
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "echo": True}
    reply = live.post(PATH, body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["a after a"] * 2 + ["b after b"] * 2
    # two prompts of 12 tokens, four replies of 3 pieces
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (24, 12)


def test_streamed_echo_comes_first(live: Live) -> None:
    live.backend.scripts = [echo]
    body = {"model": MODEL, "prompt": "a", "echo": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    *chunks, usage, end = frames(live.post(PATH, body).text.splitlines())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a after a"
    assert chunks[0]["choices"][0]["text"] == "a"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert end == "[DONE]"


def test_logprobs_have_their_own_form_and_offsets(live: Live) -> None:
    live.backend.scripts = [[Say("abcdefg")]]
    told = live.post(PATH, {"model": MODEL, "prompt": "x", "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["abc", "def", "g"]
    assert told["text_offset"] == [0, 3, 6]
    assert told["token_logprobs"] == [-0.5] * 3
    assert told["top_logprobs"][2] == {"g0": -1.0, "g1": -2.0}
    body = {"model": MODEL, "prompt": "x", "logprobs": 2, "stream": True}
    chunks = frames(live.post(PATH, body).text.splitlines())[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 3, 6]
    assert [token for part in parts for token in part["tokens"]] == told["tokens"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": ["x"] * 4, "n": 5}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
    ],
    ids=str,
)
def test_field_is_refused_by_name(live: Live, fields: dict[str, Any], named: str) -> None:
    response = live.post(PATH, {"model": MODEL, "prompt": "Once", **fields})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    # and the next request works
    live.backend.scripts = [[Say("x")]]
    assert live.post(PATH, {"model": MODEL, "prompt": "Once"}).status_code == 200
