"""The clients that people use to talk to a server, each behind the same two methods.

All ask for greedy replies and leave everything else to the server, so that their replies compare.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anthropic
import ollama
import openai
import pytest
from serve_kit import MODEL

CURL = ("curl", "--silent", "--show-error", "--no-buffer", "--noproxy", "*", "--max-time", "60")
# Anthropic's words for how a reply ended
ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
# the clients ask for types of their own, which are dictionaries like these
Messages = Sequence[Any]


@dataclass
class Usage:
    """What a client was told at a reply's end; `cached` is None where its API does not tell it.

    `prompt` counts cached tokens too. `finish` is "stop" or "length".
    """

    prompt: int
    completion: int
    cached: int | None
    finish: str


class Talker(Protocol):
    """One client. `usage` is that of the last reply that was read to its end."""

    usage: Usage | None

    def stream(self, messages: Messages, max_tokens: int, stop: Sequence[str] = ()) -> Generator[str]:
        """Yield the pieces of a reply as they arrive; closing the iterator leaves."""

    def refused(self, messages: Messages) -> tuple[int, str]:
        """Send what must be refused; return the status and what the error says."""


def openai_client(url: str) -> openai.OpenAI:
    """Return the official client, which is not to repeat what fails."""
    return openai.OpenAI(
        base_url=url + "/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        http_client=openai.DefaultHttpxClient(verify=False, trust_env=False),
    )


def told(talker: Talker) -> Usage:
    """Return what a client was told at the end of a reply, which must have come."""
    assert talker.usage is not None
    return talker.usage


class OpenAITalker:
    """The official client of OpenAI's API."""

    def __init__(self, url: str) -> None:
        self.usage: Usage | None = None
        self._client = openai_client(url)

    def stream(self, messages: Messages, max_tokens: int, stop: Sequence[str] = ()) -> Generator[str]:
        finish, counts = "", None
        with self._client.chat.completions.create(
            model=MODEL,
            messages=messages,
            temperature=0,
            max_tokens=max_tokens,
            stop=list(stop) or None,
            stream=True,
            stream_options={"include_usage": True},
        ) as chunks:
            for chunk in chunks:
                counts = chunk.usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    if choice.delta.content:
                        yield choice.delta.content
        assert counts is not None
        assert counts.prompt_tokens_details is not None
        assert counts.total_tokens == counts.prompt_tokens + counts.completion_tokens
        cached = counts.prompt_tokens_details.cached_tokens
        self.usage = Usage(counts.prompt_tokens, counts.completion_tokens, cached, finish)

    def refused(self, messages: Messages) -> tuple[int, str]:
        with pytest.raises(openai.BadRequestError) as caught:
            list(self.stream(messages, 8))
        return caught.value.status_code, f"{caught.value.code}: {caught.value.message}"


class AnthropicTalker:
    """The official client of Anthropic's API."""

    def __init__(self, url: str) -> None:
        self.usage: Usage | None = None
        self._client = anthropic.Anthropic(
            base_url=url,
            api_key="none",
            max_retries=0,
            timeout=60,
            http_client=anthropic.DefaultHttpxClient(verify=False, trust_env=False),
        )

    def stream(self, messages: Messages, max_tokens: int, stop: Sequence[str] = ()) -> Generator[str]:
        with self._client.messages.stream(
            model=MODEL,
            messages=messages,
            max_tokens=max_tokens,
            stop_sequences=list(stop),
            # newer versions of this client have no name for it
            extra_body={"temperature": 0},
        ) as events:
            yield from events.text_stream
            end = events.get_final_message()
        cached = end.usage.cache_read_input_tokens or 0
        self.usage = Usage(
            end.usage.input_tokens + cached, end.usage.output_tokens, cached, ENDS[str(end.stop_reason)]
        )

    def refused(self, messages: Messages) -> tuple[int, str]:
        with pytest.raises(anthropic.BadRequestError) as caught:
            list(self.stream(messages, 8))
        assert isinstance(caught.value.body, dict)
        error = caught.value.body["error"]
        return caught.value.status_code, f"{error['type']}: {error['message']}"


class OllamaTalker:
    """The official client of Ollama's API, which tells no cached tokens."""

    def __init__(self, url: str) -> None:
        self.usage: Usage | None = None
        self._client = ollama.Client(host=url, verify=False, trust_env=False, timeout=60)

    def stream(self, messages: Messages, max_tokens: int, stop: Sequence[str] = ()) -> Generator[str]:
        options = {"temperature": 0, "num_predict": max_tokens, "stop": list(stop)}
        parts = self._client.chat(MODEL, list(messages), stream=True, options=options)
        try:
            for part in parts:
                if part.message.content:
                    yield part.message.content
        finally:
            parts.close()  # type: ignore[attr-defined]
        assert part.done
        self.usage = Usage(
            part.prompt_eval_count or 0, part.eval_count or 0, None, part.done_reason or "none"
        )

    def refused(self, messages: Messages) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as caught:
            list(self.stream(messages, 8))
        return caught.value.status_code, caught.value.error


class CurlTalker:
    """The program `curl`, asked as docs/serve.md shows."""

    def __init__(self, url: str) -> None:
        if shutil.which("curl") is None:
            pytest.skip("not run: curl is not installed")
        self.usage: Usage | None = None
        self._words = [*CURL, f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]

    def stream(self, messages: Messages, max_tokens: int, stop: Sequence[str] = ()) -> Generator[str]:
        body = {**_body(messages, max_tokens), "stream": True, "stream_options": {"include_usage": True}}
        words = [*self._words, json.dumps({**body, "stop": list(stop)} if stop else body)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        finish: str = ""
        counts: dict[str, Any] = {}
        try:
            for data in iter(partial(_next_data, process.stdout), "[DONE]"):
                chunk = json.loads(data)
                counts = chunk.get("usage", counts)
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        self.usage = Usage(counts["prompt_tokens"], counts["completion_tokens"], cached, finish)

    def refused(self, messages: Messages) -> tuple[int, str]:
        words = [*self._words, json.dumps(_body(messages, 8)), "--write-out", "\n%{http_code}"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        answer, _, status = said.rpartition("\n")
        error = json.loads(answer)["error"]
        return int(status), f"{error['code']}: {error['message']}"


TALKERS: dict[str, Callable[[str], Talker]] = {
    "openai": OpenAITalker,
    "anthropic": AnthropicTalker,
    "ollama": OllamaTalker,
    "curl": CurlTalker,
}


def _body(messages: Messages, max_tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}


def _next_data(lines: Any) -> str:
    """Return what the next data line of a stream holds."""
    for line in lines:
        if line.startswith("data: "):
            return str(line).removeprefix("data: ").strip()
    raise AssertionError("the stream ended without [DONE]")
