"""Tool calls in a finished reply, in the dialect of the model's chat template.

One file for each dialect reads a block; this one finds the blocks, brings arguments to the types of the
tools' schemas and keeps what is no call. It knows no streams: reply_parser.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from hipfire.base.printable import one_line
from hipfire.text.markup import MarkerFinder
from hipfire.text.tools import gemma, hermes, qwen_xml
from hipfire.text.tools.block import Block, RawCall
from hipfire.text.tools.coerce import coerce_arguments

Dialect = Literal["hermes", "qwen_xml", "gemma"]

# a reply that has run away may be all openers, and looking behind each of them takes its time
_MAX_FAILED: Final = 32


class ToolCallText(NamedTuple):
    """A call found in a reply. `repaired`: the text or the arguments were not quite what was asked for."""

    name: str
    arguments: dict[str, Any]
    repaired: bool


class ParsedCalls(NamedTuple):
    """The calls of a text, the text that belongs to none of them, and one line for each repair.

    `doubtful` of the calls, the last ones, are those of a block that is not as it should be: if the text was
    cut, then there.
    """

    calls: tuple[ToolCallText, ...]
    rest: str
    repairs: tuple[str, ...]
    doubtful: int = 0


@dataclass(frozen=True, slots=True)
class _Form:
    """What may begin a block, which tokens its markup is made of, and who reads it, in this order."""

    openers: tuple[str, ...]
    markers: tuple[str, ...]
    readers: tuple[tuple[str, Callable[[str, int], Block | None]], ...]


_HERMES: Final = (hermes.OPEN, hermes.read)
_FORMS: Final[Mapping[Dialect, _Form]] = MappingProxyType(
    {
        "hermes": _Form((hermes.OPEN,), (hermes.OPEN, hermes.CLOSE), (_HERMES,)),
        "qwen_xml": _Form(
            (qwen_xml.OPEN, qwen_xml.FUNCTION),
            (qwen_xml.OPEN, qwen_xml.CLOSE),
            (("", qwen_xml.read), _HERMES),
        ),
        "gemma": _Form(
            (gemma.OPEN, gemma.JSON_OPEN),
            (gemma.OPEN, gemma.CLOSE, gemma.QUOTE, gemma.JSON_OPEN, gemma.JSON_CLOSE),
            (("", gemma.read),),
        ),
    }
)


def openers_of(dialect: Dialect) -> tuple[str, ...]:
    """Return the texts with which a call may begin."""
    return _FORMS[dialect].openers


def markers_of(dialect: Dialect) -> tuple[str, ...]:
    """Return the markup that vocabularies may have as tokens."""
    return _FORMS[dialect].markers


def parse_calls(dialect: Dialect, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCalls:
    """Return the calls in a finished text.

    `tools` are function schemas of the OpenAI shape; a call of a function that is not among them keeps its
    arguments as the model wrote them. A text without a call comes back whole as `rest`; beside calls, white
    space around the rest is left out.
    """
    form = _FORMS[dialect]
    finder = MarkerFinder(form.openers)
    schemas = _schemas(tools)
    calls: list[ToolCallText] = []
    repairs: list[str] = []
    rest: list[str] = []
    at = failed = doubtful = 0
    while failed < _MAX_FAILED and (found := finder.find(text, at, final=True)).marker is not None:
        block = _read(form, text, found.start)
        if block is None:
            failed += 1
            end = found.start + len(found.marker)
            rest.append(text[at:end])
            at = end
            continue
        rest.append(text[at : found.start])
        at = block.end
        doubtful = len(block.calls) if block.repairs else 0
        names = ", ".join(call.name for call in block.calls)
        repairs += [f"{names}: {line}" for line in block.repairs]
        for call in block.calls:
            made, lines = _typed(call, schemas)
            calls.append(ToolCallText(call.name, made, bool(block.repairs or lines)))
            repairs += lines
    left = "".join(rest) + text[at:]
    shown = left.strip() if calls else left
    return ParsedCalls(tuple(calls), shown, tuple(map(one_line, repairs)), doubtful)


def _read(form: _Form, text: str, start: int) -> Block | None:
    for opener, reader in form.readers:
        block = reader(text, start) if text.startswith(opener, start) else None
        if block is not None:
            return block
    return None


def _typed(call: RawCall, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    schema = schemas.get(call.name, {})
    made, lines = coerce_arguments(call.arguments, schema, texts=call.texts)
    return made, [f"{call.name}: argument {line}" for line in lines]


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameter schema of each function by its name."""
    found: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters")
    return found
