"""The vocabulary of a GGUF file: byte-level BPE with its family's pre-tokenizer, or SentencePiece by scores.

This file knows the `tokenizer.ggml.*` keys and nothing about chats, BOS rules of prompts or other metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, models, normalizers

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import TextAssets
from hipfire.text.controls import ControlToken, is_marker
from hipfire.text.gguf_keys import check_types
from hipfire.text.pretokenizers import family
from hipfire.text.template_words import template_words
from hipfire.text.vocabulary import Spelling, Vocabulary, check_rows

_PREFIX: Final = "tokenizer.ggml."
_TOKENS: Final = _PREFIX + "tokens"


class Kind(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def from_gguf(assets: TextAssets, rows: int) -> Vocabulary:
    """Return the vocabulary of `assets.gguf` for an embedding of `rows` rows.

    Raises ArtifactError for missing or contradicting keys and for ids that the embedding lacks,
    UnsupportedError for other kinds of vocabulary and unknown pre-tokenizers.
    """
    keys = assets.gguf or {}
    check_types(keys)
    tokens = _strings(keys, "tokens")
    kinds = _kinds(keys, len(tokens))
    check_rows(_TOKENS, len(tokens) - 1, rows)
    controls, plain = _not_merged(keys, tokens, kinds, template_words(assets.chat_templates.values()))
    model = keys.get(_PREFIX + "model")
    if model == "gpt2":
        return _byte_level(keys, tokens, kinds, controls, plain)
    if model == "llama":
        return _sentencepiece(keys, tokens, kinds, controls, plain)
    raise UnsupportedError(
        f"unknown kind of vocabulary {model!r} ({_PREFIX}model)",
        hint="known are gpt2 (byte-level BPE) and llama (SentencePiece)",
    )


def _not_merged(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], written: str
) -> tuple[dict[str, ControlToken], list[str]]:
    """Return the control tokens, and the other tokens that are matched whole.

    What a file declares as the begin or end of texts is a control token whatever type converters gave it.
    """
    special, user_defined = {int(Kind.CONTROL), int(Kind.UNKNOWN)}, int(Kind.USER_DEFINED)
    values = [keys.get(f"{_PREFIX}{role}_token_id") for role in ("bos", "eos", "eot", "eom")]
    declared = {value for value in values if isinstance(value, int)}
    controls: dict[str, ControlToken] = {}
    plain: list[str] = []
    for number, kind in enumerate(kinds):
        if kind in special or number in declared:
            controls.setdefault(tokens[number], ControlToken(number, special=True))
        elif kind == user_defined and is_marker(tokens[number], written):
            controls.setdefault(tokens[number], ControlToken(number, special=False))
        elif kind == user_defined and tokens[number]:
            plain.append(tokens[number])
    controls.pop("", None)
    return controls, plain


def _byte_level(
    keys: Mapping[str, Any],
    tokens: Sequence[str],
    kinds: Sequence[int],
    controls: Mapping[str, ControlToken],
    plain: Sequence[str],
) -> Vocabulary:
    rule = family(keys.get(_PREFIX + "pre"))
    merges = []
    for index, merge in enumerate(_strings(keys, "merges")):
        left, gap, right = merge.partition(" ")
        if not (left and gap and right):
            raise ArtifactError(f"merge {index} is not two tokens: {merge!r}", field=_PREFIX + "merges")
        merges.append((left, right))
    engine = _engine(_ids(tokens, kinds), merges, ignore_merges=rule.ignore_merges)
    normalizer = rule.normalizer()
    if normalizer is not None:
        engine.normalizer = normalizer
    engine.pre_tokenizer = rule.splitter()
    _add_plain(engine, plain)
    return Vocabulary(
        head=engine,
        tail=engine,
        texts=_texts(tokens, kinds),
        controls=controls,
        spelling=Spelling.BYTE_LEVEL,
        raw_ids=_of_kind(kinds, Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED),
        add_bos=rule.add_bos,
    )


def _sentencepiece(
    keys: Mapping[str, Any],
    tokens: Sequence[str],
    kinds: Sequence[int],
    controls: Mapping[str, ControlToken],
    plain: Sequence[str],
) -> Vocabulary:
    scores = keys.get(_PREFIX + "scores")
    if scores is None or len(scores) != len(tokens):
        raise ArtifactError(f"not one score for each of {len(tokens)} tokens", field=_PREFIX + "scores")
    ids = _ids(tokens, kinds)
    unknown = next((tokens[index] for index, kind in enumerate(kinds) if kind == Kind.UNKNOWN), None)
    if unknown is None:
        number = keys.get(_PREFIX + "unknown_token_id")
        unknown = tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
    engine = _engine(
        ids, score_merges(tokens, kinds, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    _add_plain(engine, plain)
    prefix = bool(keys.get(_PREFIX + "add_space_prefix", True))
    return Vocabulary(
        head=engine,
        tail=engine,
        texts=_texts(tokens, kinds),
        controls=controls,
        spelling=Spelling.SENTENCEPIECE,
        raw_ids=_of_kind(kinds, Kind.CONTROL, Kind.UNKNOWN),
        adds_prefix_space=prefix,
        drops_prefix_space=prefix,
        add_bos=True,
    )


def score_merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return SentencePiece's score order as a list of BPE merges, the best first.

    Every normal token is made by each of its splits into two normal tokens. Splits of one token follow one
    another, the longest left part first, as published conversions have them.
    """
    mergeable = int(Kind.NORMAL)
    numbers = [number for number, kind in enumerate(kinds) if kind == mergeable]
    normal = {tokens[number] for number in numbers}
    numbers.sort(key=scores.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    for number in numbers:
        text = tokens[number]
        merges += [
            (text[:cut], text[cut:])
            for cut in range(len(text) - 1, 0, -1)
            if text[:cut] in normal and text[cut:] in normal
        ]
    return merges


def _engine(ids: Mapping[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=dict(ids), merges=merges, **options))
    except Exception as error:  # the library raises bare Exception for merges of tokens that do not exist
        raise ArtifactError(
            f"the vocabulary does not fit its merges: {error}", field=_PREFIX + "merges"
        ) from error


def _add_plain(engine: Tokenizer, plain: Sequence[str]) -> None:
    """Register user-defined tokens: matched whole in the raw text, before any merging."""
    engine.add_tokens([AddedToken(text, normalized="\u2581" in text, special=False) for text in plain])


def _ids(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Return token to id, the lowest id where a text occurs twice; placeholders are left out."""
    unused = int(Kind.UNUSED)
    last = len(tokens) - 1
    return {tokens[last - back]: last - back for back in range(len(tokens)) if kinds[last - back] != unused}


def _texts(tokens: Sequence[str], kinds: Sequence[int]) -> list[str | None]:
    unused = int(Kind.UNUSED)
    return [None if kind == unused else text for text, kind in zip(tokens, kinds, strict=True)]


def _of_kind(kinds: Sequence[int], *wanted: Kind) -> frozenset[int]:
    numbers = {int(kind) for kind in wanted}
    return frozenset(number for number, kind in enumerate(kinds) if kind in numbers)


def _strings(keys: Mapping[str, Any], name: str) -> Sequence[str]:
    value = keys.get(_PREFIX + name)
    if not value:
        raise ArtifactError("the list is missing or empty", field=_PREFIX + name)
    texts: Sequence[str] = value
    return texts


def _kinds(keys: Mapping[str, Any], count: int) -> Sequence[int]:
    value = keys.get(_PREFIX + "token_type")
    if value is None:
        return [int(Kind.NORMAL)] * count
    types: Sequence[int] = value
    if len(types) != count:
        raise ArtifactError(f"not one type for each of {count} tokens", field=_PREFIX + "token_type")
    return types
