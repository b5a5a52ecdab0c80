"""Long runs of one kind of character: near-linear time and bounded stack for every step of encoding."""

import time
from collections import Counter

import pytest
from text_kit import gguf_bpe, gguf_spm

from hipfire.base.types import TextAssets
from hipfire.text.origin import RenderedPrompt
from hipfire.text.tokenizer import Tokenizer

TOKENIZERS = {
    "llama-bpe": Tokenizer.from_assets(TextAssets(gguf=gguf_bpe("llama-bpe")), 700),
    "gpt-4o": Tokenizer.from_assets(TextAssets(gguf=gguf_bpe("gpt-4o")), 700),
    "spm": Tokenizer.from_assets(TextAssets(gguf=gguf_spm(prefix=False)), 2000),
}
UNITS = {
    "letter": "a",
    "digit": "7",
    "space": " ",
    "newline": "\n",
    "punctuation": "!",
    "cjk": "漢",
    "underscore": "_",
    "mark": "\u0301",
    "marker start": "<|",
    "marker": "<|im_end|>",
}


def seconds(tokenizer, text):
    started = time.process_time()
    tokenizer.encode(text, parse_special=True)
    return time.process_time() - started


def grows_linearly(once, four_times):
    """Say whether work doubles in less than 2.5 times the time, over two doublings.

    Quadratic work takes 16 times as long, and a busy machine gets several tries at less than 6.25.
    """
    single = fourfold = float("inf")
    for _ in range(8):
        single, fourfold = min(single, once()), min(fourfold, four_times())
        if fourfold < 2.5**2 * single:
            return True
    return False


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("unit", sorted(UNITS))
def test_time_at_twice_the_text_is_below_two_and_a_half_times_as_long(name, unit):
    tokenizer = TOKENIZERS[name]
    short = UNITS[unit] * (10_000 // len(UNITS[unit]))
    assert grows_linearly(lambda: seconds(tokenizer, short), lambda: seconds(tokenizer, short * 4))


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("unit", ["letter", "space", "cjk"])
def test_a_run_of_a_mebibyte_is_encoded_whole(name, unit):
    tokenizer = TOKENIZERS[name]
    length = (1 << 20) // len(UNITS[unit].encode())
    counts = Counter(tokenizer.encode(UNITS[unit] * length, add_bos=False))
    spelled = sum(len(tokenizer.token_bytes(number)) * times for number, times in counts.items())
    assert spelled == length * len(UNITS[unit].encode())
    assert set().union(*map(tokenizer.token_bytes, counts)) == set(UNITS[unit].encode())


def test_many_forged_markers_in_one_prompt_are_linear():
    tokenizer = TOKENIZERS["llama-bpe"]

    def spent(markers):
        text = "<|im_end|>a" * markers
        spans = tuple((11 * index, 11 * index + 10) for index in range(markers))
        started = time.process_time()
        ids = tokenizer.encode_chat(RenderedPrompt(text, spans))
        assert tokenizer.token_id("<|im_end|>") not in ids
        return time.process_time() - started

    assert grows_linearly(lambda: spent(2_000), lambda: spent(8_000))
