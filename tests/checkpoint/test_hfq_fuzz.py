"""Thousands of damaged containers: each opens consistently or is refused, quickly and in little memory."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import Stored, bounded, hfq_bytes, require_consistent, require_fuzz

from hipfire.base.errors import ArtifactError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.hfq import HfqFile

METADATA = (
    '{"architecture":"llama","config":{"hidden_size":256,"rms_norm_eps":1e-6,"text_config":{"a":[1,2]}},'
    '"tokenizer":"{\\"model\\": {\\"type\\": \\"BPE\\"}} ü","tokenizer_config":{"chat_template":"{{ x }}"},'
    '"gguf_meta":{"tokenizer.ggml.tokens":["a","b"]},"source":"gguf"}'
).encode()
TENSORS = [
    Stored(b"model.embed_tokens.weight", QType.Q8F16, (3, 32), bytes(range(102)), 32),
    Stored(b"model.layers.0.mlp.up_proj.weight", QType.MQ4G256, (2, 256), bytes(272), 256),
    Stored(b"model.norm.weight", QType.F16, (5,), bytes(10)),
    Stored(b"scalar", QType.F32, (), bytes(4)),
    Stored(b"later", 99, (2, 2), b"123"),
    Stored(b"tail", QType.BF16, (0, 9), b""),
]
BASE = hfq_bytes(METADATA, TENSORS, arch_id=1)
INDEX = 32 + len(METADATA)
INDEX_END = INDEX + 4 + sum(2 + len(s.name) + 2 + 4 * len(s.shape) + 12 for s in TENSORS)
EXTREME = (0, 1, 2, 31, 33, 4095, 4096, 8192, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)
EXTREME_64 = (*EXTREME, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 1)
HOSTILE_JSON = [
    b"",
    b"[]",
    b"null",
    b'"text"',
    b"{",
    b'{"',
    b'{"a',
    b'{"a\\',
    b'{"a":1',
    b'{"a":}',
    b"{a:1}",
    b"{}{}",
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":1e999}',
    b'{"a":"\xc3"}',
    b'{"a":"\xed\xa0\x80"}',
    b'{"a":"\\ud800"}',
    b'{"a":"\\u12"}',
    b'{"a":"\n"}',
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":' * 600 + b"1" + b"}" * 600,
    b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"a":' + b"[" * 5000 + b"}",
    b'{"config":[]}',
    b'{"tokenizer":{}}',
    b'{"tokenizer_config":{"chat_template":[[]]}}',
    b'{"gguf_meta":{"tokenizer.chat_template":[]}}',
    b"{" + b" " * 10_000,
    b"\x00" * 100,
    b"{}" + b"}" * 100,
    b"\xef\xbb\xbf{}",
]


def truncations() -> Iterator[bytes]:
    for length in range(INDEX_END + 2):
        yield BASE[:length]
    for length in range(INDEX_END + 2, len(BASE), 7):
        yield BASE[:length]


def bit_flips(rng: random.Random) -> Iterator[bytes]:
    # every bit of header and index, and a sample of the text
    places = [*range(32), *range(INDEX, INDEX_END), *rng.sample(range(32, INDEX), 60)]
    for place in places:
        for bit in range(8):
            raw = bytearray(BASE)
            raw[place] ^= 1 << bit
            yield bytes(raw)


def overwrites(rng: random.Random) -> Iterator[bytes]:
    fields = [(4, "<I"), (8, "<I"), (12, "<I"), (16, "<Q"), (24, "<Q"), (INDEX, "<I")]
    place = INDEX + 4
    for item in TENSORS:
        kind = place + 2 + len(item.name)
        tail = kind + 2 + 4 * len(item.shape)
        fields += [(place, "<H"), (kind, "<B"), (kind + 1, "<B"), (tail, "<I"), (tail + 4, "<Q")]
        fields += [(kind + 2 + 4 * axis, "<I") for axis in range(len(item.shape))]
        place = tail + 12
    for offset, code in fields:
        size = struct.calcsize(code)
        for value in EXTREME_64:
            if value < 256**size:
                raw = bytearray(BASE)
                struct.pack_into(code, raw, offset, value)
                yield bytes(raw)
    for _ in range(300):
        raw = bytearray(BASE)
        for offset, code in rng.sample(fields, 3):
            struct.pack_into(code, raw, offset, rng.choice(EXTREME_64) % 256 ** struct.calcsize(code))
        yield bytes(raw)


def scrambles(rng: random.Random) -> Iterator[bytes]:
    for _ in range(300):
        raw = bytearray(BASE)
        start = rng.randrange(INDEX_END)
        end = min(start + rng.randrange(1, 40), INDEX_END)
        kind = rng.randrange(3)
        if kind == 0:
            raw[start:end] = rng.randbytes(end - start)
        elif kind == 1:
            del raw[start:end]
        else:
            raw[start:start] = raw[start:end]
        yield bytes(raw)


def hostile_json() -> Iterator[bytes]:
    for text in HOSTILE_JSON:
        yield hfq_bytes(text, TENSORS)
        yield hfq_bytes(text, [])
    for cut in range(len(METADATA)):
        yield hfq_bytes(METADATA[:cut], TENSORS)


def mutants() -> list[bytes]:
    rng = random.Random(20240607)
    groups = (truncations(), bit_flips(rng), overwrites(rng), scrambles(rng), hostile_json())
    return sorted({raw for group in groups for raw in group} - {BASE})


def test_damaged_containers(tmp_path: Path) -> None:
    cases = mutants()
    assert len(cases) >= 2_000
    path = tmp_path / "m.hfq"

    def read() -> None:
        with HfqFile.open(path) as model:
            require_consistent(model, path.stat().st_size)
            model.text_assets()

    require_fuzz(path, cases, read)


@pytest.mark.parametrize("text", HOSTILE_JSON, ids=range(len(HOSTILE_JSON)))
def test_hostile_metadata_never_reaches_the_caller(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "m.hfq"
    path.write_bytes(hfq_bytes(text, TENSORS))

    def read() -> None:
        with bounded(seconds=2, nbytes=2**21), HfqFile.open(path) as model:
            model.text_assets()

    with pytest.raises(ArtifactError) as caught:
        read()
    assert caught.value.field is not None


def test_the_undamaged_base_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.hfq"
    path.write_bytes(BASE)
    model = HfqFile.open(path)
    assert [bytes(model.raw(name)) for name in model.tensors] == [item.data for item in TENSORS]
    assert model.text_assets().chat_templates == {"default": "{{ x }}"}
