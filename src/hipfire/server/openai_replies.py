"""Replies of OpenAI's API: messages, chunks, usage, timings and log-probabilities as JSON values.

Plain functions of what a turn said and how it ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hipfire.engine.turn import Delta, Info, TextLogprob, Thinking, TurnResult
from hipfire.server.errors import openai_body
from hipfire.server.reply import Reply
from hipfire.server.sse import DONE, ErrorShape, data_frame

ERRORS = ErrorShape(openai_body, lambda error: data_frame(openai_body(error)) + DONE)


@dataclass
class Said:
    """What one turn has said so far."""

    answer: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, event: Delta | Info) -> None:
        """Take in one event."""
        if isinstance(event, Info):
            self.notes.append(event.message)
        elif event.channel == "reasoning":
            self.reasoning.append(event.text)
        else:
            self.answer.append(event.text)
            self.logprobs += event.logprobs


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one reply carries."""

    id: str
    kind: str
    created: int
    model: str

    def around(self, choices: Sequence[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """Return an object with these choices; `kind` is its type."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **extra,
        }


def message(said: Said, reply: Reply, *, inline_thinking: bool) -> dict[str, Any]:
    """Return the assistant's message; content is null for a turn that only calls tools."""
    answer, reasoning = "".join(said.answer), "".join(said.reasoning)
    calls = tool_calls(reply)
    content: str | None = answer
    if inline_thinking and reasoning:
        content = f"<think>\n{reasoning.strip()}\n</think>\n\n{answer}"
    elif calls and not answer.strip():
        content = None
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    return {**made, "tool_calls": calls} if calls else made


def tool_calls(reply: Reply) -> list[dict[str, Any]]:
    """Return the calls, with ids that no other turn of this server has; arguments are JSON text."""
    number = reply.key.id.partition("-")[2]
    return [
        {
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for index, call in enumerate(reply.result.calls)
    ]


def usage(results: Iterable[TurnResult], prompts: int) -> dict[str, Any]:
    """Return the counts of all choices; of those of one prompt, its tokens count once.

    `prompts` is the number of different prompts; choices of one follow one another.
    """
    ended = [result.usage for result in results]
    first = ended[:: max(1, len(ended) // prompts)]
    prompt, completion = sum(each.prompt for each in first), sum(each.completion for each in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached for each in first)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reasoning for each in ended)},
    }


def timings(result: TurnResult) -> dict[str, float]:
    """Return the turn's wall times in milliseconds and its rates in tokens per second."""
    return {name: round(value, 3) for name, value in asdict(result.timings).items()}


def details(result: TurnResult, thinking: Thinking) -> dict[str, Any]:
    """Return what only hipfire tells: speed, the seed that repeats the reply, thinking, warnings."""
    mode = {True: "on", False: "off", None: "auto"}[thinking.enabled]
    made: dict[str, Any] = {
        "reasoning": {"mode": mode, "effort": thinking.effort, "max_think_tokens": thinking.cap},
        "tok_s": round(result.timings.decode_tok_s, 3),
        "seed": result.seed,
        "continuous_batch": result.batch > 1,
        "batch": result.batch,
        "config_warnings": list(result.warnings),
    }
    return made if result.stop is None else {**made, "stop_sequence": result.stop}


def chat_logprobs(tokens: Sequence[TextLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the form of chat replies."""
    return {
        "content": [
            {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]} for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TextLogprob], offset: int) -> dict[str, Any]:
    """Return log-probabilities in the form of plain completions; `offset` is where the text begins."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _logprob(token: TextLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
