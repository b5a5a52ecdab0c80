"""A vocabulary: what each id stands for, and the `tokenizers` engine that turns ordinary text into ids.

Control tokens are kept out of the engine's hands: it never produces one from text. This file reads
`tokenizer.json`; vocab_gguf.py builds the same object from a GGUF file. Neither knows about chats or BOS
rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TextAssets
from hipfire.text.controls import ControlToken, is_marker
from hipfire.text.template_words import template_words

_SPM_DECODERS: Final = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class Spelling(Enum):
    """How token texts spell bytes."""

    BYTE_LEVEL = "byte alphabet of GPT-2"
    SENTENCEPIECE = "U+2581 for a space, <0xNN> for a byte"
    OTHER = "as the engine's own decoder says"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything `Tokenizer` needs.

    `head` encodes text at the start of a prompt, `tail` text after a control token (they differ only where
    the engine puts a space before the first word). `texts[id]` is the token as the file spells it, None for
    ids that stand for nothing. `raw_ids` are tokens spelled as plain text. `prefix_space`: a space is put
    before text and dropped again in front of decoded text.
    """

    head: Tokenizer
    tail: Tokenizer
    texts: list[str | None]
    controls: Mapping[str, ControlToken]
    spelling: Spelling
    raw_ids: frozenset[int] = frozenset()
    adds_prefix_space: bool = False
    drops_prefix_space: bool = False
    bos_id: int | None = None
    add_bos: bool = False


def from_tokenizer_json(assets: TextAssets, rows: int) -> Vocabulary:
    """Return the vocabulary of `assets.tokenizer_json` for an embedding of `rows` rows.

    Raises ArtifactError where it is not a usable tokenizer or has ids that the embedding lacks.
    """
    engine = _parsed(assets.tokenizer_json or "")
    engine.no_truncation()
    engine.no_padding()
    added = engine.get_added_tokens_decoder()
    ids = engine.get_vocab(with_added_tokens=True)
    late = _late_tokens(assets.tokenizer_config, ids.values(), added)
    for place, numbers in (
        ("tokenizer.json (model.vocab)", [number for number in ids.values() if number not in added]),
        ("tokenizer.json (added_tokens)", added),
        ("tokenizer_config.json (added_tokens_decoder)", late),
    ):
        check_rows(place, max(numbers, default=-1), rows)
    written = template_words(assets.chat_templates.values())
    declared = {declared_token(assets.tokenizer_config, role) for role in ("bos", "eos")}
    controls = {
        token.content: _control(number, token, token.special or token.content in declared)
        for number, token in {**added, **late}.items()
        if token.content
        and (
            token.special or number in late or token.content in declared or is_marker(token.content, written)
        )
    }
    engine.add_special_tokens([text for text in controls if text in ids])
    engine.encode_special_tokens = True
    texts: list[str | None] = [None] * (max([*ids.values(), *late], default=-1) + 1)
    for text, number in [*ids.items(), *((token.content, number) for number, token in late.items())]:
        texts[number] = text
    spelling, drops = _spelling(engine)
    lead = _leading_special(engine)
    return Vocabulary(
        head=engine,
        tail=_tail(engine),
        texts=texts,
        controls=controls,
        spelling=spelling,
        # SentencePiece's decoder treats added tokens as all others
        raw_ids=frozenset() if spelling is Spelling.SENTENCEPIECE else frozenset({**added, **late}),
        drops_prefix_space=drops,
        bos_id=lead,
        add_bos=lead is not None,
    )


def check_rows(place: str, highest: int, rows: int) -> None:
    """Raise ArtifactError, naming the place and both numbers, for an id without an embedding row."""
    if highest >= rows:
        raise ArtifactError(
            f"its highest token id is {highest} but the embedding has {rows} rows",
            path=place,
            hint="it belongs to another model, or tokens were added without resizing the embedding",
        )


def _parsed(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every fault
        raise ArtifactError(
            f"not a usable tokenizer: {error}",
            path="tokenizer.json",
            hint="fetch the model's tokenizer again",
        ) from error


def declared_token(config: Mapping[str, Any], role: str) -> str | None:
    """Return the text of the `<role>_token` of a tokenizer_config, written as a string or as an object."""
    token = config.get(f"{role}_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _late_tokens(
    config: Mapping[str, Any], taken: Iterable[int], added: Mapping[int, AddedToken]
) -> dict[int, AddedToken]:
    """Return tokens that only tokenizer_config.json lists."""
    listed = config.get("added_tokens_decoder")
    known = set(taken) | set(added)
    late = {}
    for key, entry in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(entry, Mapping) and str(key).isdecimal() and int(key) not in known:
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "special")}
            late[int(key)] = AddedToken(str(entry.get("content", "")), **flags)
    return late


def _control(number: int, token: AddedToken, special: bool) -> ControlToken:
    return ControlToken(number, special, token.lstrip, token.rstrip, token.single_word)


def _state(part: Any) -> Mapping[str, Any]:
    return json.loads(part.__getstate__()) if part is not None else {}


def _spelling(engine: Tokenizer) -> tuple[Spelling, bool]:
    """Return how token texts are spelled, and whether decoding drops one leading space."""
    state = _state(engine.decoder)
    parts = state.get("decoders", [state]) if state.get("type") == "Sequence" else [state]
    kinds = {part.get("type") for part in parts}
    if kinds == {"ByteLevel"}:
        return Spelling.BYTE_LEVEL, False
    spaces = any(part.get("type") == "Replace" and part.get("content") == " " for part in parts)
    metaspace = next((part for part in parts if part.get("type") == "Metaspace"), None)
    if kinds <= _SPM_DECODERS and (spaces or metaspace is not None):
        drops = "Strip" in kinds or (metaspace is not None and metaspace.get("prepend_scheme") != "never")
        return Spelling.SENTENCEPIECE, drops
    return Spelling.OTHER, False


def _leading_special(engine: Tokenizer) -> int | None:
    """Return the id that the engine's own post-processing puts before a text, or None."""
    with_specials = engine.encode("a", add_special_tokens=True).ids
    plain = engine.encode("a", add_special_tokens=False).ids
    return (
        int(with_specials[0]) if len(with_specials) > len(plain) and with_specials[:1] != plain[:1] else None
    )


def _tail(engine: Tokenizer) -> Tokenizer:
    """Return an engine for text in the middle of a prompt: no space is put before its first word."""
    if all(stage.prepend_scheme != "first" for stage in _metaspaces(engine)):
        return engine
    tail = Tokenizer.from_str(engine.to_str())
    tail.encode_special_tokens = True
    for stage in _metaspaces(tail):
        stage.prepend_scheme = "never"
    return tail


def _metaspaces(engine: Tokenizer) -> list[pre_tokenizers.Metaspace]:
    splitter = engine.pre_tokenizer
    parts = _state(splitter).get("pretokenizers", ())
    stages = [splitter[index] for index in range(len(parts))] if parts else [splitter]
    return [stage for stage in stages if isinstance(stage, pre_tokenizers.Metaspace)]
