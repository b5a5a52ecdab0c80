"""Gemma's thought channel told apart from the answer while the text arrives.

A thought stands between `<|channel>thought` and `<channel|>` at the beginning of a reply. How the text is cut
into parts changes nothing, and only a suffix that may still become a marker waits. This file knows no tokens,
no stop strings and no tool calls.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import partial
from typing import Final

from hipfire.text.markup import MarkerFinder, Piece, ReplyChannel, cut, joined

CHANNEL: Final = "<|channel>"
THOUGHT: Final = "<|channel>thought"
CHANNEL_END: Final = "<channel|>"
MARKERS: Final = (THOUGHT, CHANNEL, "<|channel|>", CHANNEL_END, "<|turn>", "<turn|>")
# "<", "<|", "<c" and the like are things that people write; "<|c" is not
_CONTROL_START: Final = "<|"


class _State(Enum):
    AWAITING = auto()
    REASONING = auto()
    ANSWER = auto()


class GemmaRouter:
    """One reply's text to pieces.

    A reply that begins with a thought's header is reasoning up to the channel's end; any other reply is
    answer from its first character. In an answer no marker opens a thought again: each is taken out and the
    text around it stays. One newline behind a marker goes with it. At the end an unfinished marker of more
    than two characters that begins with `<|` is dropped, every other held text is shown.
    """

    def __init__(
        self, *, in_thinking: bool = False, closed: bool = False, keep_markers: bool = False
    ) -> None:
        """Begin a reply; `in_thinking`: the prompt ends inside an open thought.

        `closed`: thinking is off, so nothing is reasoning. `keep_markers` leaves every character in: the
        texts of all pieces, joined, are then the text that came in.
        """
        self._finder = MarkerFinder(MARKERS)
        self._state = _State.REASONING if in_thinking else _State.ANSWER if closed else _State.AWAITING
        self._keep = keep_markers
        self._held = ""
        # white space in front of a header or of the answer's first word, while awaiting either
        self._lead = ""
        self._skip_newline = False

    @property
    def in_reasoning(self) -> bool:
        """Say whether the text that comes next is reasoning."""
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Piece]:
        """Take the next part of the text; return what can no longer become a marker."""
        return self._split(self._held + text, final=False)

    def finish(self) -> list[Piece]:
        """End the reply; return what was held back unless it is the beginning of a control marker."""
        held = self._held
        unfinished = held.startswith(_CONTROL_START) and held != _CONTROL_START
        if unfinished and self._finder.may_grow(held) and held not in MARKERS and not self._keep:
            held = ""
        pieces = self._split(held, final=True)
        lead, self._lead = self._lead, ""
        return joined([*pieces, Piece(self._channel(), lead)])

    def _channel(self) -> ReplyChannel:
        return "reasoning" if self.in_reasoning else "answer"

    def _split(self, text: str, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        take_text, take_marker = partial(self._text, pieces), partial(self._marker, pieces)
        self._held = cut(self._finder, text, take_text, take_marker, final=final)
        return joined(pieces)

    def _text(self, pieces: list[Piece], text: str) -> None:
        if not text:
            return
        if self._skip_newline:
            self._skip_newline = False
            text = text.removeprefix("\n")
        if self._state is _State.AWAITING:
            self._lead += text
            if not self._lead or self._lead.isspace():
                return
            text, self._lead = self._lead, ""
            self._state = _State.ANSWER
        pieces.append(Piece(self._channel(), text))

    def _marker(self, pieces: list[Piece], marker: str) -> None:
        before = self._channel()
        if self._state is _State.AWAITING and marker == THOUGHT:
            self._state = _State.REASONING
        elif self._state is _State.AWAITING or marker == CHANNEL_END:
            self._state = _State.ANSWER
        lead, self._lead = self._lead, ""
        if not self._keep:
            self._skip_newline = True
            return
        # a thought's own markers go with the thought
        kept: ReplyChannel = "reasoning" if "reasoning" in (before, self._channel()) else "answer"
        pieces.append(Piece(kept, lead + marker))
