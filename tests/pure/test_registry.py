"""The bundled registry is sound, and a registry file is validated strictly."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.checkpoint.registry import HfSource, PypiSource, Registry, load_registry, parse_registry

DIGEST = "a" * 64
CARD: dict[str, Any] = {
    "file": "tiny.gguf", "size_bytes": 10, "sha256": DIGEST, "family": "llama", "arch_id": 0, "quant": "Q4_1",
    "min_memory_gb": 1, "desc": "tiny", "license": "MIT", "recommended_settings": {"temperature": 0.5},
    "sources": [{"kind": "hf", "repo": "me/tiny", "file": "tiny.gguf"}],
}  # fmt: skip
PACKAGE = {"name": "tiny", "version": "1.0", "member": "a/m", "sha256": DIGEST, "size": 10}


def document(**changes: Any) -> dict[str, Any]:
    card = copy.deepcopy(CARD) | changes
    return {"schema_version": 1, "models": {"tiny:1m": card}, "aliases": {"tiny": "tiny:1m"}}


def parse(value: Any) -> Registry:
    return parse_registry(json.dumps(value), source="test.json")


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.delenv("HIPFIRE_REGISTRY_FILE", raising=False)
    return load_registry()


def test_bundled_cards_are_consistent(bundled: Registry) -> None:
    assert {"smollm2:135m", "gemma3:270m", "qwen3.5:9b", "qwen3.6:35b-a3b-mq2"} <= set(bundled.models)
    for card in bundled.models.values():
        assert card.sources
        for source in card.sources:
            if isinstance(source, PypiSource):
                assert sum(package.size for package in source.packages) == card.size_bytes
                assert len({package.member for package in source.packages}) == len(source.packages)
            else:
                assert source.file.rsplit("/", 1)[-1] == card.file
        if any(isinstance(source, PypiSource) and len(source.packages) == 1 for source in card.sources):
            assert card.sources[0].packages[0].sha256 == card.sha256
    assert len({card.file.lower() for card in bundled.models.values()}) == len(bundled.models)
    assert all(alias not in bundled.models for alias in bundled.aliases)


def test_bundled_file_holds_no_address() -> None:
    text = resources.files("hipfire.checkpoint").joinpath("registry.json").read_text(encoding="utf-8")
    assert "://" not in text


def test_gemma_shows_its_terms(bundled: Registry) -> None:
    assert "Gemma Terms of Use" in bundled.models["gemma3:270m"].terms


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("smollm2:135m", "smollm2:135m"), ("smollm2", "smollm2:135m"), ("smollm2:latest", "smollm2:135m"),
        ("SmolLM2:135M", "smollm2:135m"), ("gemma3", "gemma3:270m"), ("qwen3.5", "qwen3.5:9b"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma3:270m"), ("QWEN3.5-0.8B.mq4", "qwen3.5:0.8b"),
    ],
)  # fmt: skip
def test_resolution(bundled: Registry, name: str, tag: str) -> None:
    card = bundled.resolve(name)
    assert card is not None
    assert card.tag == tag


def test_old_format_spellings_resolve() -> None:
    value = document()
    value["models"]["tiny:1m-hf4"] = copy.deepcopy(CARD) | {"file": "tiny-1m.hf4"}
    registry = parse(value)
    assert [registry.require(name).tag for name in ("tiny:1m-hfq4", "TINY:1M-HFQ4")] == ["tiny:1m-hf4"] * 2
    assert registry.require("tiny-1m.hf4").tag == "tiny:1m-hf4"


def test_unknown_tag_suggests_near_ones(bundled: Registry) -> None:
    with pytest.raises(ValidationError, match="did you mean smollm2"):
        bundled.require("smolm2:135m")
    with pytest.raises(ValidationError, match="hipfire list -r"):
        bundled.require("zzzz")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\\b", "nul", "", "C:x"])
def test_unsafe_names_are_refused_before_a_suggestion(bundled: Registry, name: str) -> None:
    with pytest.raises(ValidationError, match="refused"):
        bundled.require(name)


def test_settings_and_profiles(bundled: Registry) -> None:
    card = bundled.models["qwen3.5:9b"]
    assert card.settings()["generation.temperature"] == 1.0
    assert set(card.sampling_profiles) == {"general", "coding", "instruct"}
    assert card.sampling_profiles["coding"]["generation.temperature"] == 0.6
    assert parse(document(default_kv_mode="q8")).models["tiny:1m"].settings()["memory.kv_cache"] == "q8"


def test_digest_prefix_matches_only_its_own(bundled: Registry) -> None:
    card = bundled.models["qwen3.5:0.8b"]
    assert card.sha256 is None
    assert card.sha256_prefix == "aedfe31b"
    assert card.digest_matches("aedfe31b" + "0" * 56)
    assert not card.digest_matches("bedfe31b" + "0" * 56)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"file": "../x"}, "file"),
        ({"file": "nul"}, "file"),
        ({"sha256": "A" * 64}, "sha256"),
        ({"sha256": None}, "sha256"),
        ({"sha256_prefix": "aaaaaaaa"}, "sha256"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"size_bytes": True}, "size_bytes"),
        ({"size_bytes": "1"}, "size_bytes"),
        ({"arch_id": 256}, "arch_id"),
        ({"family": "../evil"}, "family"),
        ({"min_memory_gb": -1}, "min_memory_gb"),
        ({"sources": []}, "sources"),
        ({"sources": [{"kind": "ftp"}]}, "kind"),
        ({"sources": [1]}, "sources"),
        ({"sources": [{"kind": "hf", "repo": "no-owner", "file": "f"}]}, "repo"),
        ({"sources": [{"kind": "hf", "repo": "a/b", "file": "f", "extra": 1}]}, "extra"),
        *(
            ({"sources": [{"kind": "hf", "repo": "a/b", "file": path}]}, "file")
            for path in ("/etc/x", "../x", "a/../b", "a//b", "a\\b", "C:/x", "", "a/\x1b")
        ),
        ({"sources": [{"kind": "hf", "repo": "a/b", "file": "f", "revision": "../x"}]}, "revision"),
        ({"sources": [{"kind": "pypi", "packages": [PACKAGE | {"member": "../m"}]}]}, "member"),
        ({"sources": [{"kind": "pypi", "packages": [PACKAGE | {"member": "/m"}]}]}, "member"),
        ({"recommended_settings": {"temperature": 9}}, "settings"),
        ({"recommended_settings": {"threads": 1}}, "settings"),
        ({"recommended_settings": {"magic": 1}}, "settings"),
        ({"default_kv_mode": "q1"}, "default_kv_mode"),
        ({"sampling_profiles": {"x": 1}}, "settings"),
        ({"desc": 5}, "desc"),
    ],
)
def test_bad_cards_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ArtifactError, match=rf"test\.json.*{field}"):
        parse(document(**changes))


@pytest.mark.parametrize("name", ["-r", "--index-url", "a b", "x;y", "../x", ""])
def test_package_names_cannot_become_options(name: str) -> None:
    package = {"name": name, "version": "1.0", "member": "m", "sha256": DIGEST, "size": 1}
    with pytest.raises(ArtifactError, match="name"):
        parse(document(sources=[{"kind": "pypi", "packages": [package]}]))


def test_missing_field_dangling_alias_and_version_are_errors() -> None:
    value = document()
    del value["models"]["tiny:1m"]["quant"]
    with pytest.raises(ArtifactError, match=r"quant: missing"):
        parse(value)
    with pytest.raises(ArtifactError, match=r"aliases\.gone"):
        parse(document() | {"aliases": {"gone": "nowhere:1b"}})
    with pytest.raises(ArtifactError, match="schema_version"):
        parse(document() | {"schema_version": 2})
    with pytest.raises(ArtifactError, match="not JSON"):
        parse_registry("{", source="test.json")
    with pytest.raises(ArtifactError):
        parse_registry("[" * 100_000, source="test.json")


def test_registry_file_variable_replaces_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document()), encoding="utf-8")
    monkeypatch.setenv("HIPFIRE_REGISTRY_FILE", str(path))
    registry = load_registry()
    assert list(registry.models) == ["tiny:1m"]
    assert registry.source == str(path)
    assert registry.models["tiny:1m"].sources == (HfSource("me/tiny", "tiny.gguf"),)
    monkeypatch.setenv("HIPFIRE_REGISTRY_FILE", str(tmp_path / "gone.json"))
    with pytest.raises(ArtifactError, match=r"gone\.json"):
        load_registry()


def test_paths_of_several_parts_are_kept() -> None:
    hub = {"kind": "hf", "repo": "a/b", "file": "sub/f.gguf", "revision": "refs/pr/1"}
    card = parse(document(sources=[hub, {"kind": "pypi", "packages": [PACKAGE]}])).models["tiny:1m"]
    assert card.sources[0] == HfSource("a/b", "sub/f.gguf", "refs/pr/1")
    assert isinstance(card.sources[1], PypiSource)
    assert card.sources[1].packages[0].member == "a/m"
