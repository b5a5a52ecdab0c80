"""The JSON text of containers: its end, its refusals, its one written form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import bounded
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.checkpoint.jsontext import MAX_DEPTH, canonical, object_end, parse_object

HERE = Path("some.hfq")
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | UNICODE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(UNICODE, inner, max_size=4),
    max_leaves=20,
)


def end_of(data: bytes) -> int:
    return object_end(memoryview(data), path=HERE, field="metadata", base=32)


@given(st.dictionaries(UNICODE, JSON, max_size=5), st.binary(max_size=40), st.booleans())
@settings(max_examples=100, deadline=None)
def test_end_is_found_whatever_follows(value: dict[str, Any], rest: bytes, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()
    assert end_of(raw + rest) == len(raw)


@given(st.dictionaries(UNICODE, JSON, max_size=5))
@settings(max_examples=100, deadline=None)
def test_written_form_reads_back_and_ignores_the_order_of_keys(value: dict[str, Any]) -> None:
    raw = canonical(value, what="metadata")
    back = parse_object(raw, path=HERE, field="metadata")
    assert back == value
    assert canonical(dict(reversed(back.items())), what="metadata") == raw
    assert end_of(raw) == len(raw)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1e-05, "0.00001"),
        (1.5e-05, "0.000015"),
        (-1e-05, "-0.00001"),
        (1e-06, "1e-6"),
        (1.25e-07, "1.25e-7"),
        (0.0001, "0.0001"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e16"),
        (1.5e300, "1.5e300"),
        (5e-324, "5e-324"),
        (-0.0, "-0.0"),
        (10000.0, "10000.0"),
        (2**64 - 1, "18446744073709551615"),
        (-(2**63), "-9223372036854775808"),
        (10**30, "1e30"),
        (True, "true"),
        (None, "null"),
        ("ü🔥\u2028\x7f", '"ü🔥\u2028\x7f"'),
        ('\x00\x1f\b\f\n\r\t"\\/', '"\\u0000\\u001f\\b\\f\\n\\r\\t\\"\\\\/"'),
        ({"b": [], "a": {}, "B": (1, 2)}, '{"B":[1,2],"a":{},"b":[]}'),
        ({"\U00010000": 1, "\uffff": 2}, '{"\uffff":2,"\U00010000":1}'),
    ],
)
def test_values_are_written_as_serde_json_writes_them(value: object, written: str) -> None:
    assert canonical({"v": value}, what="metadata").decode() == f'{{"v":{written}}}'


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [math.nan]}, "metadata.a"),
        ({"a": {"b": math.inf}}, "metadata.a.b"),
        ({"a": 10**400}, "out of range"),
        ({"a": {1: 2}}, "not a string"),
        ({"a": b"raw"}, "bytes"),
        ({"a": {1, 2}}, "set"),
        ({"a": "\ud83d"}, "not Unicode"),
        ({"\udc00": 1}, "not Unicode"),
        ([1], "must be a JSON object"),
        (nested(MAX_DEPTH + 1), "nests deeper"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_path(value: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        canonical(value, what="metadata")


def test_the_deepest_allowed_nesting_round_trips() -> None:
    raw = canonical(nested(MAX_DEPTH), what="metadata")
    assert end_of(raw) == len(raw)
    assert parse_object(raw, path=HERE, field="metadata") == nested(MAX_DEPTH)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
        (b'{"a": "\xff"}', "at byte 39: text is not UTF-8"),
        (b'{"\xc3\xbc": x}', "at byte 39: bad JSON"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\n"}', "bad JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
        (b"[1]", "not a JSON object"),
        (b"", "bad JSON"),
    ],
)
def test_bad_json_names_field_and_offset(raw: bytes, words: str) -> None:
    with pytest.raises(ArtifactError, match=words) as caught:
        parse_object(raw, path=HERE, field="metadata", base=32)
    assert caught.value.field == "metadata"
    assert caught.value.offset is not None
    assert caught.value.offset >= 32


def test_surrogate_pairs_and_escaped_backslashes_are_fine() -> None:
    raw = rb'{"pair": "\ud83d\udd25", "text": "\\ud83d"}'
    assert parse_object(raw, path=HERE, field="f") == {"pair": "🔥", "text": "\\ud83d"}


def test_config_files_may_hold_constants_and_unique_refuses_repeats() -> None:
    assert parse_object(b'{"a": Infinity}', path=HERE, field="f", constants=True) == {"a": math.inf}
    assert parse_object(b'{"a": 1, "a": 2}', path=HERE, field="f") == {"a": 2}
    with pytest.raises(ArtifactError, match="duplicate name 'a'"):
        parse_object(b'{"x": {"a": 1, "a": 2}}', path=HERE, field="f", unique=True)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"a": "b', "string never ends"),
        (b'{"a": "b\\"}', "string never ends"),
        (b'{"a": {"b": 1}', "object never ends"),
        (b'{"a":' * (MAX_DEPTH + 1), "too deep"),
    ],
)
def test_an_end_that_is_not_there(raw: bytes, words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        end_of(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":"' + b'\\"' * 10_000_000,
        b'{"a":"' + b"\\" * 20_000_001,
        b'{"a":"' + b"x" * 20_000_000,
        b'{"a' + b'","' * 6_000_000,
        b"{" * 20_000_000,
        b"{" + b" " * 20_000_000,
    ],
    ids=["escapes", "backslashes", "letters", "strings", "braces", "spaces"],
)
def test_hostile_text_is_scanned_in_linear_time_without_memory(raw: bytes) -> None:
    with bounded(seconds=3.0, nbytes=100_000), pytest.raises(ArtifactError):
        end_of(raw)
