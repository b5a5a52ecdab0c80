"""Damaged safetensors files: each opens consistently or is refused, quickly and in little memory."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from checkpoint_samples import entry, require_consistent, require_fuzz, safetensors_bytes

from hipfire.checkpoint.safetensors import SafetensorsModel


def mutants() -> list[bytes]:
    rng = random.Random(5)
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 2], 0, 16),
        "b": entry("I64", [1], 16, 24),
        "c": entry("BF16", [0, 3], 24, 24),
    }
    base = safetensors_bytes(header, bytes(24))
    found = {base[:length] for length in range(len(base))}
    for _ in range(1500):
        raw = bytearray(base)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(base) - 24)
            action = rng.randrange(4)
            if action == 0:
                raw[place] ^= 1 << rng.randrange(8)
            elif action == 1:
                raw[place] = rng.choice(b'0159-.eE{}[]",:\\ \x00\xff')
            elif action == 2:
                del raw[place : place + rng.randrange(1, 9)]
            else:
                raw[place:place] = rng.choice([b"9", b"[[", b"{}", b'"', b"1e99", b"null", b"-"])
        if rng.random() < 0.8:
            raw[:8] = struct.pack("<Q", len(raw) - 32)
        found.add(bytes(raw))
    return sorted(found - {base})


def test_damaged_files_open_consistently_or_are_refused(tmp_path: Path) -> None:
    cases = mutants()
    assert len(cases) >= 500
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "w.safetensors"

    def read() -> None:
        with SafetensorsModel.open(tmp_path) as model:
            require_consistent(model, path.stat().st_size)

    require_fuzz(path, cases, read, seconds=90)
