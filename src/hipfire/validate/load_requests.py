"""The requests of a load run, drawn from a seed: what is sent, and which ends each of them may have.

The same seed gives the same requests in the same order. This file opens no socket and judges no answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

CHAT_PATH: Final = "/v1/chat/completions"
# how a request can end: with what it asked for, a refusal of its kind, a typed error that another attempt
# may not meet, its client's leaving, or not as it should
End = Literal["answered", "refused", "unavailable", "left", "fault"]
Framing = Literal["whole", "half", "announced", "chunked"]

MAX_SEQ: Final = 2048
MAX_BODY_BYTES: Final = 256 * 1024
LONG_LINES: Final = 24
# errors that another attempt may not meet
RETRY_CODES: Final = frozenset({"transient", "transport"})
# a model that no registry has
NO_MODEL: Final = "no-such-model:1b"
QUESTIONS: Final = (
    "Name the capital of France.",
    "Write one sentence about the sea.",
    "Count from one to ten in words.",
    "Why is the sky blue?",
)
STOPS: Final = ("e", "the", ". ")
BAD_BODIES: Final = (
    b'{"model": ',
    b"not JSON at all",
    b'{"model": "m", "model": "m"}',
    b'{"temperature": NaN}',
    b"\xff\xfe{}",
    b"[" * 4000 + b"]" * 4000,
    b"[]",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of request: how often it is drawn, and its ends.

    `status` and `code` are those of its refusal. `whole` kinds want all of their answer, so "answered" is the
    only good end; `engine` kinds reach the engine, whose death makes them "unavailable".
    """

    weight: int
    ends: frozenset[End]
    status: int = 0
    code: str = ""
    whole: bool = False
    engine: bool = True


def _wanted() -> frozenset[End]:
    return frozenset({"answered", "unavailable"})


