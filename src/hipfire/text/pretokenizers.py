"""How each family of byte-level BPE vocabularies cuts text before merging, by its GGUF name.

The names are the values of `tokenizer.ggml.pre`. A name that is not in the table is refused: a wrong cut
gives wrong ids in silence. This file knows nothing about vocabularies, files or merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from hipfire.base.errors import UnsupportedError

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _words_with_marks(digits: str) -> str:
    word = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    return rf"{_ENGLISH}|{word}|{digits}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One family's rule.

    `stages` are regular expressions applied one after another, each isolating its matches inside the pieces
    that the stage before left. `nfc` says that text is composed first, `ignore_merges` that a whole piece
    found in the vocabulary is taken as it is, `add_bos` whether prompts begin with BOS when the file itself
    does not say.
    """

    stages: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """Return the stages as a `tokenizers` pre-tokenizer that ends in the byte alphabet."""
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(stage), behavior="isolated") for stage in self.stages
        ]
        return pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the family's normalizer, or None."""
        return normalizers.NFC() if self.nfc else None


_LLAMA3: Final = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_TRIPLES: Final = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2: Final = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_PLAIN: Final = PreTokenizer((_GPT2,))
_PLAIN_NFC: Final = PreTokenizer((_GPT2,), nfc=True)
_SINGLE_DIGITS: Final = PreTokenizer((r"\p{N}", _GPT2))
_O200K: Final = PreTokenizer((_cased_words(r"\p{N}{1,3}", rf"{_ENGLISH}?"),))
_CJK_V3: Final = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_DEEPSEEK_V3_WORDS: Final = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)

FAMILIES: Final = MappingProxyType(
    {
        "gpt-2": _PLAIN,
        "phi-2": _PLAIN,
        "mpt": _PLAIN_NFC,
        "olmo": _PLAIN_NFC,
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "dbrx": _TRIPLES,
        "smaug-bpe": _TRIPLES,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "qwen35": PreTokenizer((_words_with_marks(r"\p{N}"),), nfc=True),
        "gpt-4o": _O200K,
        "llama4": _O200K,
        "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
        "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CJK_V3, _DEEPSEEK_V3_WORDS)),
    }
)


def family(name: str | None) -> PreTokenizer:
    """Return the rule named by `tokenizer.ggml.pre`; raise UnsupportedError, naming it, if there is none."""
    if name is None or name == "default":
        raise UnsupportedError(
            f"the vocabulary does not say how text is cut before merging (tokenizer.ggml.pre is {name!r})",
            hint="convert the model again with a converter that records the pre-tokenizer",
        )
    rule = FAMILIES.get(name)
    if rule is None:
        raise UnsupportedError(
            f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre)",
            hint=f"known are: {', '.join(sorted(FAMILIES))}",
        )
    return rule
