"""Reading a request's body: bounded in bytes, time and nesting, and strict about what JSON is.

This file knows no API's fields.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from hipfire.base import strict_json
from hipfire.server.errors import MalformedError, SlowClientError, TooLargeError

# far below what the interpreter's own recursion limit allows, in validation as well as in parsing
MAX_DEPTH = 100
# each costs Python time and memory far beyond its bytes; the longest conversations have a tenth of it
MAX_PARTS = 50_000
# a body from this size on is parsed beside the event loop, which has other clients to answer
_LARGE = 2**18

# everything up to the next bracket that is not inside a string; possessive, so it is linear on any input
_FLAT = re.compile(rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Return a request's body, a JSON object.

    `timeout_s` is how long the client may send nothing; 0 is for ever. Raises TooLargeError as soon as more
    than `max_bytes` are announced or have come, SlowClientError, and MalformedError for what is no JSON
    object (as `parse_json` says).
    """
    data = await _read(request, max_bytes, timeout_s)
    return parse_json(data) if len(data) < _LARGE else await run_in_threadpool(parse_json, data)


async def _read(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    parts = request.stream()
    while True:
        try:
            async with asyncio.timeout(timeout_s or None):
                part = await anext(parts, None)
        except TimeoutError:
            raise SlowClientError(
                f"no more of the request came for {timeout_s:g} s", hint="send the whole body at once"
            ) from None
        except ClientDisconnect as error:
            raise MalformedError("the request ended before its body did") from error
        if part is None:
            return bytes(data)
        data += part
        if len(data) > max_bytes:
            raise _too_large(max_bytes)


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Raises MalformedError for invalid UTF-8, halves of surrogate pairs, NUL-padded or otherwise bad JSON, NaN
    and infinities, numbers out of a float's range, a key that occurs twice in one object, nesting deeper
    than `MAX_DEPTH`, and more than `MAX_PARTS` lists and objects.
    """
    _check_shape(data)
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=strict_json.no_constant,
            parse_float=strict_json.finite,
            object_pairs_hook=strict_json.unique,
        )
        if _SURROGATE.search(data):
            strict_json.require_unicode(value)
    except UnicodeDecodeError as error:
        raise MalformedError(f"the body is not UTF-8 (byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise MalformedError("the body holds half of a surrogate pair") from error
    except ValueError as error:
        raise MalformedError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedError("the body must be a JSON object")
    return value


def _check_shape(data: bytes) -> None:
    depth = parts = pos = 0
    while True:
        found = _FLAT.match(data, pos)
        pos = found.end() if found else pos
        # a string without an end stops the scan; the parser will say so
        if pos >= len(data) or data[pos] == 0x22:
            return
        opens = data[pos] in b"{["
        depth += 1 if opens else -1
        parts += opens
        pos += 1
        if depth > MAX_DEPTH:
            raise MalformedError(f"the body is nested more than {MAX_DEPTH} levels deep")
        if parts > MAX_PARTS:
            raise MalformedError(f"the body holds more than {MAX_PARTS} lists and objects")


def _too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the request is larger than {max_bytes} bytes", hint="send less, or raise serve.max_request_bytes"
    )
