"""Lines, messages and errors on the wire: what is no message is refused, errors stay what they were."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from types import MappingProxyType
from typing import Any

import pytest

from hipfire.base.errors import (
    ArtifactError,
    ContextLengthError,
    HipfireError,
    InternalError,
    MemoryLimitError,
    UnsupportedError,
    ValidationError,
)
from hipfire.engine.scheduler import BusyError, QueueFullError
from hipfire.engine.turn import (
    Failed,
    TurnKey,
)
from hipfire.engine.wire import (
    MAX_LINE,
    decode_message,
    line_of,
    message_type,
    parse_line,
    request_number,
)
from hipfire.engine.wire_errors import MalformedError, error_line, error_of, failed

KEY = TurnKey("chatcmpl-1", 2)


def there_and_back(record: dict[str, Any]) -> dict[str, Any]:
    line = line_of(record)
    assert line.isascii()
    assert line.count(b"\n") == 1
    return parse_line(line)


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b"null", b'"text"', b"{} {}", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}', b"\xff\xfe", b'{"a": "\\ud800"}', b'{"\\udc00": 1}', b'{"a":' * 5000 + b"1",
        b"[" * 100_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_a_malformed_line_is_refused(line: bytes) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_line(line)
    assert len(caught.value.line()) < 300


def test_a_line_may_have_as_many_bytes_as_the_limit_says() -> None:
    fits = b'{"a":"' + b"x" * (MAX_LINE - 8) + b'"}'
    assert len(parse_line(fits)["a"]) == MAX_LINE - 8
    with pytest.raises(MalformedError, match=f"longer than {MAX_LINE} bytes"):
        parse_line(fits + b" ")


def test_what_json_does_not_have_is_refused_when_written() -> None:
    for value in (math.nan, math.inf, b"bytes", {1, 2}):
        with pytest.raises(ValidationError, match="cannot be written"):
            line_of({"value": value})
    assert json.loads(line_of({"value": MappingProxyType({"a": 1})})) == {"value": {"a": 1}}


@pytest.mark.parametrize(
    "error",
    [
        ValidationError("x is 5", hint="use 4"), UnsupportedError("no"),
        ArtifactError("bad", path="a", offset=3),
        ContextLengthError(9000, 4096, hint="shorten it"),
        MemoryLimitError(2**31, 2**30, what="this model", hint="h"),
        InternalError("slot 2 is nobody's"), BusyError("later"), MalformedError("no JSON"),
    ],
)  # fmt: skip
def test_an_error_is_the_same_error_at_the_other_end(error: HipfireError) -> None:
    record = there_and_back(error_line(error, request=3))
    assert request_number(record) == 3
    again = error_of(record)
    assert type(again) is type(error)
    assert (again.kind, again.message, again.hint) == (error.kind, error.message, error.hint)
    for name in ("requested", "limit", "required", "available"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_errors_without_a_class_of_their_own_keep_their_kind() -> None:
    queue_full = error_of(error_line(QueueFullError("64 requests wait")))
    assert (queue_full.kind, queue_full.message) == ("transient", "64 requests wait")
    assert error_line(QueueFullError("64 requests wait"))["retryable"] is True
    unexpected = error_line(ZeroDivisionError("division by zero"))
    assert (unexpected["class"], unexpected["retryable"]) == ("internal", False)
    assert "ZeroDivisionError: division by zero" in unexpected["message"]
    assert error_of({"type": "error", "class": "melted", "message": "hot"}).kind == "internal"
    # the numbers are missing, as an older daemon's may be
    assert error_of({"class": "context_length", "message": "too long"}).message == "too long"
    assert failed(KEY, BusyError("later", hint="wait")) == Failed(KEY, "transient", "later", "wait", True)


@pytest.mark.parametrize("number", [None, "3", 3.0, True, [3]])
def test_only_integers_are_echoed_as_request_numbers(number: object) -> None:
    assert request_number({"request": number}) is None


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"type": "load"}, "model is missing"), ({"type": "load", "model": ""}, "model"),
        ({"type": "load", "model": "a\0b"}, "model"), ({"type": "load", "model": 5}, "model"),
        ({"type": "load", "model": "a", "params": {"slots": 0}}, "params.slots"),
        ({"type": "load", "model": "a", "params": {"slots": 1.0}}, "params.slots"),
        ({"type": "load", "model": "a", "params": {"max_seq": 2**20 + 1}}, "params.max_seq"),
        ({"type": "load", "model": "a", "params": {"weights": "tiny"}}, "params.weights"),
        ({"type": "load", "model": "a", "params": {"queue_timeout_s": -1}}, "params.queue_timeout_s"),
        ({"type": "load", "model": "a", "params": {"draft": "b"}}, "params.'draft'"),
        ({"type": "load", "model": "a", "params": {"sampling": {"top_p": 2}}}, "top_p"),
        ({"type": "load", "model": "a", "parms": {}}, "did you mean params"),
        ({"type": "configure", "config": {"threads": 0}}, "config.threads"),
        ({"type": "reset"}, "attempt_id is missing"), ({"type": "reset", "attempt_id": "1"}, "attempt_id"),
        ({"type": "unload", "force": 1}, "force"), ({"type": "ping", "now": 1}, "now"),
        ({"type": "bench_prefill", "tokens": 0}, "tokens"),
        ({"type": "bench_decode", "context_tokens": -1, "iterations": 4}, "context_tokens"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named(record: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        decode_message(record)
    assert named in caught.value.line()


def test_an_unknown_message_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnsupportedError, match="did you mean unload"):
        message_type({"type": "unlod"})
    with pytest.raises(UnsupportedError, match="use one of configure, ping"):
        message_type({"type": "xyzzy"})
    for wrong in ({}, {"type": 5}, {"type": None}):
        with pytest.raises(ValidationError, match="type is missing"):
            message_type(wrong)


def test_the_wire_and_the_client_need_no_tensor_library() -> None:
    code = (
        "import sys, hipfire.engine.keeper, hipfire.engine.lock, hipfire.engine.daemon;"
        "print({'torch', 'numpy', 'numba', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
