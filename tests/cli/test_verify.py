"""An installed model is what it was, or `verify` says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recording import make_transfer
from samples import (
    BODY,
    card,
    chunked,
    package,
    registry_text,
    sha256,
)

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.install import install
from hipfire.checkpoint.library import Library, manifest_path
from hipfire.checkpoint.records import verify
from hipfire.checkpoint.registry import parse_registry


def installed(tmp_path: Path) -> tuple[Library, Path]:
    model, resolver = chunked(tmp_path)
    path = install(model, tmp_path / "models", make_transfer()[0], resolver=resolver).path
    return Library(tmp_path / "models", parse_registry(registry_text({}), source="x")), path


def test_verify_finds_a_flipped_byte_and_a_cut_file(tmp_path: Path) -> None:
    library, path = installed(tmp_path)
    model = library.require("tiny.gguf")
    assert verify(model) == {path: sha256(BODY)}
    path.write_bytes(BODY[:5] + b"\0" + BODY[6:])
    with pytest.raises(ArtifactError, match=f"expected {sha256(BODY)}"):
        verify(model)
    path.write_bytes(BODY[:5])
    with pytest.raises(ArtifactError, match="has 5 bytes instead of 300000"):
        verify(model)


def test_registry_digest_beats_a_forged_record(tmp_path: Path) -> None:
    model, resolver = chunked(tmp_path)
    path = install(model, tmp_path / "models", make_transfer()[0], resolver=resolver).path
    forged = BODY[::-1]
    path.write_bytes(forged)
    record = json.loads(manifest_path(path).read_text(encoding="utf-8")) | {"sha256": sha256(forged)}
    manifest_path(path).write_text(json.dumps(record), encoding="utf-8")
    packages = [package("tiny", "m", BODY)]
    registry = parse_registry(
        registry_text({"tiny:1m": card("tiny.gguf", BODY, [{"kind": "pypi", "packages": packages}])}),
        source="x",
    )
    with pytest.raises(ArtifactError, match=r"pull tiny:1m --force"):
        verify(Library(tmp_path / "models", registry).require("tiny:1m"))


def test_model_without_record_cannot_be_verified(tmp_path: Path) -> None:
    library, path = installed(tmp_path)
    manifest_path(path).write_text("not json", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="nothing to compare"):
        verify(library.require("tiny.gguf"))
