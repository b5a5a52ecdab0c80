"""Small vocabularies made here, in the forms that model files have, for the tests of hipfire.text."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hipfire.base.types import TextAssets

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello there! It's 2024, we don't know 12345.\n"
    "def main(argument):\n\treturn argument ** 2  # a comment\n\n    indented text and  double spaces\n"
    "नमस्ते दुनिया सबको สวัสดีครับ tiếng Việt مَرْحَبًا 日本語のテキスト 漢字 café naïve 😀 😀 🎉\n"
    "user assistant system tool content role the the the and and of of to to in in is is that that\n"
) * 4
SAMPLES = (
    "",
    "Hello world",
    "  two spaces",
    "\ttab and\n\nlines \r\n x",
    "don't WE'LL I'm 12345 3.14 2024",
    "नमस्ते दुनिया",
    "สวัสดีครับ",
    "tie\u0302\u0301ng Vie\u0323\u0302t",
    "مَرْحَبًا بِكُم",
    "日本語のテキスト、漢字。",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪🇫🇷 😀",
    "² ½ Ⅷ ﬁ \u00a0nbsp\u3000wide",
    "def f(x):\n\t\treturn x**2  # hi",
    "\x00\x01\x7f",
    "a_b__c___d",
)
CHATML_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@functools.cache
def byte_level_parts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return tokens and merges of a trained byte-level BPE, plain tokens only."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    engine.train_from_iterator([CORPUS], trainer)
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return tuple(tokens), tuple(merges)


def gguf_bpe(
    pre: str | None = "smollm", controls: Sequence[str] = CHATML_CONTROLS, **more: Any
) -> dict[str, Any]:
    """Return `tokenizer.ggml.*` keys of a byte-level vocabulary; `controls` come after the plain tokens."""
    tokens, merges = byte_level_parts()
    keys: dict[str, Any] = {
        "model": "gpt2",
        "tokens": [*tokens, *controls],
        "token_type": [1] * len(tokens) + [3] * len(controls),
        "merges": list(merges),
        **({"pre": pre} if pre is not None else {}),
        **more,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def json_bpe(added: Sequence[AddedToken], *, bos: str | None = None) -> Tokenizer:
    """Return a `tokenizers` byte-level tokenizer with added tokens; one that adds `bos` if there is one."""
    tokens, merges = byte_level_parts()
    vocab = {token: number for number, token in enumerate(tokens)}
    engine = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    for token in added:
        if token.special:
            engine.add_special_tokens([token])
        else:
            engine.add_tokens([token])
    if bos is not None:
        state = json.loads(engine.to_str())
        number = engine.token_to_id(bos)
        state["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
        }
        engine = Tokenizer.from_str(json.dumps(state))
    return engine


def json_assets(engine: Tokenizer, **fields: Any) -> TextAssets:
    return TextAssets(tokenizer_json=engine.to_str(), **fields)


@functools.cache
def spm_pieces() -> tuple[str, ...]:
    """Return the pieces of a SentencePiece-like BPE in the order of their scores; characters last."""
    engine = Tokenizer(models.BPE())
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    engine.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocab = json.loads(engine.to_str())["model"]["vocab"]
    rare = set("\n\t😀🎉")
    pieces = [piece for piece in sorted(vocab, key=vocab.__getitem__) if rare.isdisjoint(piece)]
    return tuple(sorted(pieces, key=lambda piece: len(piece) == 1))


def gguf_spm(*, prefix: bool, runs: int = 8, **more: Any) -> dict[str, Any]:
    """Return keys of an SPM vocabulary: controls, newline, tab and space runs, bytes, then scored pieces."""
    entries: list[tuple[str, int, float]] = [("<unk>", 2, 0.0), ("<bos>", 3, 0.0), ("<eos>", 3, 0.0)]
    entries += [("<start_of_turn>", 3, 0.0), ("<end_of_turn>", 3, 0.0)]
    for unit, least in (("\n", 1), ("\t", 1), (" ", 2)):
        entries += [(unit * count, 4, 0.0) for count in range(least, runs + 1)]
    entries += [(f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)]
    entries += [(piece, 1, -float(rank)) for rank, piece in enumerate(spm_pieces())]
    keys: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": [text for text, _, _ in entries],
        "token_type": [kind for _, kind, _ in entries],
        "scores": [score for _, _, score in entries],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
        **more,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def count(ids: Sequence[int], number: int | None) -> int:
    return sum(1 for value in ids if value == number)
