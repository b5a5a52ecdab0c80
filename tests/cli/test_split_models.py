"""A GGUF model in several files is one model for `list`, `rm` and `verify`."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import registry_text

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.library import Library, manifest_path
from hipfire.checkpoint.partial import sha256_file
from hipfire.checkpoint.records import verify, write_manifest
from hipfire.checkpoint.registry import parse_registry
from hipfire.cli.main import main

NAMES = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def models(home: Path) -> Path:
    """Return a models folder with a set of three files of 1, 2 and 3 bytes, and the first of another set."""
    folder = home / "models"
    folder.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(b"x" * (number + 1))
    (folder / "m-00001-of-00002.gguf").write_bytes(b"other")
    return folder


def library(folder: Path) -> Library:
    return Library(folder, parse_registry(registry_text({}), source="test"), {"mine": folder / NAMES[2]})


@pytest.mark.parametrize("name", [*NAMES, NAMES[1].removesuffix(".gguf"), "mine"])
def test_any_name_means_the_whole_set(models: Path, name: str) -> None:
    found = library(models).find(name, fuzzy=False)
    assert found is not None
    assert found.path == models / NAMES[0]
    assert [path.name for path in found.parts()] == NAMES
    assert found.nbytes() == 6
    by_path = library(models).require(str(models / NAMES[1]))
    assert by_path.path == models / NAMES[0]


def test_a_set_is_listed_once_also_without_its_first_file(models: Path) -> None:
    listed = library(models).scan()
    assert [(model.path.name, model.nbytes()) for model in listed] == [
        ("m-00001-of-00002.gguf", 5), (NAMES[0], 6),
    ]  # fmt: skip
    (models / NAMES[0]).unlink()
    assert [model.nbytes() for model in library(models).scan()] == [5, 5]


def test_rm_removes_the_whole_set(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(models / NAMES[1], tag="t", source="s", sha256="0" * 64)
    assert main(["rm", NAMES[1], "-y"]) == 0
    assert "removed 4 file(s)" in capsys.readouterr().err
    assert [path.name for path in models.iterdir()] == ["m-00001-of-00002.gguf"]


def test_verify_hashes_every_file(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=NAMES[0]):
        verify(library(models).require("mine"))
    digests = {name: sha256_file(models / name) for name in NAMES}
    for name, digest in digests.items():
        write_manifest(models / name, tag="t", source="s", sha256=digest)
    assert main(["verify", NAMES[2]]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name} ok sha256 {digests[name]}" for name in NAMES]
    (models / NAMES[2]).write_bytes(b"xxy")
    with pytest.raises(ArtifactError, match=NAMES[2]):
        verify(library(models).require("mine"))
    (models / NAMES[1]).unlink()
    manifest_path(models / NAMES[1]).unlink()
    with pytest.raises(ArtifactError, match=f"{NAMES[1]} is missing"):
        verify(library(models).require("mine"))
