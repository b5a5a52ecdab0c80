"""Reading single GGUF files: made by the reference writer, and by hand with every field wrong in turn."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_samples import (
    Ggml,
    array,
    bounded,
    gguf_bytes,
    string,
    text,
    typed,
    u16,
    u32,
)

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import BLOCKS, GGML_NAMES, GGUF_BASE, qtype_name
from hipfire.checkpoint import gguf_values
from hipfire.checkpoint.ggml_types import GGML_BLOCKS, RETIRED
from hipfire.checkpoint.gguf import GgufFile

W = Ggml("w", (4, 2), 0, bytes(range(32)))


def put(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_block_sizes_match_the_reference_package_and_the_format_table() -> None:
    for kind, (elements, nbytes) in gguf.GGML_QUANT_SIZES.items():
        # the package counts two float32 in Q8_1, a type that is never stored; the blocks hold two float16
        if kind != gguf.GGMLQuantizationType.Q8_1:
            assert GGML_BLOCKS[int(kind)] == (kind.name, elements, nbytes)
    for qtype, block in BLOCKS.items():
        if qtype >= GGUF_BASE:
            assert GGML_BLOCKS[qtype - GGUF_BASE][1:] == (block.elements, block.nbytes)
    assert not set(RETIRED) & set(GGML_BLOCKS)
    assert set(GGML_NAMES) == set(GGML_BLOCKS)
    assert [qtype_name(GGUF_BASE + kind) for kind in (2, 10, 23)] == ["GGUF_Q4_0", "GGUF_Q2_K", "GGUF_IQ4_XS"]
    assert qtype_name(GGUF_BASE + 999) == f"qtype {GGUF_BASE + 999}"


def test_file_of_the_reference_writer(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    path = tmp_path / "ref.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_key_value("u8", 255, gguf.GGUFValueType.UINT8)
    writer.add_key_value("i8", -128, gguf.GGUFValueType.INT8)
    writer.add_key_value("u16", 65535, gguf.GGUFValueType.UINT16)
    writer.add_key_value("i16", -32768, gguf.GGUFValueType.INT16)
    writer.add_key_value("u32", 2**32 - 1, gguf.GGUFValueType.UINT32)
    writer.add_key_value("i32", -(2**31), gguf.GGUFValueType.INT32)
    writer.add_key_value("f32", 0.1, gguf.GGUFValueType.FLOAT32)
    writer.add_key_value("yes", True, gguf.GGUFValueType.BOOL)
    writer.add_key_value("no", False, gguf.GGUFValueType.BOOL)
    writer.add_key_value("u64", 2**64 - 1, gguf.GGUFValueType.UINT64)
    writer.add_key_value("i64", -(2**63), gguf.GGUFValueType.INT64)
    writer.add_key_value("f64", 0.1, gguf.GGUFValueType.FLOAT64)
    writer.add_string("text", "ü🔥")
    writer.add_array("heads", [8, 4, 8])
    writer.add_array("flags", [True, False])
    writer.add_array("names", ["", "a", "模型"])
    writer.add_array("nested", [[1, 2], [3]])
    weights = {
        "a.weight": rng.standard_normal((3, 40)).astype(np.float32),
        "b.weight": rng.standard_normal((5, 7, 2)).astype(np.float16),
        "c": rng.standard_normal(11).astype(np.float32),
    }
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    blocks = gguf.quants.quantize(
        rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0
    )
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GgufFile.open(path) as model:
        keys = dict(model.model_config)
        assert keys.pop("f32") == np.float32(0.1)
        assert keys == {
            "general.architecture": "llama",
            "general.alignment": 64,
            "u8": 255,
            "i8": -128,
            "u16": 65535,
            "i16": -32768,
            "u32": 2**32 - 1,
            "i32": -(2**31),
            "yes": True,
            "no": False,
            "u64": 2**64 - 1,
            "i64": -(2**63),
            "f64": 0.1,
            "text": "ü🔥",
            "heads": [8, 4, 8],
            "flags": [True, False],
            "names": ["", "a", "模型"],
            "nested": [[1, 2], [3]],
        }
        assert keys["yes"] is True
        assert keys["flags"][1] is False
        for name, weight in weights.items():
            assert model.tensors[name].shape == weight.shape
            assert bytes(model.raw(name)) == weight.tobytes()
        info = model.tensors["q"]
        assert (info.shape, info.qtype, info.nbytes, info.group_size) == ((4, 64), GGUF_BASE + 2, 144, 32)
        assert bytes(model.raw("q")) == blocks.tobytes()
        assert (model.kind, model.version, model.files) == ("gguf", 3, (path,))


def test_text_assets(tmp_path: Path) -> None:
    entries = [
        ("general.name", string("x")),
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.tokens", array(8, [text("a"), text("b")])),
        ("tokenizer.chat_template", string("plain")),
        ("tokenizer.chat_templates", array(8, [text("rag")])),
        ("tokenizer.chat_template.rag", string("with documents")),
    ]
    assets = GgufFile.open(put(tmp_path, gguf_bytes(entries))).text_assets()
    assert assets.gguf == {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    assert assets.chat_templates == {"default": "plain", "rag": "with documents"}
    assert assets.tokenizer_json is None
    assert assets.model_config["general.name"] == "x"
    bare = GgufFile.open(put(tmp_path, gguf_bytes([("general.name", string("x"))]), "bare.gguf"))
    assert bare.text_assets().gguf is None


def test_version_2_scalars_empty_tensors_and_gaps_are_read(tmp_path: Path) -> None:
    tensors = [Ggml("scalar", (), 0, b"abcd"), Ggml("empty", (0, 4), 0, b""), Ggml("w", (2,), 0, b"12345678")]
    raw = gguf_bytes([], tensors, version=2, offsets=[0, 32, 32])
    model = GgufFile.open(put(tmp_path, raw))
    assert [info.shape for info in model.tensors.values()] == [(), (4, 0), (2,)]
    assert [bytes(model.raw(name)) for name in model.tensors] == [b"abcd", b"", b"12345678"]
    gap = gguf_bytes([], [W, Ggml("x", (1,), 0, bytes(32) + b"wxyz")], offsets=[0, 64])
    assert bytes(GgufFile.open(put(tmp_path, gap, "gap.gguf")).raw("x")) == b"wxyz"


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian_files_are_named(tmp_path: Path, version: int) -> None:
    raw = b"GGUF" + struct.pack(">IQQ", version, 1, 1) + bytes(100)
    with pytest.raises(UnsupportedError, match="big-endian file"):
        GgufFile.open(put(tmp_path, raw))


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_other_versions_are_named(tmp_path: Path, version: int) -> None:
    with pytest.raises(UnsupportedError, match=f"GGUF version {version}"):
        GgufFile.open(put(tmp_path, gguf_bytes([], version=version)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (u32(0), "0 is not a power of two"),
        (u32(3), "3 is not a power of two"),
        (u32(4), "4 is not a power of two from 8"),
        (u32(2**17), "131072 is not"),
        (u32(2**31), "2147483648 is not"),
        (typed(5, "i", -32), "has type INT32"),
        (typed(10, "Q", 2**40), "has type UINT64"),
        (string("32"), "has type STRING"),
    ],
)
def test_bad_alignment(tmp_path: Path, value: bytes, words: str) -> None:
    with pytest.raises(ArtifactError, match=words) as caught:
        GgufFile.open(put(tmp_path, gguf_bytes([("general.alignment", value)], [W])))
    assert caught.value.field == "general.alignment"


@pytest.mark.parametrize("alignment", [8, 32, 4096, 2**16])
def test_good_alignment(tmp_path: Path, alignment: int) -> None:
    raw = gguf_bytes([("general.alignment", u32(alignment))], [W, W._replace(name="x")], alignment=alignment)
    model = GgufFile.open(put(tmp_path, raw))
    assert bytes(model.raw("w")) == bytes(model.raw("x")) == W.data


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("a", u32(1)), ("", u32(1))], "key of entry 1: at byte 41: is empty"),
        ([("k" * 65536, u32(1))], "key of entry 0: at byte 24: is 65536 bytes long"),
        ([("a", u32(1)), ("b", u32(1)), ("a", u32(2))], "key of entry 2: .*repeats 'a'"),
        ([(b"\xff", u32(1))], "key of entry 0: .*not UTF-8"),
        ([("odd", struct.pack("<I", 13))], r"entry 0 \(odd\): .*unknown value type 13"),
        ([("odd", array(77, []))], r"entry 0 \(odd\)\[\]: .*unknown value type 77"),
        ([("deep", array(9, []))], "nothing"),
        ([("flag", typed(7, "B", 2))], "neither 0 nor 1"),
        ([("text", struct.pack("<IQ", 8, 2**63))], "left"),
        ([("text", struct.pack("<I", 8) + text(b"\xc3"))], "not UTF-8"),
        ([("list", array(8, [text(b"ok"), text(b"\xc3")]))], "string 1 is not UTF-8"),
        ([("list", struct.pack("<IIQ", 9, 4, 2**63))], "allowed are"),
        ([("list", struct.pack("<IIQ", 9, 4, 1000))], "claims 1000 x 4 bytes"),
        (
            [("list", struct.pack("<IIQ", 9, 8, 2) + text("a") + struct.pack("<Q", 2**60))],
            "string 1 is longer",
        ),
        ([("list", struct.pack("<IIQ", 9, 9, 2**20))], "claims 1048576 x 12 bytes"),
        ([("deep", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + bytes(12))], "deeper than 8"),
    ],
)
def test_bad_entries(tmp_path: Path, entries: list[tuple[str | bytes, bytes]], words: str) -> None:
    path = put(tmp_path, gguf_bytes(entries))
    if words == "nothing":
        assert GgufFile.open(path).model_config == {"deep": []}
        return
    with bounded(seconds=2, nbytes=2**20), pytest.raises(ArtifactError, match=words):
        GgufFile.open(path)


def test_arrays_of_one_file_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_values, "MAX_TOTAL_ENTRIES", 5)
    nested = array(9, [struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)])
    path = put(tmp_path, gguf_bytes([("a", array(4, [struct.pack("<I", 1)] * 3)), ("b", nested)]))
    assert GgufFile.open(path).model_config == {"a": [1, 1, 1], "b": [[7]]}
    entries = [("a", array(4, [struct.pack("<I", 1)] * 3)), ("b", nested), ("c", array(8, [text("x")]))]
    with pytest.raises(ArtifactError, match=r"entry 2 \(c\): .*more than 5 entries together"):
        GgufFile.open(put(tmp_path, gguf_bytes(entries)))


def test_keys_after_a_nested_array_are_read_from_the_right_place(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 8, 2) + text("x") + text("yz")
    numbers = struct.pack("<IQ3H", 2, 3, 1, 2, 3)
    entries = [("nested", array(9, [inner, numbers])), ("after", u16(7))]
    model = GgufFile.open(put(tmp_path, gguf_bytes(entries, [W])))
    assert model.model_config == {"nested": [["x", "yz"], [1, 2, 3]], "after": 7}
    assert bytes(model.raw("w")) == W.data


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ([W, W], {}, "tensor 1: .*'w' occurs twice"),
        ([W._replace(name="")], {}, "name of tensor 0: .*empty"),
        ([W._replace(dims=(1,) * 5)], {}, "5 dimensions"),
        ([W._replace(dims=(2**32, 2**32))], {}, "more than 2\\^63"),
        ([W._replace(kind=2, dims=(33, 1))], {}, "33 are no whole Q4_0 blocks"),
        ([W._replace(kind=12, dims=(128, 4))], {}, "128 are no whole Q4_K blocks"),
        ([W._replace(dims=(9,))], {}, "up to .* but the file ends"),
        ([W], {"offsets": [2**63]}, "the file ends"),
        ([W], {"offsets": [1]}, "offset 1 is not a multiple of the alignment 32"),
        ([W, W._replace(name="x")], {"offsets": [0, 0]}, "offset 0 overlaps .* ends at 32"),
        ([W, W._replace(name="x")], {"offsets": [32, 0]}, "overlaps"),
        ([W], {"counts": (2**64 - 1, 0)}, "tensor_count"),
        ([W], {"counts": (2, 0)}, "tensor 1"),
        ([W], {"counts": (1, 2**63)}, "metadata_kv_count"),
    ],
)
def test_bad_tensors(tmp_path: Path, tensors: list[Ggml], options: dict[str, object], words: str) -> None:
    path = put(tmp_path, gguf_bytes([], tensors, **options))  # type: ignore[arg-type]
    with bounded(seconds=2, nbytes=2**20), pytest.raises(ArtifactError, match=words):
        GgufFile.open(path)


@pytest.mark.parametrize(("kind", "words"), [(4, "Q4_2, retired"), (31, "Q4_0_4_4"), (200, "200 .unknown")])
def test_unknown_tensor_types_are_named(tmp_path: Path, kind: int, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        GgufFile.open(put(tmp_path, gguf_bytes([], [W._replace(kind=kind)])))
    assert "(w)" in caught.value.line()


def test_a_vocabulary_of_a_quarter_million_tokens_opens_quickly(tmp_path: Path) -> None:
    tokens = [f"▁token{n}" for n in range(262_144)]
    entries = [
        ("tokenizer.ggml.tokens", array(8, [text(token) for token in tokens])),
        ("tokenizer.ggml.scores", struct.pack("<IIQ262144f", 9, 6, 262_144, *range(262_144))),
    ]
    path = put(tmp_path, gguf_bytes(entries, [W]))
    start = time.process_time()
    model = GgufFile.open(path)
    assert time.process_time() - start < 2.0
    assert model.model_config["tokenizer.ggml.tokens"] == tokens
    assert model.model_config["tokenizer.ggml.scores"] == list(range(262_144))
