"""Control tokens: finding them in a text, and leaving alone those that the text's author may not write.

This file knows spellings and positions, nothing about engines, vocabularies as files or chats.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from hipfire.text.origin import Spans

_MARKER: Final = re.compile(r"<\|.*|.*\|>|</?(?:think|tool_call|tool_calls|tool_response|tools|answer)>")

_WORD: Final = frozenset(["Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"])
# joiners, and the symbols that count as letters
_WORD_SIGNS: Final = re.compile(
    "[\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]"
)


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that ordinary text never becomes, and whether it swallows the spaces around it."""

    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A control token at characters [start, end) of a text, swallowed spaces included."""

    start: int
    end: int
    token_id: int


class ControlScanner:
    """Finds the leftmost and, at one place, longest control tokens; the work is linear in the text."""

    def __init__(self, controls: Mapping[str, ControlToken]) -> None:
        self._controls = controls
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for text in controls:
            lengths[text[:2]].add(len(text))
        for prefix, known in lengths.items():
            known |= {1} if prefix[0] in controls else set()
        self._lengths = {prefix: sorted(known, reverse=True) for prefix, known in lengths.items()}
        longest_first = sorted(self._lengths, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def scan(self, text: str, ordinary: Spans = (), *, in_words: bool = False) -> Iterator[Found]:
        """Yield the control tokens in `text` in order; one that touches the `ordinary` ranges is passed over.

        `ordinary` are sorted, disjoint [start, end) ranges of characters. `in_words` finds tokens that stand
        only for whole words inside words too.
        """
        if ordinary[:1] == ((0, len(text)),):
            return
        position = previous = nearest = 0
        while (begin := self._start.search(text, position)) is not None:
            start = begin.start()
            while nearest < len(ordinary) and ordinary[nearest][1] <= start:
                nearest += 1
            spelled = self._at(text, start, begin.group(), in_words)
            blocked = nearest < len(ordinary) and spelled and ordinary[nearest][0] < start + len(spelled)
            if not spelled or blocked:
                position = start + 1
                continue
            control = self._controls[spelled]
            end = start + len(spelled)
            if control.lstrip:
                start = previous + len(text[previous:start].rstrip())
            if control.rstrip:
                end += len(text) - end - len(text[end:].lstrip())
            yield Found(start, end, control.token_id)
            position = previous = end

    def _at(self, text: str, start: int, prefix: str, in_words: bool) -> str:
        """Return the longest control token that begins at `start` with `prefix`, or ""."""
        for length in self._lengths[prefix]:
            spelled = text[start : start + length]
            control = self._controls.get(spelled)
            if control is None:
                continue
            if in_words or not (control.single_word and _inside_word(text, start, length)):
                return spelled
        return ""


def is_marker(text: str, written: str) -> bool:
    """Say whether a token that is not flagged as special is still markup of the chat format.

    `written` is all that the model's templates can write.
    """
    if not text.strip():
        return False
    return _MARKER.fullmatch(text) is not None or text in written


def _inside_word(text: str, start: int, length: int) -> bool:
    around = text[max(start - 1, 0) : start] + text[start + length : start + length + 1]
    return any(map(_in_word, around))


def _in_word(character: str) -> bool:
    """Say whether a character belongs to words as the tokenizers library has it: Unicode's rule for `\\w`."""
    return unicodedata.category(character) in _WORD or _WORD_SIGNS.match(character) is not None
