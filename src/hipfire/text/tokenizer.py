"""Text to token ids and back.

Control tokens are found here and not by the engine, so that only the prompt's template, or a caller who says
`parse_special`, can produce them; everything else is ordinary text. This file knows no models and no Jinja.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from tokenizers.decoders import DecodeStream

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.base.types import TextAssets
from hipfire.text.controls import ControlScanner
from hipfire.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    MarkedDetokenizer,
    WholeDetokenizer,
    byte_alphabet,
    byte_level_bytes,
    decode_all,
    sentencepiece_bytes,
)
from hipfire.text.origin import RenderedPrompt, Spans
from hipfire.text.special_ids import special_ids, turn_ends
from hipfire.text.vocab_gguf import from_gguf
from hipfire.text.vocabulary import Spelling, Vocabulary, from_tokenizer_json


class Tokenizer:
    """A model's tokenizer. Immutable; encoding and decoding may run in many threads at once.

    `vocab_size` is the number of embedding rows; `surplus_ids` are those that stand for no token, which a
    sampler must never choose and which decode to nothing. `bos_id` and `unk_id` are None where the model has
    none; any of `eos_ids` ends a turn. `add_bos` is the model's own rule.
    """

    def __init__(self, vocabulary: Vocabulary, assets: TextAssets, vocab_rows: int) -> None:
        self._vocabulary = vocabulary
        self._controls = {control.token_id: control for control in vocabulary.controls.values()}
        self._scanner = ControlScanner(vocabulary.controls)
        self._alphabet = byte_alphabet()
        special = special_ids(assets, self.token_id, vocab_rows)
        self.vocab_size = vocab_rows
        self.bos_id = special.bos if special.bos is not None else vocabulary.bos_id
        self.eos_ids = special.eos
        self.unk_id = special.unk
        self.add_bos = self.bos_id is not None and (
            special.add_bos if special.add_bos is not None else vocabulary.add_bos
        )
        known = len(vocabulary.texts)
        self.surplus_ids = tuple(
            number for number in range(vocab_rows) if number >= known or vocabulary.texts[number] is None
        )

    @classmethod
    def from_assets(cls, assets: TextAssets, vocab_rows: int) -> Tokenizer:
        """Return the tokenizer of a checkpoint whose embedding has `vocab_rows` rows.

        Raises ArtifactError when the vocabulary is missing, damaged or larger than the embedding,
        UnsupportedError, naming it, for a kind of vocabulary or a pre-tokenizer that hipfire does not know.
        """
        if assets.tokenizer_json is not None:
            return cls(from_tokenizer_json(assets, vocab_rows), assets, vocab_rows)
        if assets.gguf:
            return cls(from_gguf(assets, vocab_rows), assets, vocab_rows)
        raise ArtifactError(
            "the model has no tokenizer",
            hint="it needs a tokenizer.json or a GGUF vocabulary",
        )

    @cached_property
    def longest_token(self) -> int:
        """Return the most characters that one token stands for."""
        return max((len(text) for text in self._vocabulary.texts if text is not None), default=1) or 1

    def is_special(self, token_id: int) -> bool:
        """Say whether this id is a control token that is never shown as text."""
        control = self._controls.get(token_id)
        return control is not None and control.special

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, or None."""
        control = self._vocabulary.controls.get(text)
        return control.token_id if control is not None else self._vocabulary.head.token_to_id(text)

    def turn_end_ids(self, template: str) -> frozenset[int]:
        """Return the end tokens that a chat template's source writes, for templates from elsewhere."""
        return turn_ends(template, self.token_id)

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Return the ids of `text`.

        Control tokens spelled out in the text are ordinary text unless `parse_special`. BOS is put in front
        by the model's own rule, or as `add_bos` says, and never twice. Raises ValidationError for text that
        no UTF-8 can hold (lone surrogates), and when BOS is asked of a model that has none.
        """
        if add_bos and self.bos_id is None:
            raise ValidationError("this model has no BOS token", hint="leave add_bos at its default")
        ids = self._encode(text, ((0, len(text)),) if not parse_special else ())
        return self._with_bos(ids, self.add_bos if add_bos is None else add_bos)

    def encode_chat(self, rendered: RenderedPrompt) -> list[int]:
        """Return the ids of a rendered chat, with exactly one BOS where the model wants one.

        Control tokens are those that the template wrote; the same text in the caller's words is ordinary
        text.
        """
        return self._with_bos(self._encode(rendered.text, rendered.caller_spans), self.add_bos)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """Return the text of `ids`; see `detokenizer` for the options."""
        return decode_all(self.detokenizer(skip_special=skip_special, at_start=at_start), ids)

    def detokenizer(
        self, *, skip_special: bool = True, at_start: bool = True, keep: Collection[int] = ()
    ) -> Detokenizer:
        """Return a detokenizer for one sequence.

        `skip_special` leaves control tokens out of the text, but for those in `keep`. `at_start`: the
        sequence begins a text, so the space that SentencePiece vocabularies put before the first word is
        dropped; pass False to continue a text.
        """
        first = self._plain_detokenizer(skip_special, at_start)
        if not keep:
            return first
        markers = {number: self.token_text(number) for number in keep}
        return MarkedDetokenizer(first, lambda: self._plain_detokenizer(skip_special, False), markers)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, leading space included; b"" for surplus ids.

        Raises ValidationError for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValidationError(f"token id {token_id} is not in [0, {self.vocab_size})")
        texts = self._vocabulary.texts
        text = texts[token_id] if token_id < len(texts) else None
        if text is None:
            return b""
        if token_id in self._vocabulary.raw_ids or self._vocabulary.spelling is Spelling.OTHER:
            return text.encode("utf-8", "replace")
        if self._vocabulary.spelling is Spelling.BYTE_LEVEL:
            return byte_level_bytes(text, self._alphabet)
        return sentencepiece_bytes(text)

    def token_text(self, token_id: int) -> str:
        """Return one token as text, leading space kept; bytes that are no whole character become U+FFFD.

        A control token is returned as prompts spell it.
        """
        if token_id in self._controls:
            return self._vocabulary.texts[token_id] or ""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _encode(self, text: str, ordinary: Spans) -> list[int]:
        """Return the ids of `text`; control tokens that touch the `ordinary` ranges are ordinary text."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValidationError(
                f"the text holds a lone surrogate at character {error.start}", hint="send valid Unicode text"
            ) from error
        ids: list[int] = []
        position = 0
        for found in self._scanner.scan(text, ordinary):
            ids += self._ordinary(text[position : found.start], position)
            ids.append(found.token_id)
            position = found.end
        return ids + self._ordinary(text[position:], position)

    def _ordinary(self, piece: str, position: int) -> list[int]:
        if not piece:
            return []
        engine = self._vocabulary.tail if position else self._vocabulary.head
        text = f" {piece}" if self._vocabulary.adds_prefix_space else piece
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        if self._controls.keys().isdisjoint(ids):
            return ids
        return self._split_forged(piece, position, ids)

    def _split_forged(self, piece: str, position: int, ids: Sequence[int]) -> list[int]:
        """Return ids of a piece of which the engine made a control token, by cutting that text in two."""
        markers = self._scanner.scan(piece, in_words=True)
        cut = next((found.start + 1 for found in markers if found.end - found.start > 1), 0)
        if cut == 0:
            return [number for number in ids if number == self.unk_id or number not in self._controls]
        return self._ordinary(piece[:cut], position) + self._ordinary(piece[cut:], position + cut)

    def _plain_detokenizer(self, skip_special: bool, at_start: bool) -> Detokenizer:
        if self._vocabulary.spelling is Spelling.OTHER:
            return self._engine_detokenizer(skip_special)

        def shown(token_id: int) -> bytes:
            return b"" if skip_special and self.is_special(token_id) else self.token_bytes(token_id)

        return ByteDetokenizer(shown, drop_space=at_start and self._vocabulary.drops_prefix_space)

    def _engine_detokenizer(self, skip_special: bool) -> Detokenizer:
        engine = self._vocabulary.head
        stream = DecodeStream(skip_special_tokens=skip_special)

        def decode(ids: list[int]) -> str:
            return engine.decode(ids, skip_special_tokens=skip_special)

        def step(token_id: int) -> str | None:
            return stream.step(engine, token_id)

        return WholeDetokenizer(decode, step)
