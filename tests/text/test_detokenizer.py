import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import SAMPLES, byte_level_parts, gguf_bpe, gguf_spm, json_assets
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

from hipfire.base.errors import ValidationError
from hipfire.base.types import TextAssets
from hipfire.text.detokenizer import WholeDetokenizer
from hipfire.text.tokenizer import Tokenizer

BPE = Tokenizer.from_assets(TextAssets(gguf=gguf_bpe()), 700)
SPM_KEYS = gguf_spm(prefix=False)
SPM = Tokenizer.from_assets(TextAssets(gguf=SPM_KEYS), 2000)
PREFIXED = Tokenizer.from_assets(TextAssets(gguf=gguf_spm(prefix=True)), 2000)
ALL = [BPE, SPM, PREFIXED]
NAMES = ["byte-level", "spm", "spm with space"]


def streamed(tokenizer, ids, **options):
    stream = tokenizer.detokenizer(**options)
    return [stream.push(number) for number in ids] + [stream.flush()]


@pytest.mark.parametrize("tokenizer", ALL, ids=NAMES)
@pytest.mark.parametrize("text", SAMPLES)
def test_token_by_token_equals_the_text_without_replacement_marks(tokenizer, text):
    parts = streamed(tokenizer, tokenizer.encode(text, add_bos=False))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("tokenizer", ALL, ids=NAMES)
def test_an_emoji_over_several_tokens_appears_once_and_whole(tokenizer):
    ids = tokenizer.encode("🫠", add_bos=False)
    assert len(ids) >= 2
    assert [part for part in streamed(tokenizer, ids) if part] == ["🫠"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_random_bytes_never_raise_and_equal_the_one_shot_decode(values):
    first = SPM_KEYS["tokenizer.ggml.tokens"].index("<0x00>")
    ids = [first + value for value in values]
    assert "".join(streamed(SPM, ids)) == bytes(values).decode("utf-8", "replace") == SPM.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 699), max_size=40))
def test_random_tokens_equal_the_bytes_of_all_of_them(ids):
    want = b"".join(BPE.token_bytes(number) for number in ids).decode("utf-8", "replace")
    assert "".join(streamed(BPE, ids, skip_special=False)) == want


@settings(deadline=None)
@given(st.text(), st.sampled_from(ALL))
def test_any_text_survives(text, tokenizer):
    assert "".join(streamed(tokenizer, tokenizer.encode(text, add_bos=False))) == text


def test_an_invalid_byte_before_a_spaced_word_does_not_raise():
    first = SPM_KEYS["tokenizer.ggml.tokens"].index("<0x00>")
    word = SPM.encode(" the", add_bos=False)
    assert "".join(streamed(SPM, [first + 0xE2, *word])) == "\ufffd the"
    assert "".join(streamed(SPM, [first + 0xFF, *word])) == "\ufffd the"


@pytest.mark.parametrize("tokenizer", ALL, ids=NAMES)
@pytest.mark.parametrize("text", ["the", " the", "  the", " ", "  "])
def test_leading_spaces_are_exact(tokenizer, text):
    assert "".join(streamed(tokenizer, tokenizer.encode(text, add_bos=False))) == text


def test_a_reply_that_continues_a_text_keeps_its_space():
    word = PREFIXED.encode("the", add_bos=False)
    assert PREFIXED.decode(word) == "the"
    assert PREFIXED.decode(word, at_start=False) == " the"
    assert SPM.decode(SPM.encode(" the", add_bos=False)) == " the"


def test_special_tokens_are_hidden_or_shown_and_do_not_disturb_their_neighbours():
    start = BPE.token_id("<|im_start|>")
    letters = [BPE.encode(letter)[0] for letter in "ab"]
    ids = [letters[0], start, letters[1]]
    assert BPE.decode(ids) == "ab"
    assert BPE.decode(ids, skip_special=False) == "a<|im_start|>b"
    half = BPE.encode("🫠")
    assert BPE.decode([*half[:2], start, *half[2:]]) == "🫠"


def test_two_sequences_share_nothing():
    half = BPE.encode("🫠")
    broken, sound = BPE.detokenizer(), BPE.detokenizer()
    assert broken.push(half[0]) == ""
    assert sound.push(BPE.encode("a")[0]) == "a"
    with pytest.raises(ValidationError, match="700"):
        broken.push(700)
    assert [sound.push(number) for number in half][-1] == "🫠"
    assert broken.flush() == "\ufffd"


def test_work_per_token_does_not_grow():
    ids = BPE.encode("the quick brown fox 🫠 ") * 200
    stream = BPE.detokenizer()
    laps = []
    for _ in range(20):
        started = time.process_time()
        for number in ids:
            stream.push(number)
        laps.append(time.process_time() - started)
    assert min(laps[10:]) < 2 * min(laps[:10])


def test_token_bytes_tell_apart_tokens_of_equal_text():
    first = SPM_KEYS["tokenizer.ggml.tokens"].index("<0x00>")
    assert SPM.token_bytes(first + 0xE2) == b"\xe2"
    assert SPM.token_bytes(first + 0xE3) == b"\xe3"
    assert SPM.token_text(first + 0xE2) == SPM.token_text(first + 0xE3) == "\ufffd"
    spaced = SPM.encode(" the", add_bos=False)[0]
    assert SPM.token_text(spaced) == " the"
    assert SPM.token_bytes(spaced) == b" the"


def test_the_byte_alphabet_is_the_librarys():
    tokens, _ = byte_level_parts()
    single = {BPE.token_bytes(tokens.index(letter)) for letter in pre_tokenizers.ByteLevel.alphabet()}
    assert single == {bytes([value]) for value in range(256)}
    rng = random.Random(1)
    engine = decoders.ByteLevel()
    for _ in range(50):
        chosen = [rng.randrange(len(tokens)) for _ in range(20)]
        assert BPE.decode(chosen) == engine.decode([tokens[number] for number in chosen])


def word_pieces():
    engine = Engine(
        models.WordPiece(vocab={"[UNK]": 0, "un": 1, "##aff": 2, "##able": 3, "you": 4}, unk_token="[UNK]")
    )
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.decoder = decoders.WordPiece(prefix="##")
    return Tokenizer.from_assets(json_assets(engine), 5)


def test_other_decoders_stream_to_the_one_shot_text():
    tokenizer = word_pieces()
    ids = tokenizer.encode("unaffable you unaffable")
    assert ids == [1, 2, 3, 4, 1, 2, 3]
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == "unaffable you unaffable" == tokenizer.decode(ids)
    assert parts[0] == "un"


def test_an_engine_that_cannot_follow_ends_quietly_and_completes_at_flush():
    def step(token_id):
        if token_id == 2:
            raise RuntimeError("invalid prefix")
        return "x"

    stream = WholeDetokenizer(lambda ids: "x" * len(ids), step)
    assert [stream.push(1), stream.push(2), stream.push(1)] == ["x", "", ""]
    assert stream.flush() == "xx"
