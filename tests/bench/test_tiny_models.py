"""The trainer of the tiny models: what it learns from, and a few steps of a model with two layers."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hipfire.base.qtypes import QType
from hipfire.checkpoint.source import open_checkpoint
from hipfire.runtime.identify import named_checkpoint, read_config
from hipfire.text.template import ChatTemplate

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tiny_models"
VERSES = """Ge1:1 In the beginning God created the heaven and the earth.
Ge1:2 And the earth was without form, and void;
Ge2:1 Thus the heavens and the earth were finished.
Lev1:1 And the LORD called unto Moses,
John1:1 In the beginning was the Word.
"""
END, START, STOP = 256, 257, 258
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
WIDTHS = {
    "dense": {"intermediate_size": 96},
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture(scope="module")
def trainer() -> Iterator[dict[str, ModuleType]]:
    """Import the trainer's files as its commands do: from their own folder."""
    names = ("conversations", "data", "train")
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def engine() -> Tokenizer:
    """Return a tokenizer of bytes with the three control tokens that the chat format has."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["\u0120", "\u0120l", "\u0120li", "\u0120lig", "\u0120ligh", "\u0120light"]
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary.update({text: END + place for place, text in enumerate([*controls, *words[1:]])})
    merges = [(before, after[-1]) for before, after in itertools.pairwise(words)]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    return made


@pytest.fixture
def verses(trainer: dict[str, ModuleType], tmp_path: Path) -> list[Any]:
    """Return the verses of the chosen books."""
    text = tmp_path / "verses.txt"
    text.write_text(VERSES)
    found: list[Any] = trainer["conversations"].read_verses(text)
    return found


def writer(trainer: dict[str, ModuleType], engine: Tokenizer) -> Any:
    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text())
    return trainer["data"].Writer(engine, template)


def test_verses_of_chosen_books_are_read_with_their_places(verses: list[Any]) -> None:
    assert [verse.place for verse in verses] == ["Genesis 1:1", "Genesis 1:2", "Genesis 2:1", "John 1:1"]
    assert verses[0].text == "In the beginning God created the heaven and the earth."


def test_compressed_data_of_the_package_are_read(trainer: dict[str, ModuleType], tmp_path: Path) -> None:
    # what `compress` makes of b"Ge1:1 A": a header, and codes of nine bits, the lowest bit first
    bits = "".join(f"{code:09b}"[::-1] for code in b"Ge1:1 A")
    codes = bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
    path = tmp_path / "bible.data"
    path.write_bytes(b"EC02Compressed Data File" + bytes(344) + b"\x1f\x9d\x90" + codes)
    assert [verse.text for verse in trainer["conversations"].read_verses(path)] == ["A"]


def test_a_text_without_verses_is_refused(trainer: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("no verse\n")
    with pytest.raises(ValueError, match=r"empty\.txt has no verse of Genesis"):
        trainer["conversations"].read_verses(path)


def test_plain_texts_hold_every_verse_once_under_its_chapter(
    trainer: dict[str, ModuleType], verses: list[Any]
) -> None:
    pieces = trainer["conversations"].plain_texts(verses, random.Random(0), length=10_000)
    assert [piece.splitlines()[0] for piece in pieces] == ["Genesis 1", "Genesis 2", "John 1"]
    lines = [line for piece in pieces for line in piece.splitlines()[2:]]
    assert lines == [verse.text for verse in verses]


def test_conversations_end_with_an_answer_from_the_text(
    trainer: dict[str, ModuleType], verses: list[Any]
) -> None:
    module = trainer["conversations"]
    generator = random.Random(3)
    talks = [module.conversation(verses, at % 4, generator, ["light"]) for at in range(200)]
    texts = {verse.text for verse in verses}
    for talk in talks:
        assert talk.messages[-1]["role"] == "user"
        assert talk.reply == module.SELF or any(talk.reply.startswith(text) for text in texts)
        assert "{" not in talk.messages[-1]["content"] + (talk.thought or "")
    assert {len(talk.messages) for talk in talks} >= {1, 2, 3, 5}
    assert {talk.thought is None for talk in talks} == {True, False}


def test_replies_are_encoded_as_they_are_served(trainer: dict[str, ModuleType], engine: Tokenizer) -> None:
    module = trainer["conversations"]
    made = writer(trainer, engine)
    asked = [{"role": "user", "content": "Hi"}]
    plain = made.talk(module.Conversation(asked, None, "A light."))
    opening = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    text = engine.decode(plain, skip_special_tokens=False)
    assert text == opening + "\n</think>\n\nA light.<|im_end|><|endoftext|>"
    assert plain[0] == START
    assert plain[-2:] == [STOP, END]
    thinking = made.talk(module.Conversation(asked, "So.", "A light."))
    prompt = made.prompt(asked, thinking=True)
    assert thinking[: len(prompt)] == prompt
    assert engine.decode(prompt, skip_special_tokens=False) == opening
    rest = engine.decode(thinking[len(prompt) :], skip_special_tokens=False)
    assert rest == "So.\n</think>\n\nA light.<|im_end|><|endoftext|>"


def test_the_template_drops_thoughts_that_were_answered(
    trainer: dict[str, ModuleType], engine: Tokenizer
) -> None:
    user = {"role": "user", "content": "Hi"}
    reply = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nYes."}
    ids = writer(trainer, engine).prompt([user, reply, user], thinking=False)
    assert engine.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_rows_begin_with_documents_and_are_the_same_again(
    trainer: dict[str, ModuleType], engine: Tokenizer, verses: list[Any]
) -> None:
    module, made = trainer["data"], writer(trainer, engine)

    def rows() -> np.ndarray:
        return module.pack(module.documents(made, verses, random.Random(1)), 8, 200)

    found = rows()
    assert found.shape == (8, 200)
    assert found.dtype == np.uint16
    firsts = [engine.decode(row[:20].tolist(), skip_special_tokens=False) for row in found]
    heads = ("<|im_start|>user\n", "<|im_start|>system\n", "Genesis ", "John ")
    assert all(text.startswith(heads) for text in firsts)
    assert np.array_equal(found, rows())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_few_steps_give_a_folder_that_hipfire_reads(
    trainer: dict[str, ModuleType], engine: Tokenizer, verses: list[Any], tmp_path: Path, kind: str
) -> None:
    module, train = trainer["data"], trainer["train"]
    made = writer(trainer, engine)
    folder = tmp_path / "data" / "tokenizer"
    folder.mkdir(parents=True)
    for name, content in module.text_files(engine.to_str(), made.template.source).items():
        (folder / name).write_text(content, encoding="utf-8")
    packed = module.pack(module.documents(made, verses, random.Random(2)), 4, 80)
    np.save(tmp_path / "data" / "rows.npy", packed)
    (tmp_path / "data" / "prompts.json").write_text(json.dumps([made.ids("In the")]))
    run = train.Run(steps=4, seconds=1e6, batch=2, rate=1e-2, device="cpu")
    losses = train.make(kind, tmp_path / "data", tmp_path / "model", run, **{**SMALL, **WIDTHS[kind]})
    assert losses[-1] < losses[0]
    with open_checkpoint(tmp_path / "model") as checkpoint:
        family, config = read_config(checkpoint)
        assert family.oracle == {"dense": "Qwen3_5ForCausalLM", "moe": "Qwen3_5MoeForCausalLM"}[kind]
        assert len(config.state_specs()) == len(config.cache_specs()) == 1
        assert config.sizes.vocab_size % 64 == 0
        assert {info.qtype for info in checkpoint.tensors.values()} == {QType.BF16}
        stored = named_checkpoint(checkpoint, family, config)
        assert [name for name in config.tensors() if stored.find(name) is None] == []
        assets = checkpoint.text_assets()
    assert assets.generation_config["eos_token_id"] == [STOP, END]
    assert assets.chat_templates["default"] == made.template.source


def test_the_models_have_the_sizes_that_files_and_kernels_allow(trainer: dict[str, ModuleType]) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    for kind, recurrent in (("dense", 6), ("moe", 3)):
        with torch.device("meta"):
            model = trainer["train"].build(kind, 49152, ids)
        assert model.config.layer_types.count("linear_attention") == recurrent
        assert model.config.layer_types[3] == "full_attention"
        assert model.config.eos_token_id == [2, 0]
        assert 5e6 < sum(weight.numel() for weight in model.parameters()) < 30e6


def test_the_rate_rises_and_falls_with_steps_or_time(trainer: dict[str, ModuleType]) -> None:
    run = trainer["train"].Run(steps=100, seconds=10.0, rate=1.0)
    assert run.progress(50, 1.0) == 0.5
    assert run.progress(50, 8.0) == 0.8
    assert run.progress(99, 11.0) == 1.0
    rates = [run.rate_at(step / 100) for step in range(101)]
    assert 0 < rates[0] < rates[4] == max(rates)
    assert rates[-1] == pytest.approx(trainer["train"].LEAST)
