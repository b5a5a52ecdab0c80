"""JSON as model files hold it: where an object ends, reading without trust, writing in fixed bytes.

Does not know what the keys mean. The written form is the one that a Rust serde_json program without
`preserve_order` emits: compact, keys sorted by their UTF-8 bytes, text unescaped, shortest floats.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from hipfire.base import strict_json
from hipfire.base.errors import ArtifactError, ValidationError

MAX_DEPTH = 127  # deepest nesting that serde_json reads back, the root object included

# everything up to the next brace that is not inside a string; possessive, so it is linear on any input
_FLAT = re.compile(rb'[^"{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}]*+)*+', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def object_end(data: memoryview, *, path: Path, field: str, base: int) -> int:
    """Return the length of the JSON object that `data` starts with; what follows it may be anything.

    Only strings and braces are followed, as in the original reader. `base` is the file offset of `data`.

    Raises:
        ArtifactError: `data` does not start with `{`, nests too deep, or the object or a string never ends.
    """
    if not len(data) or data[0] != 0x7B:
        raise ArtifactError("not a JSON object", path=path, field=field, offset=base)
    depth, pos = 1, 1
    while True:
        found = _FLAT.match(data, pos)
        pos = found.end() if found else pos
        if pos == len(data):
            raise ArtifactError("the JSON object never ends", path=path, field=field, offset=base + pos)
        if data[pos] == 0x22:
            raise ArtifactError("a JSON string never ends", path=path, field=field, offset=base + pos)
        depth += 1 if data[pos] == 0x7B else -1
        pos += 1
        if depth == 0:
            return pos
        if depth > MAX_DEPTH:
            raise ArtifactError("JSON nests too deep", path=path, field=field, offset=base + pos - 1)


def parse_object(
    data: memoryview | bytes,
    *,
    path: Path,
    field: str,
    base: int = 0,
    constants: bool = False,
    unique: bool = False,
) -> dict[str, Any]:
    """Return the JSON object that `data` is, as a dict.

    `base` is the file offset of `data`, for messages. `constants` lets NaN and Infinity pass (hand-written
    config files have them). `unique` refuses a key that occurs twice in one object.

    Raises:
        ArtifactError: bad UTF-8, bad JSON, too deep, a number out of range, or the value is no object.
    """

    def fail(reason: str, offset: int = 0) -> ArtifactError:
        return ArtifactError(reason, path=path, field=field, offset=base + offset)

    try:
        text = str(data, "utf-8")
        value = json.loads(
            text,
            parse_float=float if constants else strict_json.finite,
            parse_constant=None if constants else strict_json.no_constant,
            object_pairs_hook=strict_json.unique if unique else None,
        )
        if _SURROGATE.search(data):
            strict_json.require_unicode(value)
    except UnicodeDecodeError as error:
        raise fail("text is not UTF-8", error.start) from error
    except UnicodeEncodeError as error:
        raise fail("a string holds half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        raise fail(f"bad JSON ({error.msg})", len(text[: error.pos].encode())) from error
    except ValueError as error:
        raise fail(f"bad JSON ({error})") from error
    except RecursionError as error:
        raise fail("JSON nests too deep") from error
    if not isinstance(value, dict):
        raise fail("not a JSON object")
    return value


def canonical(value: Mapping[str, Any], *, what: str) -> bytes:
    """Return the one compact UTF-8 text of a JSON object; equal values give equal bytes.

    Integers outside the 64-bit range become floats, as they do in the original writer.

    Raises:
        ValidationError: a key is no string, a value has no JSON form, a number is not finite, a string is not
            Unicode, or the nesting is deeper than `MAX_DEPTH`; the message names the path of keys.
    """
    if not isinstance(value, Mapping):
        raise ValidationError(f"{what} must be a JSON object, not {type(value).__name__}")
    out: list[str] = []
    _write(out, value, what, 1)
    try:
        return "".join(out).encode()
    except UnicodeEncodeError as error:
        raise ValidationError(f"{what} holds text that is not Unicode ({error.reason})") from error


def _write(out: list[str], value: object, where: str, depth: int) -> None:
    """Append the text of `value` to `out`, piece by piece. `where` is its path of keys, for messages."""
    if isinstance(value, str):
        out.append(encode_basestring(value))
    elif value is None or isinstance(value, bool):
        out.append({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, int | float):
        out.append(_number(value, where))
    elif depth > MAX_DEPTH:
        raise ValidationError(f"{where[:200]} nests deeper than {MAX_DEPTH} levels")
    elif isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValidationError(f"{where} has a key that is not a string")
        separator = "{"
        for key in sorted(value):
            out.append(f"{separator}{encode_basestring(key)}:")
            _write(out, value[key], f"{where}.{key}", depth + 1)
            separator = ","
        out.append("}" if value else "{}")
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        separator = "["
        for item in value:
            out.append(separator)
            _write(out, item, where, depth + 1)
            separator = ","
        out.append("]" if value else "[]")
    else:
        raise ValidationError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _number(value: int | float, where: str) -> str:
    """Return a number's text; floats have the shortest digits, with an exponent below 1e-5 and from 1e16."""
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int.__repr__(value)
    try:
        number = float(value)
    except OverflowError as error:
        raise ValidationError(f"{where} holds an integer that is out of range") from error
    if not math.isfinite(number):
        raise ValidationError(f"{where} is {number}, which JSON cannot hold")
    text = float.__repr__(number)
    mantissa, marker, exponent = text.partition("e")
    if not marker:
        return text
    if exponent == "-05":
        sign, digits = ("-", mantissa[1:]) if mantissa.startswith("-") else ("", mantissa)
        return f"{sign}0.0000{digits.replace('.', '')}"
    return f"{mantissa}e{int(exponent)}"
