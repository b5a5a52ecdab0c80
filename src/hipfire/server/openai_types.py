"""Requests of OpenAI's API as turns of the engine: every field is taken, or refused by name.

Plain functions of the request's JSON. How a reply is drawn, thinking and tools are read in
openai_sampling.py, openai_thinking.py and openai_tools.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.base.sampling import MAX_SEED, MAX_TOP_LOGPROBS
from hipfire.engine.turn import TurnKey, TurnRequest
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields
from hipfire.server.openai_sampling import (
    chat_logprobs,
    generation_of,
    limit_of,
    response_format_of,
    sampling_of,
)
from hipfire.server.openai_thinking import read_thinking
from hipfire.server.openai_tools import read_tools, strict_notes
from hipfire.text.messages import normalize_messages

MAX_CHOICES = 16
MAX_LABEL_CHARS = 512
MAX_LABELS = 16

_ROLES = {"toolResult": "tool", "tool_result": "tool", "developer": "system"}
# what the API has for other services' machinery: field, values that change nothing, advice
_ABSENT: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("store", (False,), "replies are not stored here; leave it out"),
    ("audio", (), ""),
    ("modalities", (["text"],), 'only ["text"] is possible'),
    ("prediction", (), ""),
    ("web_search_options", (), ""),
    ("verbosity", ("medium",), ""),
    ("functions", ([],), "use tools"),
    ("function_call", ("none",), "use tool_choice"),
    ("moderation", (), ""),
    ("context_management", (), ""),
)


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A request: its turns, one for each choice, and how they are to be told.

    `echoes` holds the text that goes before each choice's. `inline_thinking` puts reasoning into the content
    too. `prompts` is the number of prompts; the choices of one follow one another. `notes` are what the
    client is told of what it asked for and does not get.
    """

    model: str
    turns: tuple[TurnRequest, ...]
    stream: bool
    include_usage: bool
    inline_thinking: bool = False
    echoes: tuple[str, ...] = ()
    prompts: int = 1
    notes: tuple[str, ...] = ()


def read_chat(body: Mapping[str, Any], key: TurnKey) -> OpenAIRequest:
    """Return what POST /v1/chat/completions asks for.

    Raises FieldError or UnsupportedError, naming the field.
    """
    fields = Fields(body)
    model = fields.need_text("model")
    messages = _messages(fields)
    stream, usage = _streaming(fields)
    tools, choice = read_tools(fields)
    thinking, arguments, inline = read_thinking(fields)
    count = fields.integer("n", 1, MAX_CHOICES) or 1
    limit = limit_of(fields, "max_tokens", "max_completion_tokens")
    turn = TurnRequest(
        key=key,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        response_format=response_format_of(fields),
        generation=generation_of(fields, limit, chat_logprobs(fields)),
        thinking=thinking,
        template_arguments=arguments,
        **sampling_of(fields),
    )
    _finish(fields)
    return OpenAIRequest(model, _copies([turn], count), stream, usage, inline, notes=strict_notes(tools))


def read_completion(body: Mapping[str, Any], key: TurnKey) -> OpenAIRequest:
    """Return what POST /v1/completions asks for. Raises FieldError or UnsupportedError, naming the field."""
    fields = Fields(body)
    model = fields.need_text("model")
    prompts = _prompts(fields)
    stream, usage = _streaming(fields)
    count = fields.integer("n", 1, MAX_CHOICES) or 1
    if (best_of := fields.integer("best_of", 1, MAX_CHOICES)) is not None and best_of != count:
        raise fields.fault("best_of", f"n, which is {count}", hint="ask for n replies and choose among them")
    if len(prompts) * count > MAX_CHOICES:
        raise FieldError("n", f"{len(prompts)} prompts times n = {count} are more than {MAX_CHOICES} choices")
    limit = limit_of(fields, "max_tokens")
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    echo = fields.flag("echo") or False
    if echo and logprobs is not None:
        raise FieldError("logprobs", "logprobs cannot be had with echo", hint="leave one of the two out")
    fields.refuse("suffix", neutral=("",), hint="text cannot be filled in here")
    generation, sampling = generation_of(fields, limit, logprobs), sampling_of(fields)
    turns = [TurnRequest(key=key, prompt=prompt, generation=generation, **sampling) for prompt in prompts]
    _finish(fields)
    echoes = tuple(prompt if echo else "" for prompt in prompts for _ in range(count))
    return OpenAIRequest(model, _copies(turns, count), stream, usage, echoes=echoes, prompts=len(prompts))


def _copies(turns: Sequence[TurnRequest], count: int) -> tuple[TurnRequest, ...]:
    """Return each turn `count` times, with keys and, where a seed was given, seeds of their own."""
    made: list[TurnRequest] = []
    for turn in turns:
        for copy in range(count):
            suffix = f"-{len(made)}" if len(turns) * count > 1 else ""
            seed = turn.sampling.seed
            if seed is not None:
                seed = (seed + copy) % (MAX_SEED + 1)
            made.append(
                replace(
                    turn,
                    key=replace(turn.key, id=turn.key.id + suffix),
                    sampling=replace(turn.sampling, seed=seed),
                )
            )
    return tuple(made)


def _messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    messages = fields.items("messages")
    if not messages:
        raise fields.fault("messages", "a list of at least one message")
    made = tuple(_plain(message) for message in messages)
    try:
        normalize_messages(made)
    except ValidationError as error:
        raise FieldError("messages", error.message, hint=error.hint) from error
    return made


def _plain(message: Any) -> Any:
    """Return a message with the one name of its role, and without the fields that are null."""
    if not isinstance(message, Mapping):
        return message
    # content is the one field whose null says something: the message has none
    made = {name: value for name, value in message.items() if value is not None or name == "content"}
    role = made.get("role")
    return {**made, "role": _ROLES.get(role, role)} if isinstance(role, str) else made


def _prompts(fields: Fields) -> list[str]:
    prompt = fields.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt
    wanted = "a string, or a list of strings, none of them empty"
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise fields.fault("prompt", wanted, hint="lists of token ids are not taken")
    if len(texts) > MAX_CHOICES:
        raise fields.fault("prompt", f"at most {MAX_CHOICES} strings")
    return texts


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.flag("stream") or False
    options = fields.part("stream_options")
    if options is None:
        return stream, False
    usage = options.flag("include_usage") or False
    options.refuse("include_obfuscation", neutral=(False,))
    options.finish()
    if not stream:
        raise FieldError("stream_options", "stream_options needs stream", hint="set stream to true")
    return stream, usage


def _finish(fields: Fields) -> None:
    """Take the fields that label a request, refuse those that cannot be honoured, and all unknown ones."""
    # who asks, and hints for a cache that needs none: nothing in a reply depends on them
    for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
        fields.text(name)
    fields.part("prompt_cache_options")
    fields.choice("service_tier", ("auto", "default"))
    labels = fields.get("metadata")
    if labels is not None and not _are_labels(labels):
        raise fields.fault(
            "metadata", f"at most {MAX_LABELS} names with strings of at most {MAX_LABEL_CHARS} characters"
        )
    for name, neutral, hint in _ABSENT:
        fields.refuse(name, neutral=neutral, hint=hint)
    fields.finish()


def _are_labels(labels: object) -> bool:
    return (
        isinstance(labels, Mapping)
        and len(labels) <= MAX_LABELS
        and all(isinstance(value, str) and len(value) <= MAX_LABEL_CHARS for value in labels.values())
    )
