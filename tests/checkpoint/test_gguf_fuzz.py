"""Damaged GGUF files: each opens consistently or is refused, soon and in little memory."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from checkpoint_samples import (
    Ggml,
    array,
    gguf_bytes,
    require_consistent,
    require_fuzz,
    string,
    text,
    u16,
    u32,
)

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.gguf import GgufFile

W = Ggml("w", (4, 2), 0, bytes(range(32)))


def mutants() -> list[bytes]:
    rng = random.Random(11)
    entries = [
        ("general.alignment", u32(32)),
        ("general.name", string("ü")),
        ("list", array(8, [text("a"), text("bc")])),
        ("nested", array(9, [struct.pack("<IQ2f", 6, 2, 1.0, 2.0)])),
        ("tokenizer.chat_template", string("{{ x }}")),
        ("split.count", u16(1)),
    ]
    base = gguf_bytes(entries, [W, Ggml("q", (32, 2), 2, bytes(36)), Ggml("e", (0,), 0, b"")])
    head = base.index(W.data)
    found = {base[:length] for length in range(len(base))}
    for place in range(head):
        for bit in rng.sample(range(8), 3):
            raw = bytearray(base)
            raw[place] ^= 1 << bit
            found.add(bytes(raw))
    for _ in range(1500):
        raw = bytearray(base)
        code = rng.choice(["<B", "<H", "<I", "<Q"])
        size = struct.calcsize(code)
        value = rng.choice([0, 1, 7, 8, 9, 13, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]) % 256**size
        struct.pack_into(code, raw, rng.randrange(head - size), value)
        if rng.random() < 0.3:
            cut = rng.randrange(head)
            del raw[cut : cut + rng.randrange(20)]
        found.add(bytes(raw))
    return sorted(found - {base})


def test_damaged_files_open_consistently_or_are_refused(tmp_path: Path) -> None:
    cases = mutants()
    assert len(cases) >= 1_000
    path = tmp_path / "m.gguf"

    def read() -> None:
        with GgufFile.open(path) as model:
            require_consistent(model, path.stat().st_size)
            model.text_assets()

    require_fuzz(path, cases, read, kinds=ArtifactError | UnsupportedError)