KINDS: Final[Mapping[str, Kind]] = {
    "plain": Kind(12, _wanted(), whole=True),
    "stream": Kind(18, _wanted(), whole=True),
    "stop": Kind(6, _wanted(), whole=True),
    "two": Kind(6, _wanted(), whole=True),
    "long": Kind(5, _wanted(), whole=True),
    "cancel": Kind(14, _wanted() | {"left"}),
    "disconnect": Kind(9, frozenset({"left"})),
    "torn": Kind(4, frozenset({"left"}), engine=False),
    "deadline": Kind(6, _wanted() | {"left"}),
    "oversized": Kind(5, frozenset({"refused"}), 413, "too_large", engine=False),
    "bad_json": Kind(6, frozenset({"refused"}), 400, "malformed", engine=False),
    "unknown_model": Kind(4, frozenset({"refused"}), 404, "model_not_found", engine=False),
    "overlong": Kind(5, frozenset({"refused", "unavailable"}), 400, "context_length_exceeded"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request and how its client behaves.

    `framing` says how much of the body is sent: all, half, or more than the server takes (announced, or in
    chunks). The client leaves after `pieces` pieces of text or `patience_s` seconds, whichever is set;
    `reads` false never looks at the answer. `abrupt` clients reset their connection. `question` names what
    must give the same texts whenever it is asked, "" if nothing does.
    """

    number: int
    kind: str
    body: bytes
    stream: bool = False
    choices: int = 1
    framing: Framing = "whole"
    pieces: int | None = None
    patience_s: float | None = None
    reads: bool = True
    abrupt: bool = False
    question: str = ""


def draw(model: str, seed: int, count: int) -> list[Request]:
    """Return `count` requests in a random order; each kind is among them if there is room for all."""
    rng = random.Random(seed)
    names = list(KINDS)
    first = rng.sample(names, len(names))[:count]
    more = rng.choices(names, [KINDS[name].weight for name in names], k=count - len(first))
    order = rng.sample(first + more, count)
    return [_make(number, kind, model, rng) for number, kind in enumerate(order, 1)]


def questions(model: str) -> dict[str, Request]:
    """Return a request for every question that a load asks, to be asked alone before and after it."""
    asked = [*_all_questions(model)]
    return {request.question: request for request in asked}


def crowd(model: str, count: int) -> list[Request]:
    """Return requests that fill `count` slots at once for a while."""
    made = []
    for number in range(count):
        fields = _chat(model, f"Tell story number {number}.", 96) | {"ignore_eos": True}
        made.append(Request(number + 1, "plain", _bytes(fields)))
    return made


def _make(number: int, kind: str, model: str, rng: random.Random) -> Request:
    stream = rng.random() < 0.5
    abrupt = rng.random() < 0.5
    if kind in ("plain", "stream", "stop", "two", "long", "cancel"):
        asked = rng.choice([each for each in _all_questions(model) if each.kind == kind])
        streamed = kind in ("stream", "cancel") or (kind != "plain" and stream)
        pieces = rng.randint(1, 12) if kind == "cancel" else None
        body = _streamed(asked.body) if streamed else asked.body
        return Request(
            *(number, kind, body, streamed, asked.choices),
            pieces=pieces,
            abrupt=abrupt,
            question=asked.question,
        )
    if kind in ("disconnect", "deadline"):
        patience = rng.uniform(0.0, 0.3) if kind == "disconnect" else rng.uniform(0.3, 4.0)
        fields = _chat(model, rng.choice(QUESTIONS), 64) | {"stream": kind == "disconnect" and stream}
        reads = kind == "deadline"
        return Request(number, kind, _bytes(fields), patience_s=patience, reads=reads, abrupt=abrupt)
    return _refused(number, kind, model, rng, stream=stream, abrupt=abrupt)


def _refused(
    number: int, kind: str, model: str, rng: random.Random, *, stream: bool, abrupt: bool
) -> Request:
    """Return a request that no server would answer."""
    if kind == "bad_json":
        return Request(number, kind, rng.choice(BAD_BODIES))
    if kind == "oversized":
        return Request(
            number, kind, b" " * (MAX_BODY_BYTES + 1), framing=rng.choice(("announced", "chunked"))
        )
    question = rng.choice(QUESTIONS)
    if kind == "torn":
        body = _bytes(_chat(model, question, 16))
        return Request(
            *(number, kind, body), framing="half", patience_s=rng.uniform(0, 0.2), reads=False, abrupt=abrupt
        )
    if kind == "overlong":
        # one token each, so that there are more than the context holds
        question = " ".join(["word"] * (MAX_SEQ + rng.randint(1, 2000)))
    fields = _chat(NO_MODEL if kind == "unknown_model" else model, question, 16) | {"stream": stream}
    return Request(number, kind, _bytes(fields), stream)


def _all_questions(model: str) -> Iterator[Request]:
    def ask(kind: str, name: str, fields: Mapping[str, Any], choices: int = 1) -> Request:
        return Request(0, kind, _bytes(fields), choices=choices, question=f"{kind}: {name}")

    for question in QUESTIONS:
        yield ask("plain", question, _chat(model, question, 16))
        yield ask("stream", question, _chat(model, question, 24))
        yield ask("cancel", question, _chat(model, question, 48))
    for question, stop in zip(QUESTIONS, STOPS, strict=False):
        yield ask("stop", f"{question} until {stop!r}", _chat(model, question, 24) | {"stop": [stop, "\n\n"]})
    for seed, question in enumerate(QUESTIONS[:3]):
        drawn = {"n": 2, "seed": seed, "temperature": 0.8}
        yield ask("two", f"{question} seed {seed}", _chat(model, question, 16) | drawn, 2)
    for number in range(2):
        yield ask("long", f"list {number}", _chat(model, _long_text(number), 12))


def _long_text(number: int) -> str:
    """Return a prompt of several hundred tokens, which is read in more than one chunk."""
    lines = [f"{line}. Box {line * 7 + number} holds {line + number} apples." for line in range(LONG_LINES)]
    return f"List {number}:\n" + "\n".join(lines) + "\nHow many apples are in the last box?"


def _chat(model: str, content: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }


def _streamed(body: bytes) -> bytes:
    return _bytes(json.loads(body) | {"stream": True})


def _bytes(fields: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
