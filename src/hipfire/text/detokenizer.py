"""Token ids back to text, one at a time: whole characters only, exactly the text of the one-shot decode.

A detokenizer holds the state of one sequence and nothing else; work for each token is constant. This file
knows how tokens spell bytes and nothing about vocabularies as files, prompts or stopping.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """What every detokenizer offers."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: "" while a character is unfinished."""

    def flush(self) -> str:
        """Return what is left at the end of the sequence; unfinished characters become U+FFFD."""


class ByteDetokenizer:
    """For tokens that stand for bytes. `token_bytes` gives them; b"" for what is not shown.

    `drop_space` drops one space at the very start, which SentencePiece put there when encoding.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, drop_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = drop_space

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes. Never raises for ids of the vocabulary."""
        return self._trimmed(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, "" otherwise; the sequence is over."""
        return self._trimmed(self._decoder.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class MarkedDetokenizer:
    """Shows some control tokens by their spelling, in the text of a detokenizer that leaves them out.

    `restart` makes the detokenizer of the text after a marker; `markers` maps ids to spellings.
    """

    def __init__(
        self, first: Detokenizer, restart: Callable[[], Detokenizer], markers: Mapping[int, str]
    ) -> None:
        self._inner = first
        self._restart = restart
        self._markers = markers

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; a marker completes what is in front of it."""
        marker = self._markers.get(token_id)
        if marker is None:
            return self._inner.push(token_id)
        text = self._inner.flush() + marker
        self._inner = self._restart()
        return text

    def flush(self) -> str:
        """Return what is left at the end of the sequence."""
        return self._inner.flush()


class WholeDetokenizer:
    """For engines whose decoder is not bytewise: shows text once later tokens can no longer change it.

    `decode` is the one-shot decoder, `step` decodes one token after its neighbours in constant work and may
    refuse.
    """

    def __init__(self, decode: Callable[[list[int]], str], step: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._step = step
        self._ids: list[int] = []
        self._shown: list[str] = []
        self._broken = False

    def push(self, token_id: int) -> str:
        """Return new text; after a sequence that the engine cannot follow, nothing more before `flush`."""
        self._ids.append(token_id)
        if self._broken:
            return ""
        try:
            text = self._step(token_id) or ""
        except Exception:  # the engine raises bare Exception when its own output is not monotonic
            self._broken = True
            return ""
        self._shown.append(text)
        return text

    def flush(self) -> str:
        """Return the rest of the one-shot decode, as far as it continues what was shown."""
        whole = self._decode(self._ids)
        shown = "".join(self._shown)
        self._ids = []
        self._shown = []
        return whole[len(shown) :] if whole.startswith(shown) else ""


def decode_all(detokenizer: Detokenizer, ids: Iterable[int]) -> str:
    """Return the text of a whole sequence."""
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


def byte_alphabet() -> dict[int, int]:
    """Return the byte alphabet of byte-level vocabularies: code point of the spelling to byte.

    Printable Latin-1 characters spell themselves, the other bytes are U+0100 and up in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{0x100 + rank: byte for rank, byte in enumerate(others)}}


def byte_level_bytes(text: str, alphabet: dict[int, int]) -> bytes:
    """Return the bytes that a byte-level token spells; a token outside the alphabet is its own UTF-8 text."""
    codes = [alphabet.get(ord(character)) for character in text]
    known = [code for code in codes if code is not None]
    return bytes(known) if len(known) == len(codes) else text.encode("utf-8", "replace")


def sentencepiece_bytes(text: str) -> bytes:
    """Return the bytes that a SentencePiece token spells."""
    byte = _BYTE_TOKEN.fullmatch(text)
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    return text.replace("\u2581", " ").encode("utf-8", "replace")
