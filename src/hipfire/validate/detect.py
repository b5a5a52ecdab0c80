"""Signs that a served reply is degenerate: empty, cut off, stuck in a loop, leaking markup, forgetful.

These rules see the text of one finished reply, as words. They are measurements and change nothing. The
limits are stated here once; the detectors over tokens (detectors_tokens.py) use the same ones. This file
does not know servers, requests or verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

WINDOW: Final = 128
FIRST_DISTINCT: Final = 0.15
LAST_DISTINCT: Final = 0.30
TOP_SHARE: Final = 0.50
REPEATED_TRIGRAM_SHARE: Final = 0.50
# a short answer may repeat itself for good reasons, and one word always fills its own window
MIN_WORDS: Final = 8
# a loop may do without white space; tables and comments hold lines of one character that are shorter
MIN_RUN_CHARS: Final = 256

# control tokens and tags that no reader of a reply should ever see
MARKERS: Final = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|channel>",
    "<channel|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)


@dataclass(frozen=True, slots=True)
class Attractor:
    """Whether a reply is stuck in a loop, and which rule said so.

    `rule` is the measure that went over its `limit`, `window` where it was taken, `value` what it was; all
    three are None if nothing fired. `min_window_skipped` tells that the reply of `words` words was too short
    to be judged.
    """

    fired: bool
    words: int
    rule: str | None = None
    window: str | None = None
    value: float | None = None
    limit: float | None = None
    min_window_skipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def words_of(reasoning: str, visible: str) -> list[str]:
    """Return the words, separated by white space, of a reply's reasoning and then of its visible text."""
    return f"{reasoning} {visible}".split()


def attractor(words: Sequence[str]) -> Attractor:
    """Return whether these words are a loop.

    Judged are the first and the last `WINDOW` words (share of distinct words, share of the commonest one)
    and the second half (share of three-word runs that occur more than once). Fewer than `MIN_WORDS` words
    are not judged. The second half of a word of `MIN_RUN_CHARS` characters is judged by its characters.
    """
    count = len(words)
    longest = max(words, key=len, default="")
    if len(longest) >= MIN_RUN_CHARS:
        value = repeated_trigram_share(longest[len(longest) // 2 :])
        if value > REPEATED_TRIGRAM_SHARE:
            rule = "repeated_trigram_share"
            return Attractor(True, count, rule, "longest_word", value, REPEATED_TRIGRAM_SHARE)
    if count < MIN_WORDS:
        return Attractor(fired=False, words=count, min_window_skipped=True)
    for window, part, least in (
        ("first_128", words[:WINDOW], FIRST_DISTINCT),
        ("last_128", words[-WINDOW:], LAST_DISTINCT),
    ):
        if (value := distinct_share(part)) < least:
            return Attractor(True, count, "distinct_share", window, value, least)
        if (value := top_word_share(part)) > TOP_SHARE:
            return Attractor(True, count, "top_word_share", window, value, TOP_SHARE)
    if (value := repeated_trigram_share(words[count // 2 :])) > REPEATED_TRIGRAM_SHARE:
        return Attractor(True, count, "repeated_trigram_share", "second_half", value, REPEATED_TRIGRAM_SHARE)
    return Attractor(fired=False, words=count)


def distinct_share(items: Sequence[Hashable]) -> float:
    """Return the number of different items over the number of items; 1 for none."""
    return len(set(items)) / len(items) if items else 1.0


def top_share(items: Sequence[Hashable]) -> float:
    """Return the share of the commonest item; 0 for none."""
    return Counter(items).most_common(1)[0][1] / len(items) if items else 0.0


def top_word_share(words: Sequence[str]) -> float:
    """Return the share of the commonest word with a letter or digit; half of a table may be its bars."""
    spoken = Counter(word for word in words if any(map(str.isalnum, word)))
    return max(spoken.values(), default=0) / len(words) if words else 0.0


def repeated_trigram_share(items: Sequence[Hashable]) -> float:
    """Return the share of runs of three that occur more than once; 0 where there is no run.

    Unlike `top_trigram_density` this sees a loop of any length.
    """
    counts = Counter(zip(items, items[1:], items[2:], strict=False))
    total = counts.total()
    return sum(count for count in counts.values() if count > 1) / total if total else 0.0


def top_trigram_density(items: Sequence[Hashable]) -> float:
    """Return the share of the commonest run of three; a loop of p items gives about 1 / p."""
    counts = Counter(zip(items, items[1:], items[2:], strict=False))
    return counts.most_common(1)[0][1] / counts.total() if counts else 0.0


def missing_texts(expected: Sequence[str], answer: str) -> tuple[str, ...]:
    """Return the expected texts that the answer does not hold, without regard to case."""
    folded = answer.casefold()
    return tuple(text for text in expected if text.casefold() not in folded)


def leaked_markers(visible: str) -> tuple[str, ...]:
    """Return the control tokens and tags in a visible text, each once."""
    return tuple(marker for marker in MARKERS if marker in visible)
