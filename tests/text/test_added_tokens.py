"""Added tokens and the edges of words: the tokenizers library itself is the judge."""

import pytest
from text_kit import gguf_bpe, gguf_spm, json_assets, json_bpe
from tokenizers import AddedToken, Tokenizer, decoders, models

from hipfire.base.types import TextAssets
from hipfire.text.template_words import template_words
from hipfire.text.tokenizer import Tokenizer as HipfireTokenizer

RUN = "\u2581\u2581"


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_of_sentencepiece_spell_spaces_like_all_others(special):
    pieces = ["<unk>", "\u2581", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    engine = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    engine.add_tokens([AddedToken(RUN, normalized=False, special=special)])
    ours = HipfireTokenizer.from_assets(json_assets(engine), 300)
    ids = [vocab["a"], engine.token_to_id(RUN), vocab["b"]]
    assert ours.decode(ids, skip_special=False) == engine.decode(ids, skip_special_tokens=False) == "a  b"
    assert ours.token_text(ids[1]) == (RUN if special else "  ")


def test_user_defined_tokens_of_gguf_spell_spaces_like_all_others():
    keys = gguf_spm(prefix=False)
    number = keys["tokenizer.ggml.tokens"].index("  ")
    keys["tokenizer.ggml.tokens"][number] = RUN
    ours = HipfireTokenizer.from_assets(TextAssets(gguf=keys), 2000)
    assert ours.decode([number]) == "  "


@pytest.mark.parametrize("special", [False, True])
def test_whole_words_end_where_the_library_says(special):
    engine = json_bpe([AddedToken("<|w|>", special=special, single_word=True)])
    ours = HipfireTokenizer.from_assets(json_assets(engine), 700)
    signs = "a_\u0301\u0903\u200d\u203f\u24d0\u20dd\u2167\u0663\u00b2\u00bd\u00b7 -\U0001f130\U0001f600"
    for sign in signs:
        for text in (f"x{sign}<|w|>", f"<|w|>{sign}x", f"x{sign}<|w|>{sign}x"):
            assert ours.encode(text, parse_special=True) == engine.encode(text).ids, ascii(text)


def test_a_marker_inside_a_word_is_taken_apart_and_not_lost():
    """Merging makes the marker of the letters, though it does not stand there as a whole word."""
    vocab = {"a": 0, "b": 1, "ab": 2, "x": 3}
    engine = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    engine.add_special_tokens([AddedToken("ab", special=True, single_word=True)])
    ours = HipfireTokenizer.from_assets(json_assets(engine), 4)
    assert ours.encode("xabx") == ours.encode("xabx", parse_special=True) == [3, 0, 1, 3]


CODE = "{% if x %}{{ y['[CALL]'] }}{# for #}[DATA]{% endif %}"


@pytest.mark.parametrize(
    ("text", "want"), [("if", False), ("for", False), ("[CALL]", True), ("[DATA]", True)]
)
def test_only_what_a_template_can_write_makes_a_marker(text, want):
    engine = json_bpe([AddedToken(text, special=False)])
    ours = HipfireTokenizer.from_assets(json_assets(engine, chat_templates={"default": CODE}), 700)
    assert (engine.token_to_id(text) in ours.encode(f"a {text} b")) is not want
    keys = gguf_bpe(controls=[text])
    keys["tokenizer.ggml.token_type"][-1] = 4
    ours = HipfireTokenizer.from_assets(TextAssets(gguf=keys, chat_templates={"default": CODE}), 700)
    assert (ours.token_id(text) in ours.encode(f"a {text} b")) is not want


def test_words_of_templates_are_unescaped_and_kept_apart():
    assert template_words(["<|{{ 'im\\n' }}end|>", "{% raw %}{{ x }}{% endraw %}"]).split("\0") == [
        "<|",
        "im\n",
        "end|>",
        "{{ x }}",
    ]
    assert template_words(["{% if 'x' ~ '"]) == "{% if 'x' ~ '"


def test_ids_that_a_converter_filled_in_are_not_declared():
    config = {"bos_token_id": 1, "eos_token_id": 2, "text_config": {"eos_token_id": 3}}
    ours = HipfireTokenizer.from_assets(TextAssets(gguf=gguf_bpe(controls=[]), model_config=config), 700)
    assert (ours.bos_id, ours.eos_ids) == (None, frozenset())
