"""What the serve harness asks: the built-in battery, and prompts, needles and sessions read from files.

Prompts are used byte for byte as they are written. This file does not know how they are sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import ValidationError

MAX_FILE_BYTES: Final = 64 << 20
SESSION_FIELDS: Final = frozenset({"turns", "system", "tools"})


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing to say. `expect` are texts that the answer must hold.

    `tool_results` gives, by the name of a function, what the harness answers when the model calls it; a turn
    that has any must lead to a call.
    """

    genre: str
    content: str
    expect: tuple[str, ...] = ()
    tool_results: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """All turns of a run, with the system message and the tools of every request."""

    turns: tuple[Turn, ...]
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


# short answers are asked for, so that small models end their turns well within a cap of 256 tokens
BATTERY: Final = (
    Turn(
        "code",
        "Write a Python function `merge_sorted(a, b)` that merges two sorted lists into one sorted list. "
        "Reply with one short code block and nothing else.",
    ),
    Turn(
        "reason",
        "A train travels 60 km in the first hour and 40 km in the second hour. How far does it travel in "
        "total? Answer in one or two sentences.",
    ),
    Turn("factual", "Why does the Earth have seasons? Answer in two or three sentences."),
    Turn(
        "prose",
        "Write a very short story, at most four sentences, about a lighthouse keeper who finds a brass "
        "compass on the beach.",
    ),
    Turn(
        "instruct",
        "List exactly three short tips for writing readable code, numbered 1 to 3, one line each.",
    ),
)


def read_prompt(path: Path) -> Script:
    """Return a script of one turn: the text of a file, line ends and all."""
    return Script((Turn("prose", _text(path)),))


def read_prompts(path: Path) -> Script:
    """Return the turns of a JSON list of {genre, prompt, expect?}."""
    return Script(_each(path, _items(path), _prompt))


def read_needles(path: Path) -> Script:
    """Return the turns of a JSON record, or a list of them, about a needle in a haystack.

    A record has filler_text, question, and expected_answer_substring or a list of such substrings; genre is
    optional. The prompt is the filler, a blank line and the question.
    """
    document = _json(path)
    return Script(_each(path, document if isinstance(document, list) else [document], _needle))


def read_session(path: Path) -> Script:
    """Return the turns of a session: a JSON list of {content, expect?, tool_results?}, or {turns, ...}.

    The second form may also have `system` (text) and `tools` (as in a chat request).
    """
    document = _json(path)
    table = document if isinstance(document, dict) else {"turns": document}
    unknown = sorted(set(table) - SESSION_FIELDS)
    if unknown:
        raise _fault(path, "session", f"unknown field {unknown[0]!r}")
    turns, system, tools = table.get("turns"), table.get("system", ""), table.get("tools", [])
    if not isinstance(turns, list) or not turns:
        raise _fault(path, "turns", "must be a list with at least one turn")
    if not isinstance(system, str):
        raise _fault(path, "system", "must be text")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _fault(path, "tools", "must be a list of objects")
    found = _each(path, turns, _session_turn)
    if any(turn.tool_results for turn in found) and not tools:
        raise _fault(path, "tool_results", "are there but the session has no tools")
    return Script(found, system, tuple(tools))


def _each(
    path: Path, records: Sequence[Any], make: Callable[[Path, str, Mapping[str, Any]], Turn]
) -> tuple[Turn, ...]:
    turns = []
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise _fault(path, f"[{index}]", "must be an object")
        turns.append(make(path, f"[{index}]", record))
    return tuple(turns)


def _prompt(path: Path, where: str, record: Mapping[str, Any]) -> Turn:
    _known(path, where, record, {"genre", "prompt", "expect"})
    genre = _string(path, f"{where}.genre", record.get("genre", "prompt"))
    prompt = _string(path, f"{where}.prompt", record.get("prompt"))
    return Turn(genre, prompt, _strings(path, f"{where}.expect", record.get("expect", [])))


def _needle(path: Path, where: str, record: Mapping[str, Any]) -> Turn:
    one, many = record.get("expected_answer_substring"), record.get("expected_answer_substrings")
    if (one is None) == (many is None):
        raise _fault(path, where, "needs expected_answer_substring or expected_answer_substrings")
    expect = _strings(path, f"{where}.expected_answer_substrings", [one] if many is None else many)
    if not expect:
        # a needle that nothing looks for would always be found
        raise _fault(path, where, "expects nothing")
    filler = _string(path, f"{where}.filler_text", record.get("filler_text"))
    question = _string(path, f"{where}.question", record.get("question"))
    genre = _string(path, f"{where}.genre", record.get("genre", "niah"))
    return Turn(genre, f"{filler}\n\n{question}", expect)


def _session_turn(path: Path, where: str, record: Mapping[str, Any]) -> Turn:
    _known(path, where, record, {"content", "expect", "genre", "tool_results"})
    results = record.get("tool_results", {})
    if not isinstance(results, dict):
        raise _fault(path, f"{where}.tool_results", "must be an object")
    return Turn(
        _string(path, f"{where}.genre", record.get("genre", "session")),
        _string(path, f"{where}.content", record.get("content")),
        _strings(path, f"{where}.expect", record.get("expect", [])),
        {name: _string(path, f"{where}.tool_results.{name}", text) for name, text in results.items()},
    )


def _known(path: Path, where: str, record: Mapping[str, Any], names: set[str]) -> None:
    unknown = sorted(set(record) - names)
    if unknown:
        raise _fault(path, where, f"unknown field {unknown[0]!r}")


def _string(path: Path, where: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _fault(path, where, "must be text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _fault(path, where, "holds half of a surrogate pair") from None
    return value


def _strings(path: Path, where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _fault(path, where, "must be a list of texts")
    return tuple(_string(path, f"{where}[{index}]", text) for index, text in enumerate(value))


def _items(path: Path) -> list[Any]:
    document = _json(path)
    if not isinstance(document, list) or not document:
        raise _fault(path, "file", "must be a JSON list with at least one entry")
    return document


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise _fault(path, "file", f"is not JSON: {error}") from error


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _fault(path, "file", f"cannot be read: {error.strerror}") from error
    if not data or len(data) > MAX_FILE_BYTES:
        raise _fault(path, "file", "is too long" if data else "is empty")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _fault(path, "file", "is not UTF-8 text") from error


def _fault(path: Path, where: str, text: str) -> ValidationError:
    return ValidationError(f"{path.name}: {where} {text}", hint="docs/validation.md describes the files")
