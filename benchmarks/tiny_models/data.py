"""Make what `train.py` reads: rows of token ids, a few prompts, and the text files of a Hugging Face folder.

usage: data.py --text BIBLE.DATA --gguf SMOLLM2.GGUF --out FOLDER [--rows N] [--seed N]

The text is that of Debian's package bible-kjv-text; README.md says how to get it. The vocabulary is read from
the GGUF file that `hipfire pull smollm2:135m` installs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from conversations import Conversation, Verse, conversation, plain_texts, read_verses
from tokenizers import Tokenizer, decoders

from hipfire.checkpoint.source import open_checkpoint
from hipfire.text.controls import ControlToken
from hipfire.text.template import ChatTemplate
from hipfire.text.vocab_gguf import from_gguf

WIDTH: Final = 1024
ROWS: Final = 3900
# how often every verse stands in a row outside conversations
PASSES: Final = 3
PIECE: Final = 2400
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
# shown at the end of training: what is asked, and whether with thinking
SHOWN: Final = (
    ("Continue: In the beginning God created", False),
    ("The LORD is my shepherd;", False),
    ("Tell me about wisdom.", True),
    ("What does John 1:1 say?", True),
    ("Name the capital of France and one famous landmark there.", False),
)


@dataclass(frozen=True)
class Writer:
    """Turns texts and conversations into ids, as a server does with the same template."""

    engine: Tokenizer
    template: ChatTemplate

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text; control tokens in it are recognized."""
        return list(self.engine.encode(text, add_special_tokens=False).ids)

    def prompt(self, messages: Sequence[dict[str, str]], *, thinking: bool) -> list[int]:
        """Return the ids of a conversation up to where the reply begins."""
        extra = {"enable_thinking": thinking}
        return self.ids(self.template.render(list(messages), extra=extra).text)

    def talk(self, talk: Conversation) -> list[int]:
        """Return the ids of a conversation with its reply, cut where a server cuts: behind the prompt."""
        prompt = self.prompt(talk.messages, thinking=talk.thought is not None)
        thought = "" if talk.thought is None else f"{talk.thought}\n</think>\n\n"
        return prompt + self.ids(thought + talk.reply + TURN_END + END_OF_TEXT)


def tokenizer_json(gguf: Path) -> str:
    """Return `tokenizer.json` of the byte-level vocabulary of a GGUF file."""
    checkpoint = open_checkpoint(gguf)
    assets = checkpoint.text_assets()
    rows = len((assets.gguf or {})["tokenizer.ggml.tokens"])
    vocabulary = from_gguf(assets, rows)
    engine = vocabulary.head
    engine.decoder = decoders.ByteLevel()
    described = json.loads(engine.to_str())
    described["added_tokens"] = [
        _added(text, control) for text, control in sorted(vocabulary.controls.items(), key=_number)
    ]
    return json.dumps(described, ensure_ascii=False, separators=(",", ":"))


def _number(item: tuple[str, ControlToken]) -> int:
    return item[1].token_id


def _added(text: str, control: ControlToken) -> dict[str, Any]:
    """Return a control token as `tokenizer.json` lists it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": control.token_id, "content": text, **flags, "special": True}


def text_files(tokenizer: str, template: str) -> dict[str, str]:
    """Return the text files of a Hugging Face folder by name."""
    engine = Tokenizer.from_str(tokenizer)
    end, start, stop = (engine.token_to_id(text) for text in (END_OF_TEXT, TURN_START, TURN_END))
    config = {
        "add_bos_token": False,
        "bos_token": TURN_START,
        "eos_token": TURN_END,
        "pad_token": TURN_END,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
    }
    generation = {"bos_token_id": start, "eos_token_id": [stop, end], "pad_token_id": stop}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(config, indent=1),
        "generation_config.json": json.dumps(generation, indent=1),
    }


def strange_words(engine: Tokenizer) -> list[str]:
    """Return the vocabulary's tokens that are words of four letters or more behind a space."""
    words = (token[1:] for token in engine.get_vocab() if token.startswith("\u0120"))
    return sorted(word for word in words if len(word) >= 4 and word.isascii() and word.isalpha())


def documents(writer: Writer, verses: Sequence[Verse], generator: random.Random) -> Iterator[list[int]]:
    """Yield the ids of texts and conversations without end: in every round each verse begins a conversation.

    The texts come in the first PASSES rounds, between the conversations.
    """
    rounds, strange = 0, strange_words(writer.engine)
    while True:
        order = [(verse, "") for verse in range(len(verses))]
        if rounds < PASSES:
            order += [(0, text) for text in plain_texts(verses, generator, length=PIECE)]
        generator.shuffle(order)
        for first, text in order:
            if text:
                yield writer.ids(text + END_OF_TEXT)
            else:
                yield writer.talk(conversation(verses, first, generator, strange))
        rounds += 1


def pack(found: Iterator[list[int]], rows: int, width: int) -> np.ndarray:
    """Return uint16 ids [rows, width]: documents behind one another, the last of a row cut off.

    Every row begins with a document, as every prompt does.
    """
    packed = np.empty((rows, width), np.uint16)
    for row in packed:
        filled = 0
        while filled < width:
            ids = next(found)[: width - filled]
            row[filled : filled + len(ids)] = ids
            filled += len(ids)
    return packed


def make(text: Path, gguf: Path, out: Path, *, rows: int = ROWS, seed: int = 0, width: int = WIDTH) -> None:
    """Write `rows.npy`, `prompts.json` and the folder `tokenizer` under `out`; same inputs, same bytes."""
    files = text_files(tokenizer_json(gguf), TEMPLATE.read_text(encoding="utf-8"))
    engine = Tokenizer.from_str(files["tokenizer.json"])
    if engine.get_vocab_size() > np.iinfo(np.uint16).max + 1:
        raise ValueError(f"{gguf} has {engine.get_vocab_size()} tokens, more than 16 bits number")
    writer = Writer(engine, ChatTemplate(TEMPLATE.read_text(encoding="utf-8")))
    folder = out / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    packed = pack(documents(writer, read_verses(text), random.Random(seed)), rows, width)
    np.save(out / "rows.npy", packed)
    shown = [writer.prompt([{"role": "user", "content": asked}], thinking=on) for asked, on in SHOWN]
    (out / "prompts.json").write_text(json.dumps(shown), encoding="utf-8")


def main() -> None:
    """Read the command line, and make the files."""
    parser = argparse.ArgumentParser(description="Make the training data of the tiny models.")
    parser.add_argument("--text", type=Path, required=True, help="data file of bible-kjv-text, or plain text")
    parser.add_argument("--gguf", type=Path, required=True, help="a GGUF file with SmolLM2's vocabulary")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of ids (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (default: %(default)s)")
    given = parser.parse_args()
    make(given.text, given.gguf, given.out, rows=given.rows, seed=given.seed)


if __name__ == "__main__":
    main()
