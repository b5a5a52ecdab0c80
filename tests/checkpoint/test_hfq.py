"""Reading HFQM containers that were assembled by hand."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest
from checkpoint_samples import Stored, bounded, hfq_bytes

from hipfire.base.errors import ArtifactError, InternalError
from hipfire.base.qtypes import QType
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.hfq import HfqFile

F32 = QType.F32


def put(folder: Path, data: bytes, name: str = "m.hfq") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_fields_tensors_and_bytes(tmp_path: Path) -> None:
    first, second = bytes(range(24)), bytes(range(100, 236))
    metadata = b'{"config":{"hidden_size":256},"n":"a } brace, a \\" quote, a { brace"}'
    tensors = [
        Stored(b"a.weight", F32, (2, 3), first),
        Stored("größe".encode(), QType.MQ4G256, (1, 256), second, 256),
        Stored(b"scalar", F32, (), b"\x00\x00\x80\x3f"),
        Stored(b"empty", QType.F16, (0, 4), b""),
        Stored(b"later format", 99, (7, 7), b"xyz", 64),
    ]
    with HfqFile.open(put(tmp_path, hfq_bytes(metadata, tensors, arch_id=5, version=7))) as model:
        assert (model.kind, model.arch_id, model.version) == ("hfq", 5, 7)
        assert model.model_config == {"hidden_size": 256}
        assert model.metadata["n"] == 'a } brace, a " quote, a { brace'
        assert list(model.tensors.values()) == [
            TensorInfo("a.weight", F32, (2, 3), 24),
            TensorInfo("größe", QType.MQ4G256, (1, 256), 136, 256),
            TensorInfo("scalar", F32, (), 4),
            TensorInfo("empty", QType.F16, (0, 4), 0),
            TensorInfo("later format", 99, (7, 7), 3, 64),
        ]
        assert [bytes(model.raw(name)) for name in model.tensors] == [item.data for item in tensors]
        assert "b.weight" not in model.tensors
        with pytest.raises(ArtifactError, match=r"no tensor named 'b\.weight'"):
            model.raw("b.weight")
        with pytest.raises(TypeError):
            model.raw("a.weight")[0] = 1


def test_of_two_entries_with_one_name_the_later_counts(tmp_path: Path) -> None:
    tensors = [
        Stored(b"w", F32, (1,), b"old!"),
        Stored(b"x", F32, (1,), b"mid."),
        Stored(b"w", QType.F16, (3,), b"newer!"),
    ]
    model = HfqFile.open(put(tmp_path, hfq_bytes(b"{}", tensors)))
    assert list(model.tensors) == ["x", "w"]
    assert model.tensors["w"].shape == (3,)
    assert bytes(model.raw("w")) == b"newer!"
    assert bytes(model.raw("x")) == b"mid."


def test_a_bundle_reads_as_its_trunk(tmp_path: Path) -> None:
    trunk = hfq_bytes(b'{"config":{"a":1}}', [Stored(b"w", F32, (1,), b"1234")])
    head = hfq_bytes(b'{"config":{"a":2}}', [Stored(b"h", F32, (1,), b"5678")])
    data = trunk + head + b"HFBNDMTP" + struct.pack("<Q", len(trunk))
    model = HfqFile.open(put(tmp_path, data))
    assert list(model.tensors) == ["w"]
    assert model.model_config == {"a": 1}


def test_reversed_shapes_of_the_original_gguf_path_are_accepted_only_there(tmp_path: Path) -> None:
    stored = Stored(b"w", QType.HFQ4G128, (704, 3), bytes(72 * 18), 128)
    model = HfqFile.open(put(tmp_path, hfq_bytes(b'{"source":"gguf"}', [stored])))
    assert model.tensors["w"].shape == (704, 3)
    with pytest.raises(
        ArtifactError, match=r"HFQ4G128 with shape \[704, 3\] takes 1224 or 50688 bytes, not 1296"
    ):
        HfqFile.open(put(tmp_path, hfq_bytes(b"{}", [stored])))


@pytest.mark.parametrize("nbytes", [72 * 18, 72 * 17])
def test_row_safe_and_flat_sizes_are_both_valid(tmp_path: Path, nbytes: int) -> None:
    path = put(tmp_path, hfq_bytes(b"{}", [Stored(b"w", QType.HFQ4G128, (3, 704), bytes(nbytes))]))
    assert HfqFile.open(path).tensors["w"].nbytes == nbytes


def with_field(data: bytes, offset: int, code: str, value: int) -> bytes:
    raw = bytearray(data)
    struct.pack_into(code, raw, offset, value)
    return bytes(raw)


GOOD = hfq_bytes(b"{}", [Stored(b"w", F32, (2,), b"12345678")])


@pytest.mark.parametrize(
    ("data", "field", "offset", "words"),
    [
        (b"", "header", 0, "0 bytes"),
        (GOOD[:31], "header", 0, "31 bytes"),
        (b"HFQX" + GOOD[4:], "magic", 0, "no HFQM container"),
        (with_field(GOOD, 12, "<I", 2**32 - 1), "index.n_tensors", 34, "in the header"),
        (with_field(GOOD, 16, "<Q", 31), "metadata_offset", 16, "outside"),
        (with_field(GOOD, 16, "<Q", 2**64 - 1), "metadata_offset", 16, "outside"),
        (with_field(GOOD, 24, "<Q", 4097), "data_offset", 24, "multiple of 4096"),
        (with_field(GOOD, 24, "<Q", 0), "data_offset", 24, "before the metadata"),
        (with_field(GOOD, 24, "<Q", 8192), "data_offset", 24, "behind the end"),
        (with_field(GOOD, 24, "<Q", 2**63), "data_offset", 24, "behind the end"),
        (with_field(with_field(GOOD, 12, "<I", 10**6), 34, "<I", 10**6), "index.n_tensors", 34, "do not fit"),
        (with_field(with_field(GOOD, 12, "<I", 2), 34, "<I", 2), "index[1].name", 59, "empty"),
        (with_field(GOOD, 38, "<H", 0xFFFF), "index[0].name", 40, "runs into data_offset"),
        (with_field(GOOD, 38, "<H", 0), "index[0].name", 38, "empty"),
        (with_field(GOOD, 40, "<B", 0xFF), "index[0].name", 38, "UTF-8"),
        (with_field(GOOD, 43, "<I", 3), "index[0].data_size", 38, "takes 12 bytes, not 8"),
        (with_field(GOOD, 51, "<Q", 2**64 - 1), "index[0].data_size", 38, "not 18446744073709551615"),
        (GOOD[:-1], "index[0].data_size", 38, "leave the file"),
        (hfq_bytes(b"[]", []), "metadata", 32, "not a JSON object"),
        (hfq_bytes(b'{"config":3}', []), "metadata.config", None, "must be a JSON object"),
        (
            hfq_bytes(b"{}", [Stored(b"w", 99, (2**32 - 1,) * 255, b"")]),
            "index[0].data_size",
            38,
            "more than 2\\^63",
        ),
        (hfq_bytes(b"{}", [Stored(b"w" * 4060, F32, (1,) * 255, b"1234")])[:4096], None, None, "byte"),
    ],
)
def test_damage_is_named_by_field_and_offset(
    tmp_path: Path, data: bytes, field: str | None, offset: int | None, words: str
) -> None:
    path = put(tmp_path, data)
    with pytest.raises(ArtifactError, match=words) as caught:
        HfqFile.open(path)
    if field is not None:
        assert (caught.value.field, caught.value.offset) == (field, offset)
    assert str(path) in caught.value.line()
    assert "\n" not in caught.value.line()


def test_text_assets_of_a_hugging_face_model(tmp_path: Path) -> None:
    metadata = {
        "config": {"eos_token_id": 7},
        "tokenizer": '{"model": "ü"}',
        "tokenizer_config": {"bos_token": "<s>", "chat_template": "{{ messages }}"},
        "generation_config": {"temperature": 0.5},
    }
    assets = HfqFile.open(put(tmp_path, hfq_bytes(json.dumps(metadata).encode(), []))).text_assets()
    assert assets.tokenizer_json == '{"model": "ü"}'
    assert assets.tokenizer_config["bos_token"] == "<s>"
    assert assets.generation_config == {"temperature": 0.5}
    assert assets.model_config == {"eos_token_id": 7}
    assert assets.chat_templates == {"default": "{{ messages }}"}
    assert assets.gguf is None


def test_text_assets_of_a_gguf_import(tmp_path: Path) -> None:
    meta = {
        "general.name": "x",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.chat_template": "one",
        "tokenizer.chat_template.tool_use": "two",
        "tokenizer.chat_templates": ["tool_use"],
    }
    raw = json.dumps({"tokenizer": "{}", "tokenizer_config": None, "gguf_meta": meta}).encode()
    assets = HfqFile.open(put(tmp_path, hfq_bytes(raw, []))).text_assets()
    assert assets.tokenizer_json is None
    assert assets.gguf == {"tokenizer.ggml.tokens": ["a", "b"]}
    assert assets.chat_templates == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"tokenizer": 3}, "metadata.tokenizer"),
        ({"tokenizer_config": []}, "metadata.tokenizer_config"),
        ({"generation_config": "x"}, "metadata.generation_config"),
        ({"gguf_meta": 1}, "metadata.gguf_meta"),
        ({"tokenizer_config": {"chat_template": 5}}, "metadata.tokenizer_config.chat_template"),
        ({"tokenizer_config": {"chat_template": [{"name": "a"}]}}, "metadata.tokenizer_config.chat_template"),
        ({"gguf_meta": {"tokenizer.chat_template": 5}}, "tokenizer.chat_template"),
    ],
)
def test_text_assets_of_wrong_types(tmp_path: Path, metadata: dict[str, object], field: str) -> None:
    model = HfqFile.open(put(tmp_path, hfq_bytes(json.dumps(metadata).encode(), [])))
    with pytest.raises(ArtifactError) as caught:
        model.text_assets()
    assert caught.value.field == field


def test_named_templates_of_a_tokenizer_config(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    raw = json.dumps({"tokenizer_config": {"chat_template": listed}}).encode()
    assets = HfqFile.open(put(tmp_path, hfq_bytes(raw, []))).text_assets()
    assert assets.chat_templates == {"default": "d", "rag": "r"}


def test_thirty_megabytes_of_metadata_open_quickly_and_without_copies_to_spare(tmp_path: Path) -> None:
    tokenizer = '{"tok": 1, "é": "\\n"},' * 1_300_000
    raw = json.dumps({"tokenizer": tokenizer, "z": 1}, ensure_ascii=False).encode()
    assert len(raw) > 30_000_000
    path = put(tmp_path, hfq_bytes(raw, [Stored(b"w", F32, (1,), b"1234")]))
    with bounded(seconds=5, nbytes=4 * len(raw)):
        model = HfqFile.open(path)
    assert model.text_assets().tokenizer_json == tokenizer
    assert bytes(model.raw("w")) == b"1234"


def sparse(folder: Path, nbytes: int) -> Path:
    """Return a container with one F32 tensor of `nbytes` that takes no room on the disk."""
    head = hfq_bytes(b"{}", [Stored(b"w", F32, (1, nbytes // 4), b"")])
    at = head.index(b"w\x02\x02") + 3 + 8 + 4
    path = put(folder, with_field(head, at, "<Q", nbytes))
    os.truncate(path, len(head) + nbytes)
    return path


def test_reading_a_large_file_needs_little_memory(tmp_path: Path) -> None:
    path = sparse(tmp_path, 200 * 2**20)
    with bounded(seconds=10, nbytes=100_000):
        model = HfqFile.open(path)
        view = model.raw("w")
        assert view.nbytes == 200 * 2**20
        assert max(view[:: 2**20]) == 0
        model.release("w")


def resident_file_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile line")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_gives_resident_pages_back(tmp_path: Path) -> None:
    model = HfqFile.open(sparse(tmp_path, 64 * 2**20))
    before = resident_file_bytes()
    view = model.raw("w")
    assert max(view[::4096]) == 0
    touched = resident_file_bytes()
    assert touched - before > 56 * 2**20
    model.release("w")
    assert resident_file_bytes() - before < 8 * 2**20
    assert view[-1] == 0


def test_a_file_that_shrinks_or_changes_is_refused_at_the_next_view(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD)
    model = HfqFile.open(path)
    os.truncate(path, 4096)
    with pytest.raises(ArtifactError, match="changed while in use \\(4104 bytes when opened, 4096 now\\)"):
        model.raw("w")
    path = put(tmp_path, GOOD, "other.hfq")
    model = HfqFile.open(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ArtifactError, match="changed while in use"):
        model.raw("w")


def test_views_outlive_close_and_a_closed_file_hands_out_no_more(tmp_path: Path) -> None:
    model = HfqFile.open(put(tmp_path, GOOD))
    view = model.raw("w")
    model.close()
    model.close()
    assert bytes(view) == b"12345678"
    with pytest.raises(InternalError, match="closed"):
        model.raw("w")
    model.release("w")
