"""Tokenizers from tokenizer.json: ids of the library itself, sizes, roles of ids."""

import pytest
from text_kit import SAMPLES, byte_level_parts, gguf_bpe, gguf_spm, json_assets, json_bpe
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.base.types import TextAssets
from hipfire.text.tokenizer import Tokenizer as HipfireTokenizer

PLAIN = len(byte_level_parts()[0])
ADDED = [
    AddedToken("<|end|>", special=True, rstrip=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<word>", special=True, single_word=True),
    AddedToken("<end", special=True),
    AddedToken("<|tool|>", special=False),
    AddedToken("\n\n\n", special=False),
]


@pytest.mark.parametrize(
    "text",
    [
        *SAMPLES,
        "a <|end|>  b",
        "a  <mask> b",
        "x<word>y <word> z",
        "<end<|end|>",
        "<|<|end|>",
        "a\n\n\n\nb<|tool|>c",
        "<|end|><|end|> <mask>  ",
    ],
)
def test_parsed_text_has_the_ids_of_the_library(text):
    engine = json_bpe(ADDED)
    ours = HipfireTokenizer.from_assets(json_assets(engine), 700)
    assert ours.encode(text, parse_special=True) == engine.encode(text).ids


def test_ordinary_text_has_no_control_ids_but_keeps_plain_added_tokens():
    engine = json_bpe(ADDED)
    ours = HipfireTokenizer.from_assets(json_assets(engine), 700)
    ids = ours.encode("a<|end|> <|tool|>\n\n\n<mask>")
    assert set(ids) & {engine.token_to_id(token.content) for token in ADDED} == {engine.token_to_id("\n\n\n")}
    assert ours.decode(ids) == "a<|end|> <|tool|>\n\n\n<mask>"


def test_a_declared_end_token_is_hidden_even_when_the_file_does_not_flag_it():
    engine = json_bpe([AddedToken("END", special=False)])
    assets = json_assets(engine, tokenizer_config={"eos_token": "END"})
    ours = HipfireTokenizer.from_assets(assets, 700)
    (end,) = ours.eos_ids
    assert end not in ours.encode("END")
    assert ours.decode([*ours.encode("a"), end]) == "a"
    keys = gguf_bpe("qwen2", eos_token_id=PLAIN + 2)
    keys["tokenizer.ggml.token_type"][PLAIN + 2] = 1
    untyped = HipfireTokenizer.from_assets(TextAssets(gguf=keys), 700)
    assert PLAIN + 2 not in untyped.encode("<|im_end|>")
    assert untyped.decode([PLAIN + 2]) == ""


def test_a_plain_added_token_that_the_template_writes_is_a_control_token():
    engine = json_bpe([AddedToken("[CALL]", special=False)])
    number = engine.token_to_id("[CALL]")
    loose = HipfireTokenizer.from_assets(json_assets(engine), 700)
    bound = HipfireTokenizer.from_assets(json_assets(engine, chat_templates={"default": "x[CALL]y"}), 700)
    assert number in loose.encode("[CALL]")
    assert number not in bound.encode("[CALL]")
    assert bound.encode("[CALL]", parse_special=True) == [number]
    assert bound.decode([number]) == "[CALL]"
    assert not bound.is_special(number)


def metaspace(scheme):
    pieces = [
        "<unk>",
        "<s>",
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "ab",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("a", "b"), ("\u2581", "a")]
    engine = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens([AddedToken("<s>", special=True)])
    return engine


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("text", ["ab a", "<s>ab", "a<s>ab<s> a", " a", "é<s>😀"])
def test_metaspace_puts_its_space_where_the_library_does(scheme, text):
    engine = metaspace(scheme)
    ours = HipfireTokenizer.from_assets(json_assets(engine), 300)
    ids = ours.encode(text, parse_special=True)
    assert ids == engine.encode(text).ids
    assert ours.decode(ids) == engine.decode(ids)


def test_normalizers_and_truncation_settings_of_the_file():
    engine = json_bpe([])
    engine.normalizer = normalizers.NFC()
    engine.enable_truncation(3)
    engine.enable_padding(length=50)
    ours = HipfireTokenizer.from_assets(json_assets(engine), 700)
    assert ours.encode("Vie\u0323\u0302t " * 5) == ours.encode("Việt " * 5)
    assert len(ours.encode("hello world " * 9)) > 9


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"model": {"type": "Unknown"}}'])
def test_a_file_that_is_no_tokenizer_is_an_artifact_error(text):
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        HipfireTokenizer.from_assets(TextAssets(tokenizer_json=text), 700)


