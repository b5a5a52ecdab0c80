"""What the clients say: short questions, and texts of exactly so many tokens, each different from its first
token on.

A server may keep what it has read. Since no two prompts begin alike, none is spared its work beyond the
few tokens of the chat template that all of them share. This file does not know servers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from hipfire.base.errors import ValidationError
from hipfire.checkpoint.source import open_checkpoint
from hipfire.text.tokenizer import Tokenizer

Encode = Callable[[str], Sequence[int]]

ADJECTIVES = (
    *("red", "quiet", "broken", "golden", "tiny", "frozen", "hidden", "ancient"),
    *("wooden", "lonely", "bright", "hollow", "wild", "silver", "lost", "gentle"),
)
NOUNS = (
    *("lamp", "river", "clock", "garden", "ship", "bridge", "violin", "mountain"),
    *("letter", "forest", "mirror", "train", "island", "castle", "kite", "well"),
)
TOKENS = "tokenizer.ggml.tokens"
# a word that is one token behind any other word, as tokenizers of English have it
PAD = " the"


def encoder(path: Path) -> Encode:
    """Return the function that turns a text into the token ids of a GGUF file."""
    with open_checkpoint(path) as checkpoint:
        assets = checkpoint.text_assets()
    return Tokenizer.from_assets(assets, len((assets.gguf or {}).get(TOKENS, ()))).encode


class Texts:
    """Texts by number, the same in every run; `words` is what long ones are made of."""

    def __init__(self, encode: Encode, words: Sequence[str]) -> None:
        self._encode = encode
        self._words = tuple(words)
        firsts: dict[tuple[int, ...], str] = {}
        for word in dict.fromkeys(self._words):
            firsts.setdefault(tuple(encode(word)[:1]), word)
        self._heads = tuple(firsts.values())

    @staticmethod
    def question(number: int) -> str:
        """Return one of 256 questions that are answered at length."""
        adjective = ADJECTIVES[number % len(ADJECTIVES)]
        noun = NOUNS[(number + number // len(ADJECTIVES)) % len(NOUNS)]
        return f"A {adjective} {noun}. Tell a long story about it."

    def text(self, number: int, tokens: int) -> str:
        """Return a text of exactly `tokens` tokens; ValidationError if the tokenizer does not allow that."""
        order = random.Random(number)
        words = [self._heads[number % len(self._heads)], *order.choices(self._words, k=tokens)]
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._count(words[:middle]) <= tokens else (low, middle - 1)
        text = " ".join(words[:low])
        text += PAD * (tokens - len(self._encode(text)))
        if len(self._encode(text)) != tokens:
            raise ValidationError(
                f"no text of exactly {tokens} tokens can be made for this tokenizer",
                hint="choose another model",
            )
        return text

    def _count(self, words: Sequence[str]) -> int:
        return len(self._encode(" ".join(words)))
