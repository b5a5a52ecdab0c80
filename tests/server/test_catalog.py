"""Which models a request may name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hipfire.checkpoint.library import Library
from hipfire.checkpoint.registry import Card, HfSource, Registry
from hipfire.server.catalog import Catalog
from hipfire.server.errors import FieldError, NotFoundError

CARD = Card(
    tag="smol:1b",
    file="smol-1b.gguf",
    size_bytes=5,
    sources=(HfSource("", "x"),),
    family="llama",
    arch_id=None,
    quant="q8",
    min_memory_gb=1.0,
    desc="d",
    license="mit",
    sha256="ab" * 32,
)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny.hf4").write_bytes(b"model")
    (folder / "tiny-two.hf4").write_bytes(b"model!")
    aliases = {"mine": tmp_path / "elsewhere.gguf"}
    aliases["mine"].write_bytes(b"alias")
    return Library(folder, Registry({"smol:1b": CARD}, {"smol": "smol:1b"}, "test"), aliases)


def test_names_of_what_is_there(library: Library) -> None:
    catalog = Catalog(library)
    for name, file in {
        "tiny": "tiny.hf4",
        "tiny.hf4": "tiny.hf4",
        "tiny:latest": "tiny.hf4",
        "tiny:two": "tiny-two.hf4",
        "mine": "elsewhere.gguf",
    }.items():
        assert catalog.resolve(name).path.name == file
    assert [entry.id for entry in catalog.entries()] == ["mine", "tiny", "tiny-two"]
    assert {entry.id: entry.size for entry in catalog.entries()} == {"mine": 5, "tiny": 5, "tiny-two": 6}


@pytest.mark.parametrize(
    "name",
    [
        "tin",
        "two",
        "TINY.HF5",
        "../elsewhere.gguf",
        "..",
        "models/tiny.hf4",
        "~/x",
        "..\\tiny.hf4",
        "tiny\0",
        "con",
        "C:tiny",
        "x" * 5000,
        "/etc/passwd",
    ],
)
def test_parts_of_names_and_paths_mean_nothing_and_tell_nothing(
    library: Library, name: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError) as caught:
        Catalog(library).resolve(name)
    assert str(tmp_path) not in caught.value.line()
    assert len(caught.value.line()) < 400


def test_paths_are_taken_only_where_that_is_allowed(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for name in (str(outside), "outside.gguf", str(library.models_dir / "tiny.hf4")):
        with pytest.raises(NotFoundError):
            Catalog(library).resolve(name)
        assert Catalog(library, paths=True).resolve(name).path.exists()


def test_owner_s_model_may_lie_anywhere(library: Library, tmp_path: Path) -> None:
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"x")
    catalog = Catalog(library, own=str(outside))
    for name in (str(outside), "outside"):
        assert catalog.resolve(name).path == outside
    assert "outside" in [entry.id for entry in catalog.entries()]
    with pytest.raises(NotFoundError):
        catalog.resolve(str(tmp_path / "elsewhere.gguf"))


def test_registered_model_that_is_not_installed_has_advice(library: Library) -> None:
    for name in ("smol:1b", "smol"):
        with pytest.raises(NotFoundError, match="hipfire pull smol:1b"):
            Catalog(library).resolve(name)
    (library.models_dir / "smol-1b.gguf").write_bytes(b"12345")
    entry = next(entry for entry in Catalog(library).entries() if entry.id == "smol:1b")
    assert (entry.digest, entry.family) == ("ab" * 32, "llama")


def test_digest_of_a_model_is_that_of_its_record(library: Library) -> None:
    record = {"tag": "t", "file": "f", "source": "s", "sha256": "cd" * 32, "size_bytes": 5}
    record |= {"installed_at": "now", "schema_version": 1}
    (library.models_dir / "tiny.hf4.manifest.json").write_text(json.dumps(record))
    digests = {entry.id: entry.digest for entry in Catalog(library).entries()}
    assert digests == {"mine": "", "tiny": "cd" * 32, "tiny-two": ""}


def test_name_of_several_models_is_refused(library: Library) -> None:
    (library.models_dir / "tiny.gguf").write_bytes(b"x")
    with pytest.raises(FieldError, match="several") as caught:
        Catalog(library).resolve("tiny")
    assert caught.value.param == "model"
