"""Keeps a reply from opening the same markup again and again, as small models do when they are lost.

It knows token ids of markup, nothing about what the markup means.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

_PAIRS: Final = (
    ("<think>", "</think>"),
    ("<tool_call>", "</tool_call>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<|channel>", "<channel|>"),
)
# how many of the newest tokens are looked at, and how many openers may stand open among them
WINDOW: Final = 20
MOST_OPEN: Final = 2


class OpenerGuard:
    """Says which openers may not come next.

    `markers` are those that the model's replies use; `token_id` gives the id of one that is a single token.
    """

    def __init__(self, markers: Collection[str], token_id: Callable[[str], int | None]) -> None:
        self._pairs: list[tuple[int, int]] = []
        for opener, closer in _PAIRS:
            ids = token_id(opener), token_id(closer)
            if opener in markers and ids[0] is not None and ids[1] is not None:
                self._pairs.append((ids[0], ids[1]))

    def banned(self, reply: Sequence[int]) -> list[int]:
        """Return the openers that already stand open too often at the end of `reply`, usually none."""
        recent = reply[-WINDOW:]
        return [opener for opener, closer in self._pairs if _open(recent, opener, closer) >= MOST_OPEN]


def _open(tokens: Sequence[int], opener: int, closer: int) -> int:
    depth = 0
    for token in tokens:
        if token == opener:
            depth += 1
        elif token == closer:
            depth = max(0, depth - 1)
    return depth
