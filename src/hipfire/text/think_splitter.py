"""Reasoning between `<think>` and `</think>`, told apart from the answer while the text arrives.

How the text is cut into parts changes nothing, and only a suffix that may still become a marker waits. This
file knows no tokens, no stop strings and no tool calls.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from hipfire.text.markup import MarkerFinder, Piece, ReplyChannel, cut, joined

THINK: Final = "<think>"
THINK_END: Final = "</think>"
# models that spell their end of turn as ordinary text
TURN_ENDS: Final = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>")
_NEWLINES: Final = "\r\n"
_MENTION: Final = "`"


class ThinkSplitter:
    """One reply's text to pieces.

    Markers are taken out, with the newlines behind an opener or a closer and the white space before one that
    begins the reply. A marker of the answer right behind a backtick is a mention of it and stays. The first
    closer ends a span however many openers it holds. What is an unfinished marker at the end is text.
    """

    def __init__(
        self,
        *,
        in_thinking: bool = False,
        closed: bool = False,
        keep_markers: bool = False,
        turn_ends: tuple[str, ...] = TURN_ENDS,
    ) -> None:
        """Begin a reply; `in_thinking`: the prompt ends inside an open span.

        `closed`: thinking is off, so nothing is reasoning and openers are only taken out. `keep_markers`
        leaves every character in: the texts of all pieces, joined, are then the text that came in.
        """
        self._finder = MarkerFinder((THINK, THINK_END, *turn_ends))
        self._channel: ReplyChannel = "reasoning" if in_thinking else "answer"
        self._closed = closed
        self._keep = keep_markers
        self._held = ""
        # white space in front of the reply's first word: None once that word has come
        self._lead: str | None = None if in_thinking else ""
        self._skip_newlines = False
        self._last = ""

    @property
    def in_reasoning(self) -> bool:
        """Say whether the text that comes next is reasoning."""
        return self._channel == "reasoning"

    def push(self, text: str) -> list[Piece]:
        """Take the next part of the text; return what can no longer become a marker."""
        return self._split(self._held + text, final=False)

    def finish(self) -> list[Piece]:
        """End the reply; return what was held back, which is text."""
        pieces = self._split(self._held, final=True)
        lead, self._lead = self._lead, None
        return joined([*pieces, Piece(self._channel, lead or "")])

    def _split(self, text: str, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        take_text, take_marker = partial(self._text, pieces), partial(self._marker, pieces)
        self._held = cut(self._finder, text, take_text, take_marker, final=final)
        return joined(pieces)

    def _text(self, pieces: list[Piece], text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._skip_newlines:
            text = text.lstrip(_NEWLINES)
            self._skip_newlines = not text
        if self._lead is not None:
            text = self._lead + text
            self._lead = None if text.strip() else text
            if self._lead is not None:
                return
        pieces.append(Piece(self._channel, text))

    def _marker(self, pieces: list[Piece], marker: str) -> None:
        if self._channel == "answer" and self._last == _MENTION:
            self._text(pieces, marker)
            return
        self._last = ""
        before = self._channel
        if marker == THINK and not self._closed:
            self._channel = "reasoning"
        elif marker == THINK_END:
            self._channel = "answer"
        thinking = marker in (THINK, THINK_END)
        if self._keep:
            # a span's own markers go with the span
            kept: ReplyChannel = "reasoning" if "reasoning" in (before, self._channel) else "answer"
            pieces.append(Piece(kept, (self._lead or "") + marker))
            self._lead = None
        elif thinking:
            self._skip_newlines = True
            self._lead = "" if self._lead is not None and self._channel == "answer" else None


def strip_reasoning(text: str) -> tuple[str, str]:
    """Return (reasoning, answer) of an assistant message that has its thinking inline.

    A closer that no opener precedes ends reasoning that began with the text, as clients send it that were
    never shown the opener; a span that is never closed reaches to the end. Text without such markup is
    returned unchanged as the answer.
    """
    opener, closer = _first(text, THINK), _first(text, THINK_END)
    if opener < 0 and closer < 0:
        return "", text
    begins_inside = closer >= 0 and not 0 <= opener < closer
    splitter = ThinkSplitter(in_thinking=begins_inside, turn_ends=())
    pieces = [*splitter.push(text), *splitter.finish()]
    reasoning = "".join(piece.text for piece in pieces if piece.channel == "reasoning")
    answer = "".join(piece.text for piece in pieces if piece.channel == "answer")
    return reasoning.strip(_NEWLINES), answer


def _first(text: str, marker: str) -> int:
    """Return where the first `marker` stands that is not a mention, or -1."""
    place = text.find(marker)
    while place > 0 and text[place - 1] == _MENTION:
        place = text.find(marker, place + 1)
    return place
