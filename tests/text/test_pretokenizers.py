import pytest
from text_kit import SAMPLES, byte_level_parts, gguf_bpe
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from hipfire.base.errors import UnsupportedError
from hipfire.base.types import TextAssets
from hipfire.text.pretokenizers import FAMILIES, family
from hipfire.text.tokenizer import Tokenizer as HipfireTokenizer


def pieces(name, text):
    rule = family(name)
    normalizer = rule.normalizer()
    text = normalizer.normalize_str(text) if normalizer else text
    return [text[start:end] for _, (start, end) in rule.splitter().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 1234567", ["IT", "'S", " ", "123", "456", "7"]),
        ("llama-bpe", "(word)\n\n next", ["(word", ")\n\n", " next"]),
        ("qwen2", "IT'S 123", ["IT", "'S", " ", "1", "2", "3"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "don'tStop 1234", ["don't", "Stop", " ", "123", "4"]),
        ("deepseek-v3", "12345 漢字かな x", ["123", "45", " ", "漢字かな", " x"]),
        ("deepseek-v3", ".word a+b", [".word", " a", "+b"]),
    ],
)
def test_where_each_family_cuts(name, text, want):
    assert pieces(name, text) == want


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("text", SAMPLES)
def test_a_cut_loses_nothing(name, text):
    composed = normalizers.NFC().normalize_str(text) if FAMILIES[name].nfc else text
    assert "".join(pieces(name, text)) == composed


def test_marks_are_letters_for_one_family_and_punctuation_for_another():
    """Devanagari and Thai vowel signs: qwen35 keeps the word whole, qwen2 cuts it at every mark."""
    assert pieces("qwen35", "नमस्ते ที่นี่") == ["नमस्ते", " ที่นี่"]
    assert pieces("qwen2", "नमस्ते")[0] == "नमस"
    assert len(pieces("qwen2", "नमस्ते")) == 2 + 1


def test_decomposed_vietnamese_is_composed_only_where_the_family_does_so():
    decomposed = "tie\u0302\u0301ng Vie\u0323\u0302t"
    assert pieces("qwen35", decomposed) == ["tiếng", " Việt"]
    assert "".join(pieces("llama-bpe", decomposed)) == decomposed


@pytest.mark.parametrize("text", [*SAMPLES, *(unit * n + "x" for unit in " \t\n" for n in range(1, 41))])
def test_ids_equal_an_engine_built_from_library_parts(text):
    """SmolLM's published pre-tokenizer is digits one by one, then the library's own GPT-2 splitter."""
    tokens, merges = byte_level_parts()
    vocab = {token: number for number, token in enumerate(tokens)}
    engine = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = HipfireTokenizer.from_assets(TextAssets(gguf=gguf_bpe("smollm")), 700)
    ids = ours.encode(text)
    assert ids == engine.encode(text).ids
    assert ours.decode(ids) == text


def test_stages_cut_inside_what_the_stage_before_left():
    two = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")])
    assert [piece for piece, _ in two.pre_tokenize_str("a12")] == ["a", "1", "2"]
    assert pieces("starcoder", " a12 b") == [" a", "1", "2", " b"]


@pytest.mark.parametrize("name", ["default", None, "a-new-model"])
def test_an_unknown_pre_tokenizer_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=repr(name)):
        HipfireTokenizer.from_assets(TextAssets(gguf=gguf_bpe(name)), 700)
