"""The daemon's protocol: JSON objects, one a line, to values and back.

Everything that comes in is checked here, so that nothing behind this file meets a wrong type, a number that
is not finite or half a surrogate pair. Lines are ASCII. This file opens no pipe and runs no turn.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import ArtifactError, UnsupportedError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.checkpoint.jsontext import parse_object
from hipfire.engine.turn import (
    Aborted,
    Delta,
    Done,
    Event,
    Failed,
    Info,
    Ready,
    Started,
    TextLogprob,
    Thinking,
    TurnKey,
    TurnRequest,
    TurnResult,
    TurnTimings,
    TurnUsage,
)
from hipfire.engine.wire_codec import Shape
from hipfire.engine.wire_errors import MalformedError
from hipfire.engine.wire_messages import MESSAGES, Message

# longest line that the daemon reads, and longest that it writes, in bytes
MAX_LINE: Final = 8 * 2**20
MAX_REPLY: Final = 32 * 2**20
# events carry text that needs no further splitting into channels
CONTRACT_VERSION: Final = 2
# what an impossible token's log-probability is told as: JSON has no infinity
LOWEST_LOGPROB: Final = -9999.0

TURN_CONTROLS: Final = ("cancel", "commit", "abort")
TYPES: Final = (*MESSAGES, "generate", *TURN_CONTROLS)


_KEY = Shape(TurnKey, {"attempt": "attempt_id"})
_KEYED: Mapping[str, Shape] = {"key": _KEY}
_RESULT = Shape(
    TurnResult,
    {"finish": "finish_reason"},
    groups={
        "usage": Shape(TurnUsage, {name: f"{name}_tokens" for name in TurnUsage.__dataclass_fields__}),
        "timings": Shape(TurnTimings),
    },
)
_EVENTS: dict[str, Shape] = {
    "gen_start": Shape(Started, {"in_thinking": "started_in_think"}, _KEYED),
    "token": Shape(Delta, groups=_KEYED, constants={"channel": "answer"}),
    "reasoning": Shape(Delta, groups=_KEYED, constants={"channel": "reasoning"}),
    "info": Shape(Info, groups=_KEYED),
    "commit_ready": Shape(Ready, groups={**_KEYED, "result": _RESULT}),
    "done": Shape(Done, groups={**_KEYED, "result": _RESULT}),
    "aborted": Shape(Aborted, groups=_KEYED),
    "error": Shape(Failed, {"kind": "class"}, _KEYED),
}
_EVENT_TYPES = {shape.cls: name for name, shape in _EVENTS.items() if shape.cls is not Delta}
_REQUEST = Shape(
    TurnRequest,
    {"fit": "max_tokens_fit", "deadline": "deadline_s"},
    groups={
        **_KEYED,
        "sampling": Shape(SamplingParams, {"penalty_window": "repeat_window"}),
        "generation": Shape(GenerationParams),
        "thinking": Shape(
            Thinking, {"enabled": "thinking_enabled", "effort": "reasoning_effort", "cap": "max_think_tokens"}
        ),
    },
)


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a JSON object as a line of ASCII, its end included.

    Raises ValidationError for values that JSON does not have.
    """
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain_mapping)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(f"this cannot be written as JSON: {error}") from error
    return text.encode("ascii") + b"\n"


def request_line(record: Mapping[str, Any]) -> bytes:
    """Return `line_of(record)`; ValidationError for one that the daemon would not take.

    The daemon cannot say whose line it is that it cannot read, so whoever sent it would wait for ever.
    """
    line = line_of(record)
    if len(line) > MAX_LINE:
        raise ValidationError(
            f"the request has {len(line)} bytes but the engine takes {MAX_LINE}", hint="shorten it"
        )
    try:
        parse_line(line)
    except MalformedError as error:
        raise ValidationError(
            f"the engine cannot read the request ({error.message})", hint="send valid Unicode text"
        ) from error
    return line


def reply_line(record: Mapping[str, Any]) -> bytes:
    """Return `line_of(record)` with U+FFFD for half of a surrogate pair.

    Names in hostile files hold such text, and a reader takes no line with it.
    """
    line = line_of(record)
    return line_of(_whole(json.loads(line))) if b"\\ud" in line else line


