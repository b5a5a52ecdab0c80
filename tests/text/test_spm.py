import random

import pytest
from text_kit import SAMPLES, gguf_spm

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import TextAssets
from hipfire.text.tokenizer import Tokenizer
from hipfire.text.vocab_gguf import score_merges

COUNT = len(gguf_spm(prefix=False)["tokenizer.ggml.tokens"])


def slow_spm(keys, text):
    """SentencePiece by its definition: user-defined pieces first, then the best-scored neighbours merge."""
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    scores = keys["tokenizer.ggml.scores"]
    ids = {token: number for number, token in enumerate(tokens)}
    normal = {token: scores[number] for token, number in ids.items() if kinds[number] == 1}
    user = sorted((token for token, number in ids.items() if kinds[number] == 4), key=len, reverse=True)
    if keys["tokenizer.ggml.add_space_prefix"] and text:
        text = " " + text
    parts, frozen = [], []
    position = 0
    while position < len(text):
        piece = next((token for token in user if text.startswith(token, position)), None)
        parts.append(piece if piece is not None else text[position].replace(" ", "\u2581"))
        frozen.append(piece is not None)
        position += len(piece) if piece is not None else 1
    while True:
        best = None
        for index in range(len(parts) - 1):
            score = normal.get(parts[index] + parts[index + 1])
            free = not (frozen[index] or frozen[index + 1])
            if free and score is not None and (best is None or score > best[0]):
                best = (score, index)
        if best is None:
            break
        index = best[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        frozen[index : index + 2] = [False]
    made = []
    for part in parts:
        made += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return made


def texts():
    rng = random.Random(5)
    units = ["the", "and", " ", "  ", "\n", "\t", "é", "9", "日", "ते", "😀", "_", "fox", "Hello", "."]
    mixed = ["".join(rng.choice(units) for _ in range(rng.randint(1, 20))) for _ in range(150)]
    runs = [unit * n + word for unit in " \t\n" for n in range(1, 41) for word in ("", "fox")]
    return [*SAMPLES, *mixed, *runs]


@pytest.mark.parametrize("prefix", [False, True])
def test_ids_equal_the_slow_definition_and_round_trip(prefix):
    """Leading and trailing runs of tabs, spaces and newlines of 1 to 40 are among the texts."""
    keys = gguf_spm(prefix=prefix)
    ours = Tokenizer.from_assets(TextAssets(gguf=keys), len(keys["tokenizer.ggml.tokens"]))
    for text in texts():
        ids = ours.encode(text, add_bos=False)
        assert ids == slow_spm(keys, text), text
        assert ours.decode(ids) == text


def test_six_tabs_before_a_word_stay_six_tabs():
    keys = gguf_spm(prefix=False)
    ours = Tokenizer.from_assets(TextAssets(gguf=keys), len(keys["tokenizer.ggml.tokens"]))
    ids = ours.encode("\t" * 6 + "fox", add_bos=False)
    assert ids[0] == keys["tokenizer.ggml.tokens"].index("\t" * 6)
    assert ours.decode(ids) == "\t" * 6 + "fox"


def test_merges_are_every_split_of_normal_tokens_best_score_first():
    tokens = ["<s>", "a", "b", "ab", "aba", "ba", "<0x61>", "x"]
    kinds = [3, 1, 1, 1, 1, 1, 6, 5]
    scores = [0.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, 0.0]
    assert score_merges(tokens, kinds, scores) == [("ab", "a"), ("a", "ba"), ("a", "b"), ("b", "a")]


def test_bytes_and_control_texts_written_out_stay_ordinary():
    keys = gguf_spm(prefix=False)
    ours = Tokenizer.from_assets(TextAssets(gguf=keys), len(keys["tokenizer.ggml.tokens"]))
    kinds = keys["tokenizer.ggml.token_type"]
    for text in ("<0x41>", "<bos>", "<unk>", "<end_of_turn>"):
        ids = ours.encode(text, add_bos=False)
        assert all(kinds[number] != 3 for number in ids)
        assert len(ids) > 1
        assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scores": [0.0]}, ArtifactError, "tokenizer.ggml.scores"),
        ({"scores": None}, ArtifactError, "tokenizer.ggml.scores"),
        ({"token_type": [1, 1]}, ArtifactError, "tokenizer.ggml.token_type"),
        ({"tokens": []}, ArtifactError, "tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, ArtifactError, "tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, ArtifactError, "tokenizer.ggml.tokens"),
        ({"pre": ["default"]}, ArtifactError, "tokenizer.ggml.pre"),
        ({"token_type": ["1"] * COUNT}, ArtifactError, "tokenizer.ggml.token_type"),
        ({"token_type": [[1]] * COUNT}, ArtifactError, "tokenizer.ggml.token_type"),
        ({"token_type": [True] * COUNT}, ArtifactError, "tokenizer.ggml.token_type"),
        ({"token_type": "1" * COUNT}, ArtifactError, "tokenizer.ggml.token_type"),
        ({"token_type": 1}, ArtifactError, "tokenizer.ggml.token_type"),
        ({"scores": ["1"] * COUNT}, ArtifactError, "tokenizer.ggml.scores"),
        ({"scores": "1" * COUNT}, ArtifactError, "tokenizer.ggml.scores"),
        ({"eos_token_id": "x"}, ArtifactError, "tokenizer.ggml.eos_token_id"),
        ({"bos_token_id": [1.5]}, ArtifactError, "tokenizer.ggml.bos_token_id"),
        ({"add_bos_token": "no"}, ArtifactError, "tokenizer.ggml.add_bos_token"),
        ({"add_space_prefix": 1}, ArtifactError, "tokenizer.ggml.add_space_prefix"),
        ({"model": ["llama"]}, ArtifactError, "tokenizer.ggml.model"),
        ({"model": "rwkv"}, UnsupportedError, "'rwkv'"),
        ({"model": None}, UnsupportedError, "None"),
    ],
)
def test_damaged_keys_are_refused_by_name(change, error, match):
    with pytest.raises(error, match=match):
        Tokenizer.from_assets(TextAssets(gguf=gguf_spm(prefix=False, **change)), 5000)


def test_merges_of_missing_tokens_and_single_words_are_refused():
    from_parts = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1]}
    for merges in (["a c"], ["ab"], ["a "], [""]):
        keys = {f"tokenizer.ggml.{name}": value for name, value in {**from_parts, "merges": merges}.items()}
        with pytest.raises(ArtifactError, match=r"tokenizer\.ggml\.merges"):
            Tokenizer.from_assets(TextAssets(gguf=keys), 3)


def test_no_vocabulary_at_all_is_an_artifact_error():
    with pytest.raises(ArtifactError, match="no tokenizer"):
        Tokenizer.from_assets(TextAssets(), 10)
