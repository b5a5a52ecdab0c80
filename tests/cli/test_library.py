"""Which file a name means."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import card, registry_text

from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import Library, find_model, split_format
from hipfire.checkpoint.registry import parse_registry

SOURCE = [{"kind": "hf", "repo": "a/b", "file": "x"}]
REGISTRY = parse_registry(
    registry_text(
        {"tiny:1m": card("Tiny-1M.Q4_1.gguf", b"x", SOURCE), "big:9b": card("big-9b.mq4", b"x", SOURCE)},
        {"tiny": "tiny:1m"},
    ),
    source="test",
)


def make_library(tmp_path: Path, *files: str, aliases: dict[str, Path] | None = None) -> Library:
    models = tmp_path / "models"
    models.mkdir(exist_ok=True)
    for name in files:
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_bytes(b"data")
    return Library(models, REGISTRY, aliases or {})


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tiny:1m", "Tiny-1M.Q4_1.gguf"), ("tiny", "Tiny-1M.Q4_1.gguf"), ("TINY:1M", "Tiny-1M.Q4_1.gguf"),
        ("tiny:1m-hf4", "tiny-1m.hf4"), ("tiny-hf4", "tiny-1m.hf4"), ("tiny:1m-q8", "tiny-1m.q8"),
        ("Tiny-1M.Q4_1.gguf", "Tiny-1M.Q4_1.gguf"), ("tiny-1m.q8", "tiny-1m.q8"), ("own", "own.mq4"),
        ("sub-model", "folder/sub-model.hfq"), ("other", "another.gguf"), ("an.oth_er", "another.gguf"),
    ],
)  # fmt: skip
def test_names(tmp_path: Path, name: str, file: str) -> None:
    library = make_library(
        tmp_path,
        "Tiny-1M.Q4_1.gguf",
        "tiny-1m.hf4",
        "tiny-1m.q8",
        "own.mq4",
        "folder/sub-model.hfq",
        "another.gguf",
    )
    assert library.require(name).path == library.models_dir / file


def test_tag_falls_back_to_its_quantized_file(tmp_path: Path) -> None:
    library = make_library(tmp_path, "tiny-1m.hf4")
    found = library.require("tiny")
    assert found.path.name == "tiny-1m.hf4"
    assert found.name == "tiny:1m-hf4"
    assert found.settings_name == "tiny:1m"
    assert not found.is_registry_file


def test_ambiguous_name_lists_the_candidates(tmp_path: Path) -> None:
    library = make_library(tmp_path, "tiny-1m.hf4", "tiny-1m.q8")
    with pytest.raises(ValidationError, match=r"tiny-1m\.hf4, tiny-1m\.q8"):
        library.find("tiny:1m")
    assert library.require("tiny:1m-q8").path.name == "tiny-1m.q8"


def test_part_of_a_name_counts_only_when_allowed(tmp_path: Path) -> None:
    library = make_library(tmp_path, "another.gguf")
    assert library.find("anoth") is not None
    assert library.find("anoth", fuzzy=False) is None


def test_own_paths_work_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_library(tmp_path)
    odd = tmp_path / "мои модели" / "模型 🔥 é"
    odd.mkdir(parents=True)
    for path in (odd / "a b.gguf", odd / f"{'x' * 200}.gguf"):
        path.write_bytes(b"data")
        assert library.require(str(path)).path == path
    monkeypatch.chdir(odd)
    assert library.require("a b.gguf").path == odd / "a b.gguf"
    assert library.require("./a b.gguf").path == odd / "a b.gguf"
    assert library.require("../模型 🔥 é/a b.gguf").path.samefile(odd / "a b.gguf")
    with pytest.raises(ValidationError, match="no such file"):
        library.require("./gone.gguf")


def test_folder_that_has_the_name_of_a_tag_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = make_library(tmp_path, "Tiny-1M.Q4_1.gguf")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert library.require("tiny").path.name == "Tiny-1M.Q4_1.gguf"


def test_name_in_models_toml_wins_over_the_registry(tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(b"x")
    library = make_library(
        tmp_path, "Tiny-1M.Q4_1.gguf", aliases={"tiny": own, "gone": tmp_path / "gone.gguf"}
    )
    assert library.require("tiny").path == own
    with pytest.raises(ValidationError, match="which is not there"):
        library.require("gone")
    assert [model.name for model in library.scan()] == ["tiny", "tiny:1m"]


@pytest.mark.parametrize("name", ["..", "nul", "a\\b", "x\0", "-x", "", "C:x", "y" * 5000])
def test_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError, match="refused"):
        make_library(tmp_path).require(name)


def test_missing_model_says_how_to_get_it(tmp_path: Path) -> None:
    library = make_library(tmp_path)
    with pytest.raises(ValidationError, match="hipfire pull tiny:1m"):
        library.require("tiny")
    with pytest.raises(ValidationError, match="did you mean tiny"):
        library.require("tinny")


def test_scan_shows_models_only(tmp_path: Path) -> None:
    library = make_library(
        tmp_path, "a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "notes.txt", ".pull/c.gguf",
        "hf/config.json", "hf/model.safetensors", "sub/d.HF4", "a.gguf.manifest.json", "sub/deep/e.gguf",
    )  # fmt: skip
    assert [model.name for model in library.scan()] == ["a", "b-00001-of-00002", "d", "hf"]
    folder = library.require("hf")
    assert folder.format == "safetensors"
    assert folder.nbytes() == 8
    assert Library(tmp_path / "gone", REGISTRY).scan() == []


def test_format_suffix_of_a_name() -> None:
    assert split_format("tiny:1m-HF4") == ("tiny:1m", "hf4")
    assert split_format("tiny:1m") == ("tiny:1m", "")
    assert split_format("qwen3.6:35b-a3b") == ("qwen3.6:35b-a3b", "")


def test_find_model_uses_the_users_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_HOME", str(tmp_path))
    monkeypatch.delenv("HIPFIRE_MODELS_DIR", raising=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"x")
    assert find_model("mine") == tmp_path / "models" / "mine.gguf"