def parse_line(line: bytes, limit: int = MAX_LINE) -> dict[str, Any]:
    """Return the JSON object on a line.

    Raises MalformedError for a line of more than `limit` bytes, one that is not UTF-8, not JSON or no object,
    that names a key twice, or holds half a surrogate pair or a number that is not finite.
    """
    if len(line) > limit:
        raise MalformedError(f"a line is longer than {limit} bytes")
    try:
        return parse_object(line, path=Path("line"), field="JSON", unique=True)
    except ArtifactError as error:
        raise MalformedError(error.message) from error


def request_number(record: Mapping[str, Any]) -> int | None:
    """Return the number that the reply must carry, or None if the message has none that can be echoed."""
    number = record.get("request")
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def encode_event(event: Event) -> dict[str, Any]:
    """Return an event as a JSON object with `type`, `id` and `attempt_id`."""
    if isinstance(event, Delta):
        name = "token" if event.channel == "answer" else "reasoning"
        event = replace(event, logprobs=tuple(map(_finite, event.logprobs)))
    else:
        name = _EVENT_TYPES[type(event)]
    record = {"type": name, **_EVENTS[name].encode(event)}
    return {**record, "contract_version": CONTRACT_VERSION} if name == "gen_start" else record


def decode_event(record: Mapping[str, Any]) -> Event:
    """Return the event that a JSON object describes; keys that this version does not know are left alone.

    Raises MalformedError for an unknown type and ValidationError for a field with a wrong value.
    """
    shape = _EVENTS.get(str(record.get("type")))
    if shape is None:
        raise MalformedError(f"unknown event {str(record.get('type'))[:80]!r}")
    event: Event = shape.decode(record)
    return event


def encode_request(request: TurnRequest) -> dict[str, Any]:
    """Return a turn's request as a `generate` message."""
    return {"type": "generate", **_REQUEST.encode(request)}


def decode_request(record: Mapping[str, Any]) -> TurnRequest:
    """Return the turn's request of a `generate` message; ValidationError names the field that is wrong."""
    _refuse_unknown(record, _REQUEST.keys())
    request: TurnRequest = _REQUEST.decode(record)
    _check_key(request.key)
    return request


def encode_key(kind: str, key: TurnKey) -> dict[str, Any]:
    """Return a `cancel`, `commit` or `abort` message."""
    return {"type": kind, **_KEY.encode(key)}


def decode_key(record: Mapping[str, Any]) -> TurnKey:
    """Return whose message this is; ValidationError names the field that is wrong."""
    key: TurnKey = _KEY.decode(record)
    _check_key(key)
    return key


def encode_message(message: Message) -> dict[str, Any]:
    """Return any other message as a JSON object."""
    (name,) = (name for name, cls in MESSAGES.items() if cls is type(message))
    return {"type": name, **Shape(MESSAGES[name]).encode(message)}


def decode_message(record: Mapping[str, Any]) -> Message:
    """Return the message whose type is one of MESSAGES; ValidationError names the field that is wrong."""
    shape = Shape(MESSAGES[record["type"]])
    _refuse_unknown(record, shape.keys())
    message: Message = shape.decode(record)
    return message


def message_type(record: Mapping[str, Any]) -> str:
    """Return the type of a message to the daemon; UnsupportedError for one that there is not."""
    name = record.get("type")
    if not isinstance(name, str):
        raise ValidationError("type is missing or no text", hint=f"use one of {', '.join(TYPES)}")
    if name not in TYPES:
        near = difflib.get_close_matches(name, TYPES, n=1)
        raise UnsupportedError(
            f"there is no message {name[:80]!r}",
            hint=f"did you mean {near[0]}?" if near else f"use one of {', '.join(TYPES)}",
        )
    return name


def _refuse_unknown(record: Mapping[str, Any], known: Iterable[str]) -> None:
    allowed = {"type", "request", *known}
    for name in record:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            raise ValidationError(
                f"{name[:80]!r} is not a field of {record['type']}",
                hint=f"did you mean {near[0]}?" if near else "leave it out",
            )


def _check_key(key: TurnKey) -> None:
    if not 0 < len(key.id) <= 256:
        raise ValidationError(f"id has {len(key.id)} characters but must have 1 to 256")
    if not 0 <= key.attempt < 2**53:
        raise ValidationError(f"attempt_id is {key.attempt} but must be from 0 to 2**53 - 1")


def _finite(entry: TextLogprob) -> TextLogprob:
    return replace(
        entry, logprob=max(entry.logprob, LOWEST_LOGPROB), top=tuple(_finite(other) for other in entry.top)
    )


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return value


def _plain_mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
