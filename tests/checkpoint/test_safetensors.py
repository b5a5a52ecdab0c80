"""Reading safetensors folders and files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import bounded, entry, safetensors_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.safetensors import SafetensorsModel
from hipfire.checkpoint.safetensors_header import DTYPE_BITS


def folder(root: Path, **files: bytes | str | dict[str, Any]) -> Path:
    """Write a model folder; `__` in a keyword stands for a dot. It has a config.json at any rate."""
    root.mkdir(exist_ok=True)
    for name, content in {"config__json": {"hidden_size": 4}, **files}.items():
        raw = json.dumps(content) if isinstance(content, dict) else content
        data = raw.encode() if isinstance(raw, str) else raw
        (root / name.replace("__", ".")).write_bytes(data)
    return root


def one(name: str, data: bytes) -> bytes:
    return safetensors_bytes({name: entry("F32", [len(data) // 4], 0, len(data))}, data)


def test_file_of_the_reference_writer(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weights = {
        "b": rng.standard_normal((3, 5)).astype(np.float32),
        "a": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "scalar": np.array(1.5, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "also none": np.zeros((4, 0), np.float16),
    }
    root = folder(tmp_path / "m")
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsModel.open(root) as model:
        assert set(model.tensors) == set(weights)
        for name, weight in weights.items():
            qtype = QType.F16 if weight.dtype == np.float16 else QType.F32
            assert model.tensors[name] == TensorInfo(name, qtype, weight.shape, weight.nbytes)
            assert bytes(model.raw(name)) == weight.tobytes()
        assert model.model_config == {"hidden_size": 4}
        assert (model.kind, model.files) == ("safetensors", (root / "model.safetensors",))


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(["F16", "BF16", "F32"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.integers(0, 20),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_of_random_headers(
    tmp_path: Path, layout: dict[str, tuple[str, list[int]]], padding: int
) -> None:
    data = b""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans = {}
    for name, (dtype, shape) in layout.items():
        size = int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype] // 8
        spans[name] = bytes((len(data) + n) % 251 for n in range(size))
        header[name] = entry(dtype, shape, len(data), len(data) + size)
        data += spans[name]
    # the order of the header is not the order of the bytes
    raw = json.dumps(dict(reversed(header.items()))).encode() + b" " * padding
    model = SafetensorsModel.open(folder(tmp_path / "m", w__safetensors=safetensors_bytes(raw, data)))
    assert {name: bytes(model.raw(name)) for name in model.tensors} == spans
    assert {name: list(info.shape) for name, info in model.tensors.items()} == {
        name: shape for name, (_, shape) in layout.items()
    }
    model.close()


BF = entry("BF16", [2], 0, 4)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": BF}, bytes(5), "1 trailing bytes"),
        ({"a": BF}, bytes(3), "ends at byte .* but the file ends"),
        ({"a": BF, "b": entry("BF16", [1], 6, 8)}, bytes(8), "b: starts at byte .* leaves a gap after a"),
        ({"a": entry("BF16", [1], 2, 4)}, bytes(4), "leaves a gap after the header"),
        ({"a": BF, "b": entry("BF16", [2], 2, 6)}, bytes(6), "b: starts at byte .* overlaps a"),
        ({"a": BF, "b": BF}, bytes(4), "overlaps"),
        ({"a": entry("BF16", [3], 0, 4)}, bytes(4), "takes 6 bytes but spans 4"),
        ({"a": entry("BF16", [2], 4, 0)}, bytes(4), "second not smaller"),
        ({"a": entry("BF16", [-2], 0, 4)}, bytes(4), "whole numbers"),
        ({"a": entry("BF16", [2.0], 0, 4)}, bytes(4), "whole numbers"),  # type: ignore[list-item]
        ({"a": entry("BF16", [True], 0, 2)}, bytes(2), "whole numbers"),
        ({"a": entry("BF16", [2**40, 2**40], 0, 4)}, bytes(4), "2\\^63"),
        ({"a": {**BF, "data_offsets": [0, 4, 4]}}, bytes(4), "two whole numbers"),
        ({"a": {**BF, "data_offsets": "04"}}, bytes(4), "two whole numbers"),
        ({"a": {**BF, "extra": 1}}, bytes(4), "an object of dtype, shape and data_offsets"),
        ({"a": {"dtype": "BF16", "shape": [2]}}, bytes(4), "an object of dtype, shape and data_offsets"),
        ({"a": [1]}, bytes(4), "an object of dtype"),
        ({"a": entry("F128", [2], 0, 4)}, bytes(4), "dtype 'F128' is unknown"),
        ({"a": entry("F4", [2, 3], 0, 3)}, bytes(3), "a row of 3 F4 elements"),
        ({"a": {**BF, "dtype": ["BF16"]}}, bytes(4), "is unknown"),
        (b'{"a":1,"a":2}', b"", "duplicate name 'a'"),
        (b'{"a":' + json.dumps(BF).encode() + b"}x", bytes(4), "bad JSON"),
        (b'{"a":"\xff"}', b"", "UTF-8"),
        (b'{"a":' * 50_000, b"", "nests too deep"),
        (b"[]", b"", "not a JSON object"),
        (b"", b"", "too few|only 8 bytes"),
    ],
)
def test_bad_headers_each_have_their_message(
    tmp_path: Path, header: dict[str, object] | bytes, data: bytes, words: str
) -> None:
    root = folder(tmp_path / "m", w__safetensors=safetensors_bytes(header, data))
    with pytest.raises(ArtifactError, match=words) as caught:
        SafetensorsModel.open(root)
    assert str(root / "w.safetensors") in caught.value.line()


@pytest.mark.parametrize("length", [10**6, 2**40, 2**63, 2**64 - 1])
def test_header_lengths_beyond_the_file(tmp_path: Path, length: int) -> None:
    raw = struct.pack("<Q", length) + b"{" + bytes(100)
    with bounded(seconds=1, nbytes=2**20), pytest.raises(ArtifactError, match="header length: claims"):
        SafetensorsModel.open(folder(tmp_path / "m", w__safetensors=raw))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"PK\x03\x04" + bytes(100), "a zip archive"),
        (b"\x80\x02}q\x00" + bytes(100), "a Python pickle"),
        (b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "an HTML page"),
        (b"GGUF" + bytes(100), "a GGUF file"),
        (b"HFQM" + bytes(100), "an HFQM container"),
        (b"", "an empty file"),
    ],
)
def test_files_that_are_something_else_say_what(tmp_path: Path, body: bytes, what: str) -> None:
    with pytest.raises(ArtifactError, match=f"is no safetensors file but {what}") as caught:
        SafetensorsModel.open(folder(tmp_path / "m", model__safetensors=body))
    assert caught.value.hint


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - {"F16", "BF16", "F32"}))
def test_other_element_types_block_only_their_use(tmp_path: Path, dtype: str) -> None:
    size = 8 * DTYPE_BITS[dtype] // 8
    header = {"mask": entry(dtype, [1, 8], 0, size), "w": entry("F32", [1], size, size + 4)}
    root = folder(tmp_path / "m", w__safetensors=safetensors_bytes(header, bytes(size) + b"abcd"))
    model = SafetensorsModel.open(root)
    assert list(model.tensors) == ["w"]
    assert len(model.tensors) == 1
    assert bytes(model.raw("w")) == b"abcd"
    assert model.tensors.refused == {"mask": dtype}
    for use in (model.raw, model.release, model.tensors.get, lambda name: name in model.tensors):
        with pytest.raises(UnsupportedError, match=f"tensor mask has element type {dtype}"):
            use("mask")


def test_only_listed_files_and_tensors_count(tmp_path: Path) -> None:
    first = safetensors_bytes({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 4, 8)}, b"aaaaxxxx")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    root = folder(
        tmp_path / "m",
        model__safetensors__index__json=index,
        one__safetensors=first,
        two__safetensors=one("b", b"bbbb"),
        stray__safetensors=one("a", b"!!!!"),
        broken__safetensors=b"PK\x03\x04",
    )
    model = SafetensorsModel.open(root)
    assert {name: bytes(model.raw(name)) for name in model.tensors} == {"a": b"aaaa", "b": b"bbbb"}
    assert [path.name for path in model.files] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "gone.safetensors"}, r"gone\.safetensors is missing.*the index is stale"),
        ({"a": "one.safetensors", "z": "one.safetensors"}, r"tensor z is not in one\.safetensors.*stale"),
        ({"a": "../one.safetensors"}, "no plain file name"),
        ({"a": "/etc/passwd"}, "no plain file name"),
        ({"a": "x\\one.safetensors"}, "no plain file name"),
        ({"a": ".."}, "no plain file name"),
        ({"a": 3}, "no plain file name"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_bad_indexes(tmp_path: Path, weight_map: object, words: str) -> None:
    root = folder(
        tmp_path / "m",
        model__safetensors__index__json={"weight_map": weight_map},
        one__safetensors=one("a", b"aaaa"),
    )
    with pytest.raises(ArtifactError, match=words):
        SafetensorsModel.open(root)


def test_without_an_index_all_visible_files_are_read_in_order(tmp_path: Path) -> None:
    hidden = {".w.safetensors": b"junk"}
    files = {"b.safetensors": one("y", b"yyyy"), "a.safetensors": one("x", b"xxxx"), **hidden}
    root = folder(tmp_path / "m", **files)
    model = SafetensorsModel.open(root)
    assert list(model.tensors) == ["x", "y"]
    (root / "c.safetensors").write_bytes(one("x", b"!!!!"))
    with pytest.raises(ArtifactError, match=r"c\.safetensors: tensor x is also in a\.safetensors"):
        SafetensorsModel.open(root)


def test_a_single_file_takes_the_configs_beside_it(tmp_path: Path) -> None:
    root = folder(tmp_path / "m", a__safetensors=one("x", b"xxxx"), b__safetensors=one("x", b"yyyy"))
    model = SafetensorsModel.open(root / "b.safetensors")
    assert bytes(model.raw("x")) == b"yyyy"
    assert model.model_config == {"hidden_size": 4}
    assert model.text_assets().model_config == {"hidden_size": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [(None, r"config\.json is missing"), ("[]", "not a JSON object"), ("{", "bad JSON"), (b"\xff", "UTF-8")],
)
def test_bad_configs(tmp_path: Path, config: str | None, words: str) -> None:
    root = folder(tmp_path / "m", a__safetensors=one("x", b"xxxx"))
    (root / "config.json").unlink()
    if config is not None:
        folder(root, config__json=config)
    with pytest.raises(ArtifactError, match=words):
        SafetensorsModel.open(root)


def test_text_assets_and_which_template_wins(tmp_path: Path) -> None:
    root = folder(
        tmp_path / "m",
        a__safetensors=one("x", b"xxxx"),
        config__json='{"limit": [0.0, Infinity]}',
        tokenizer__json='{"raw":  "ü"}',
        tokenizer_config__json={"eos_token": "</s>", "chat_template": "from the config"},
        generation_config__json={"top_k": 5},
    )
    model = SafetensorsModel.open(root)
    assets = model.text_assets()
    assert assets.tokenizer_json == '{"raw":  "ü"}'
    assert assets.generation_config == {"top_k": 5}
    assert assets.chat_templates == {"default": "from the config"}
    assert assets.tokenizer_config == {"eos_token": "</s>", "chat_template": "from the config"}
    folder(root, config__json="{}", chat_template__jinja="from the file")
    assets = model.text_assets()
    assert assets.chat_templates == {"default": "from the file"}
    assert assets.tokenizer_config["chat_template"] == "from the file"
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    assets = model.text_assets()
    assert assets.chat_templates == {"default": "from the file", "rag": "with documents"}
    assert assets.tokenizer_config["chat_template"] == [
        {"name": "default", "template": "from the file"},
        {"name": "rag", "template": "with documents"},
    ]


def test_a_bare_folder_has_empty_assets_and_bad_ones_are_named(tmp_path: Path) -> None:
    root = folder(tmp_path / "m", a__safetensors=one("x", b"xxxx"))
    assets = SafetensorsModel.open(root).text_assets()
    assert (assets.tokenizer_json, assets.tokenizer_config, assets.generation_config) == (None, {}, {})
    assert assets.chat_templates == {}
    folder(root, tokenizer__json=b"\xff")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: .*UTF-8"):
        SafetensorsModel.open(root).text_assets()
    folder(root, tokenizer__json="{}", generation_config__json="3")
    with pytest.raises(ArtifactError, match=r"generation_config\.json: .*not a JSON object"):
        SafetensorsModel.open(root).text_assets()
