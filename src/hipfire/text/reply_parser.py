"""A reply's text, as it arrives, to the pieces that clients are shown and the tool calls at its end.

Text passes the splitter of the model's thinking format, then, on the answer alone, the gate that keeps tool
calls back, then the stop strings. How the text is cut into parts changes nothing. This file knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hipfire.text.gemma_router import GemmaRouter
from hipfire.text.markup import MarkerFinder, Piece, joined
from hipfire.text.reply_format import ReplyFormat
from hipfire.text.stops import StopMatcher
from hipfire.text.think_splitter import ThinkSplitter
from hipfire.text.tools import Dialect, ToolCallText, openers_of, parse_calls

__all__ = ["Piece", "ReplyParser", "ToolCallText"]


class _Splitter(Protocol):
    @property
    def in_reasoning(self) -> bool: ...
    def push(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


class _Plain:
    """For models without thoughts: everything is answer, at once."""

    in_reasoning = False

    def push(self, text: str) -> list[Piece]:
        return joined([Piece("answer", text)])

    def finish(self) -> list[Piece]:
        return []


class ReplyParser:
    """The parser of one reply; see `push` and `finish`.

    Without `tools`, or with a template that has no calls, tool markup is ordinary text. With them, text from
    the first opener on is withheld, with the white space in front of it; what of it turns out at the end to
    be no call is released as answer. A stop string ends the reply where it stands in the answer: text after
    it is dropped, reasoning and calls are not searched.
    """

    def __init__(
        self,
        fmt: ReplyFormat,
        *,
        in_thinking: bool,
        closed: bool = False,
        stops: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        keep_markers: bool = False,
    ) -> None:
        """Begin a reply; `in_thinking` and `closed` as reply_format.py reads them off the prompt.

        `keep_markers` leaves the thinking markers in the reasoning's pieces. Raises `ValidationError` for
        stop strings that are empty.
        """
        self._splitter = _splitter(fmt, in_thinking=in_thinking, closed=closed, keep=keep_markers)
        self._gate = _Gate(fmt.tools, tools)
        self._stops = StopMatcher(stops)
        self._finished = False

    @property
    def matched(self) -> str | None:
        """Return the stop string that ended the reply, or None."""
        return self._stops.matched

    @property
    def in_reasoning(self) -> bool:
        """Say whether the reply is inside a thought."""
        return self._splitter.in_reasoning

    def push(self, text: str) -> list[Piece]:
        """Take the next part of the text; return what can be shown now, channel by channel.

        After a stop string or `finish` there is nothing more.
        """
        return [] if self._finished else self._passed(self._splitter.push(text))

    def finish(self) -> list[Piece]:
        """End the reply: return everything that was held back and is shown after all."""
        if self._finished:
            return []
        self._finished = True
        pieces = self._passed(self._splitter.finish())
        if self.matched is None:
            last = self._stops.push(self._gate.finish()).text + self._stops.flush().text
            pieces.append(Piece("answer", last))
        return joined(pieces)

    def calls(self) -> tuple[ToolCallText, ...]:
        """Return the calls of the finished reply, in order; none before `finish`."""
        return self._gate.calls

    def sure_calls(self) -> tuple[ToolCallText, ...]:
        """Return those of `calls` that are complete although the reply may have been cut."""
        return self._gate.calls[: len(self._gate.calls) - self._gate.doubtful]

    def repairs(self) -> tuple[str, ...]:
        """Return a line for each thing about the calls that had to be put right; none before `finish`."""
        return self._gate.repairs

    def _passed(self, pieces: Sequence[Piece]) -> list[Piece]:
        shown: list[Piece] = []
        for piece in pieces:
            if self.matched is not None:
                break
            if piece.channel == "answer":
                piece = Piece("answer", self._stops.push(self._gate.push(piece.text)).text)
            shown.append(piece)
        return joined(shown)


class _Gate:
    """Lets answer text through up to the first tool opener; without a dialect or tools, all of it."""

    def __init__(self, dialect: Dialect | None, tools: Sequence[Mapping[str, Any]]) -> None:
        self._dialect = dialect if tools else None
        self._tools = tools
        self._finder = MarkerFinder(openers_of(self._dialect) if self._dialect else ())
        self._held = ""
        self._space = ""
        self._withheld: list[str] = []
        self.calls: tuple[ToolCallText, ...] = ()
        self.repairs: tuple[str, ...] = ()
        self.doubtful = 0

    def push(self, text: str) -> str:
        """Return what is certainly no call and no white space in front of one."""
        if self._dialect is None:
            return text
        if self._withheld:
            self._withheld.append(text)
            return ""
        text = self._held + text
        found = self._finder.find(text)
        shown = text[: found.start].rstrip()
        if found.marker is None:
            self._held = text[len(shown) :]
            return shown
        self._held = ""
        self._space = text[len(shown) : found.start]
        self._withheld.append(text[found.start :])
        return shown

    def finish(self) -> str:
        """Read the calls; return the text that is none."""
        held, self._held = self._held, ""
        if self._dialect is None or not self._withheld:
            return held
        parsed = parse_calls(self._dialect, "".join(self._withheld), self._tools)
        self.calls, self.repairs, self.doubtful = parsed.calls, parsed.repairs, parsed.doubtful
        return self._space + parsed.rest if parsed.rest else ""


def _splitter(fmt: ReplyFormat, *, in_thinking: bool, closed: bool, keep: bool) -> _Splitter:
    if fmt.thinking == "think":
        return ThinkSplitter(in_thinking=in_thinking, closed=closed, keep_markers=keep)
    if fmt.thinking == "gemma":
        return GemmaRouter(in_thinking=in_thinking, closed=closed, keep_markers=keep)
    return _Plain()
