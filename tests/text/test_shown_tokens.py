"""Control tokens that a detokenizer shows because someone reads them, and those that stay hidden."""

from __future__ import annotations

import pytest
from text_kit import SAMPLES, gguf_bpe, gguf_spm
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from hipfire.base.types import TextAssets
from hipfire.text.tokenizer import Tokenizer


def other_spelling() -> Tokenizer:
    """A vocabulary whose decoder is none of the usual ones."""
    vocab = {text: number for number, text in enumerate(["hel", "##lo", "wor", "##ld", "<unk>"])}
    engine = Engine(models.WordPiece(vocab=vocab, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.decoder = decoders.WordPiece()
    engine.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer.from_assets(TextAssets(tokenizer_json=engine.to_str()), 8)


BPE = Tokenizer.from_assets(TextAssets(gguf=gguf_bpe()), 700)
SPM = Tokenizer.from_assets(TextAssets(gguf=gguf_spm(prefix=False)), 2000)


def marker(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_id(text)
    assert number is not None
    assert tokenizer.is_special(number)
    return number


def shown(tokenizer: Tokenizer, ids: list[int], keep: set[int], at_start: bool = True) -> str:
    stream = tokenizer.detokenizer(keep=keep, at_start=at_start)
    return "".join([*map(stream.push, ids), stream.flush()])


@pytest.mark.parametrize("text", SAMPLES)
def test_kept_tokens_are_spelled_out_where_they_stand_and_others_are_not(text: str) -> None:
    start, end = marker(BPE, "<|im_start|>"), marker(BPE, "<|im_end|>")
    words = BPE.encode(text, add_bos=False)
    ids = [end, *words, start, end, *words, start]
    assert shown(BPE, ids, {start}) == f"{text}<|im_start|>{text}<|im_start|>"
    assert shown(BPE, ids, set()) == text + text


def test_a_marker_arrives_with_its_own_token() -> None:
    start = marker(BPE, "<|im_start|>")
    stream = BPE.detokenizer(keep={start})
    assert stream.push(start) == "<|im_start|>"


def test_a_character_that_a_marker_cuts_off_is_replaced_in_front_of_it() -> None:
    start = marker(BPE, "<|im_start|>")
    first = BPE.encode("é", add_bos=False)
    half = next(n for n in range(BPE.vocab_size) if BPE.token_bytes(n) == b"\xc3")
    assert shown(BPE, [half, start, *first], {start}) == "\ufffd<|im_start|>é"


def test_spaces_of_sentencepiece_stay_after_a_marker() -> None:
    special = next(n for n in range(SPM.vocab_size) if SPM.is_special(n) and SPM.token_text(n))
    words = SPM.encode(" two words", add_bos=False)
    assert shown(SPM, [special, *words], {special}) == SPM.token_text(special) + " two words"


def test_vocabularies_with_decoders_of_their_own_show_markers_too() -> None:
    tokenizer = other_spelling()
    start, end = marker(tokenizer, "<|im_start|>"), marker(tokenizer, "<|im_end|>")
    words = tokenizer.encode("hello world")
    assert shown(tokenizer, [*words, start, *words, end], {start}) == "hello world<|im_start|>hello world"
    assert shown(tokenizer, [*words, start, *words, end], set()) == "hello world hello world"