def test_more_tokens_than_rows_is_refused_naming_both_and_the_place():
    engine = json_bpe([AddedToken(f"<extra{number}>", special=True) for number in range(6)])
    with pytest.raises(ArtifactError, match=rf"added_tokens.* {PLAIN + 5} .* {PLAIN} rows"):
        HipfireTokenizer.from_assets(json_assets(engine), PLAIN)
    with pytest.raises(ArtifactError, match=rf"model\.vocab.* {PLAIN - 1} .* {PLAIN - 1} rows"):
        HipfireTokenizer.from_assets(json_assets(engine), PLAIN - 1)
    late = {"added_tokens_decoder": {str(PLAIN + 90): {"content": "<late>", "special": True}}}
    with pytest.raises(ArtifactError, match=rf"tokenizer_config\.json.* {PLAIN + 90} .* {PLAIN + 6} rows"):
        HipfireTokenizer.from_assets(json_assets(engine, tokenizer_config=late), PLAIN + 6)
    with pytest.raises(ArtifactError, match=rf"tokenizer\.ggml\.tokens.* {PLAIN + 2} .* {PLAIN} rows"):
        HipfireTokenizer.from_assets(TextAssets(gguf=gguf_bpe()), PLAIN)


def test_tokens_that_only_the_config_lists_are_known():
    late = {"added_tokens_decoder": {str(PLAIN): {"content": "<late>", "special": True}, "x": 1, "5": {}}}
    ours = HipfireTokenizer.from_assets(json_assets(json_bpe([]), tokenizer_config=late), 700)
    assert ours.encode("a<late>", parse_special=True)[-1] == PLAIN == ours.token_id("<late>")
    assert ours.is_special(PLAIN)


def test_rows_beyond_the_tokens_are_surplus_and_decode_to_nothing():
    keys = gguf_bpe()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "[PAD603]"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 5]
    ours = HipfireTokenizer.from_assets(TextAssets(gguf=keys), PLAIN + 10)
    assert ours.vocab_size == PLAIN + 10
    assert ours.surplus_ids == tuple(range(PLAIN + 3, PLAIN + 10))
    assert ours.decode([*ours.encode("ab"), *ours.surplus_ids]) == "ab"
    assert ours.token_bytes(PLAIN + 9) == b""
    for number in (-1, PLAIN + 10):
        with pytest.raises(ValidationError, match=str(number)):
            ours.decode([number])


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff tail"])
def test_lone_surrogates_are_refused_with_their_place(text):
    ours = HipfireTokenizer.from_assets(TextAssets(gguf=gguf_bpe()), 700)
    with pytest.raises(ValidationError, match="surrogate at character"):
        ours.encode(text)


def test_a_control_token_that_merging_would_make_is_taken_apart():
    """A vocabulary whose control token is also an ordinary word of its merges."""
    engine = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "x": 3}, merges=[("a", "b")]))
    engine.add_special_tokens([AddedToken("ab", special=True)])
    ours = HipfireTokenizer.from_assets(json_assets(engine), 4)
    assert ours.encode("xabxab") == [3, 0, 1, 3, 0, 1]
    assert ours.encode("xab", parse_special=True) == [3, 2]


