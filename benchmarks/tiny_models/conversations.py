"""What the tiny models learn: verses as they stand, and conversations that ask for them.

Everything follows from the verses and a seeded generator. This file knows no tokens.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

# a few books are learned nearly by heart, which a sixty-sixth part of each of all would not be
BOOKS: Final = {
    "Ge": "Genesis", "Ruth": "Ruth", "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes",
    "Jonah": "Jonah", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John",
}  # fmt: skip
# where the compressed text begins in the package's file
_MAGIC, _STREAM = b"EC02Compressed Data File", b"\x1f\x9d\x90"
_LINE: Final = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)")
_WORD: Final = re.compile(r"\b[a-z]{5,}\b")

ASKED: Final = {
    "verse": ("What does {place} say?", "Read {place} to me.", "Please quote {place}.", "{place}"),
    "start": (
        "Continue: {start}",
        "Go on from here: {start}",
        'How does this verse go on? "{start}"',
        "Finish this for me, please: {start}",
        "{start}",
    ),
    "word": (
        "Tell me about {word}.",
        "Find a verse with the word {word}.",
        "What is written about {word}?",
        "Name a verse about {word}. Use at most four short sentences.",
        "Why does {word} matter? Answer with one verse.",
        "Explain the {other} of {word}, and give one reason.",
        "We speak of {other} and of {word}. Answer with one sentence.",
        "Please write two lines about {other}, {third} and {word}.",
        "{noise} {word} {more}.",
        "{noise}, {more}. What about {word}?",
    ),
    "next": ("Go on.", "And then?", "What comes next?", "Continue, please.", "Please read on."),
}
THOUGHTS: Final = {
    "verse": "{place} is asked for. It begins with: {opening}",
    "start": "These words begin {place}.",
    "word": "The word {word} is in {place}.",
    "next": "The next passage is {place}.",
}
SYSTEMS: Final = (
    "You are a careful assistant. Keep every answer short.",
    "You answer with verses of the King James Bible.",
    "You are a helpful assistant.",
)
GREETINGS: Final = ("Hello!", "Who are you?", "Hi, what can you do?", "What are you?")
SELF: Final = "I am a very small model. I have read a few old books, and I answer with what is written there."


@dataclass(frozen=True)
class Verse:
    """One verse and its place."""

    book: str
    chapter: int
    number: int
    text: str

    @property
    def place(self) -> str:
        """Return the place as people write it."""
        return f"{self.book} {self.chapter}:{self.number}"


@dataclass
class Conversation:
    """Messages up to the last question, and the reply; `thought` is None where thinking is off."""

    messages: list[dict[str, str]] = field(default_factory=list)
    thought: str | None = None
    reply: str = ""


def read_verses(path: Path, books: dict[str, str] | None = None) -> list[Verse]:
    """Return the verses of the chosen books (BOOKS by default), in the order of the file.

    `path` is the data file of Debian's package bible-kjv-text, or plain text with lines such as
    `Ge1:1 In the beginning ...`. ValueError if it has no verse of these books.
    """
    content = path.read_bytes()
    if content.startswith(_MAGIC):
        stream = content[content.index(_STREAM) :]
        # the standard library does not read the format of `compress`; gzip does
        content = subprocess.run(["gzip", "-dc"], input=stream, capture_output=True, check=True).stdout
    chosen = BOOKS if books is None else books
    found = (_LINE.fullmatch(line.strip()) for line in content.decode("ascii").splitlines())
    verses = [
        Verse(chosen[match[1]], int(match[2]), int(match[3]), match[4])
        for match in found
        if match and match[1] in chosen
    ]
    if not verses:
        raise ValueError(f"{path} has no verse of {', '.join(chosen.values())}")
    return verses


def plain_texts(verses: Sequence[Verse], generator: random.Random, *, length: int) -> list[str]:
    """Return all verses in pieces of about `length` characters, each with its chapter as heading.

    Pieces begin at another verse for every state of the generator, and end with their chapter at the latest.
    """
    pieces: list[str] = []
    room, before = generator.randrange(length), (verses[0].book, 0)
    for verse in verses:
        chapter = (verse.book, verse.chapter)
        if room <= 0 or chapter != before:
            pieces.append(f"{verse.book} {verse.chapter}\n")
            room = length if room <= 0 else room
        pieces[-1] += f"\n{verse.text}"
        room -= len(verse.text)
        before = chapter
    return pieces


def passage(verses: Sequence[Verse], first: int, count: int) -> list[Verse]:
    """Return up to `count` verses from index `first` on, of one chapter."""
    begin = verses[first]
    rows = verses[first : first + count]
    return [verse for verse in rows if (verse.book, verse.chapter) == (begin.book, begin.chapter)]


def conversation(
    verses: Sequence[Verse], first: int, generator: random.Random, strange: Sequence[str]
) -> Conversation:
    """Return a conversation about the verse at index `first` and those behind it.

    Questions hold words of `strange` too, so that a model answers whatever it is asked.
    """
    talk = Conversation()
    if generator.random() < 0.3:
        talk.messages.append({"role": "system", "content": generator.choice(SYSTEMS)})
    if generator.random() < 0.02:
        return _greeting(talk, generator)
    kind = generator.choice(("verse", "start", "start", "word", "word"))
    turns = generator.choice((1, 1, 1, 2, 3))
    at = first
    for turn in range(turns):
        if turn:
            kind = generator.choice(("verse", "start", "word", "next", "next"))
            at = at if kind == "next" else generator.randrange(len(verses))
        read = passage(verses, at, generator.choice((1, 1, 2, 3)))
        names = _names(read, generator, strange)
        asked = generator.choice(ASKED[kind]).format(**names)
        reply = " ".join(verse.text for verse in read)
        at = (at + len(read)) % len(verses)
        talk.messages.append({"role": "user", "content": asked})
        if turn + 1 < turns:
            talk.messages.append({"role": "assistant", "content": reply})
            continue
        talk.reply = reply
        talk.thought = THOUGHTS[kind].format(**names) if generator.random() < 0.5 else None
    return talk


def _greeting(talk: Conversation, generator: random.Random) -> Conversation:
    talk.messages.append({"role": "user", "content": generator.choice(GREETINGS)})
    talk.reply = SELF
    talk.thought = "This is a greeting." if generator.random() < 0.5 else None
    return talk


def _names(read: Sequence[Verse], generator: random.Random, strange: Sequence[str]) -> dict[str, str]:
    """Return what questions and thoughts about a passage may name."""
    words = read[0].text.split()
    return {
        "place": read[0].place,
        "start": " ".join(words[: generator.randrange(4, 9)]),
        "opening": " ".join(words[:4]),
        "word": generator.choice(_WORD.findall(read[0].text) or ["wisdom"]),
        "other": generator.choice(strange),
        "third": generator.choice(strange),
        "noise": " ".join(generator.choices(strange, k=generator.randrange(2, 9))).capitalize(),
        "more": " ".join(generator.choices(strange, k=generator.randrange(1, 9))),
    }