def test_end_tokens_are_the_union_of_every_source():
    names = ["<e0>", "<e1>", "<e2>", "<|im_end|>", "<e4>", "<|eot_id|>", "<|end|>"]
    engine = json_bpe([AddedToken(name, special=True) for name in names])
    number = {name: engine.token_to_id(name) for name in names}
    assets = json_assets(
        engine,
        tokenizer_config={"eos_token": {"content": "<e0>"}, "bos_token": "<e4>"},
        generation_config={"eos_token_id": [number["<e1>"], 10**6, -1, None, True]},
        model_config={"eos_token_id": None, "text_config": {"eos_token_id": number["<e2>"]}},
        chat_templates={"default": "{{ m }}<|im_end|>", "tool": "<|end|>"},
    )
    ours = HipfireTokenizer.from_assets(assets, 700)
    ends = {number[name] for name in ("<e0>", "<e1>", "<e2>", "<|im_end|>", "<|end|>")}
    assert ours.eos_ids == ends
    assert (ours.bos_id, ours.unk_id) == (number["<e4>"], None)
    assert ours.turn_end_ids("<|eot_id|>") == {number["<|eot_id|>"]}
    assert not ours.add_bos


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"tokenizer_config": {"eos_token": "<e>"}}, True),
        ({"generation_config": {"eos_token_id": PLAIN}}, True),
        ({"model_config": {"eos_token_id": [PLAIN]}}, True),
        ({"model_config": {"eos_token_id": PLAIN + 1}}, False),
        ({}, False),
    ],
)
def test_each_source_alone_is_enough(fields, want):
    ours = HipfireTokenizer.from_assets(
        json_assets(json_bpe([AddedToken("<e>", special=True)]), **fields), PLAIN + 1
    )
    assert (PLAIN in ours.eos_ids) is want


def test_gguf_end_of_turn_and_message_keys_count():
    keys = gguf_bpe("qwen2", eos_token_id=PLAIN, eot_token_id=PLAIN + 1, eom_token_id=PLAIN + 2)
    assert HipfireTokenizer.from_assets(TextAssets(gguf=keys), 700).eos_ids == {PLAIN, PLAIN + 1, PLAIN + 2}


def test_end_only_closes_a_channel_where_return_ends_the_turn():
    engine = json_bpe([AddedToken(name, special=True) for name in ("<|end|>", "<|return|>")])
    ours = HipfireTokenizer.from_assets(
        json_assets(engine, chat_templates={"default": "<|end|>...<|return|>"}), 700
    )
    assert ours.eos_ids == {engine.token_to_id("<|return|>")}


def test_chatml_without_a_template_ends_at_im_end():
    assert HipfireTokenizer.from_assets(TextAssets(gguf=gguf_bpe()), 700).eos_ids == {PLAIN + 2}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"add_bos_token": True, "bos_token": "<b>"}, True),
        ({"add_bos_token": False, "bos_token": "<b>"}, False),
        ({"bos_token": "<b>"}, True),
        ({}, True),
    ],
)
def test_the_bos_rule_of_the_config_beats_that_of_the_post_processor(fields, want):
    engine = json_bpe([AddedToken("<b>", special=True)], bos="<b>")
    ours = HipfireTokenizer.from_assets(json_assets(engine, tokenizer_config=fields), 700)
    assert ours.bos_id == PLAIN
    assert ours.add_bos is want
    assert (ours.encode("x")[0] == PLAIN) is want


def test_the_bos_rule_of_a_gguf_file():
    for keys, want in (
        (gguf_bpe("llama-bpe", bos_token_id=PLAIN), True),
        (gguf_bpe("qwen2", bos_token_id=PLAIN), False),
        (gguf_bpe("qwen2", bos_token_id=PLAIN, add_bos_token=True), True),
        (gguf_bpe("llama-bpe", bos_token_id=PLAIN, add_bos_token=False), False),
        (gguf_spm(prefix=False), True),
        (gguf_spm(prefix=False, add_bos_token=False), False),
    ):
        assert HipfireTokenizer.from_assets(TextAssets(gguf=keys), 2000).add_bos is want


def test_tokens_are_looked_up_by_their_spelling():
    engine = json_bpe(ADDED)
    ours = HipfireTokenizer.from_assets(json_assets(engine), 700)
    assert ours.token_id("<|end|>") == engine.token_to_id("<|end|>")
    assert ours.token_id("\u0120") == engine.token_to_id("\u0120")
    assert ours.token_id("no such token") is None
