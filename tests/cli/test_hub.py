"""Models from a hub: its cache, its refusals, and files whose digest is known in part only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_server import Behaviour, serving
from recording import make_transfer
from samples import (
    BODY,
    FolderResolver,
    card,
    make_wheel,
    one_card,
    package,
    sha256,
)

from hipfire.base.errors import ArtifactError, TransportError, UnsupportedError
from hipfire.checkpoint.install import install
from hipfire.checkpoint.records import read_manifest
from hipfire.checkpoint.registry import Card


def hub_card(**changes: Any) -> Card:
    source = {"kind": "hf", "repo": "me/tiny", "file": "tiny.mq4"}
    return one_card(card("tiny.mq4", BODY, [source], **changes))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the hub client's cache at an empty folder, and clear what the environment says."""
    from huggingface_hub import constants  # noqa: PLC0415 - the client reads its environment once, at import

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HIPFIRE_HF_BASE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


def test_hub_file_is_fetched_with_the_token(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Behaviour(BODY, drop_after=200_000)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving(plan) as base:
        monkeypatch.setenv("HIPFIRE_HF_BASE", base)
        done = install(hub_card(), tmp_path / "models", make_transfer()[0])
    assert done.path.read_bytes() == BODY
    assert plan.requests[0]["path"] == "/me/tiny/resolve/main/tiny.mq4"
    assert plan.requests[0]["authorization"] == "Bearer secret"
    assert len(plan.requests) == 2


def test_digest_prefix_and_size_are_checked(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = sha256(BODY)[:8]
    with serving(Behaviour(BODY)) as base:
        monkeypatch.setenv("HIPFIRE_HF_BASE", base)
        good = hub_card(sha256=None, sha256_prefix=prefix)
        assert install(good, tmp_path / "a", make_transfer()[0]).sha256 == sha256(BODY)
        bad = hub_card(sha256=None, sha256_prefix="00000000")
        with pytest.raises(ArtifactError, match=r"expected 300000 bytes with sha256 00000000\.\.\."):
            install(bad, tmp_path / "b", make_transfer()[0])
        assert not (tmp_path / "b" / "tiny.mq4").exists()


def test_card_without_repository_needs_one_from_the_user(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = one_card(card("tiny.mq4", BODY, [{"kind": "hf", "repo": None, "file": "tiny.mq4"}]))
    with pytest.raises(UnsupportedError, match="--repo OWNER/NAME"):
        install(model, tmp_path / "models", make_transfer()[0])
    assert not (tmp_path / "models").exists()
    plan = Behaviour(BODY)
    with serving(plan) as base:
        monkeypatch.setenv("HIPFIRE_HF_BASE", base)
        done = install(model, tmp_path / "models", make_transfer()[0], repo="you/yours")
    assert plan.requests[0]["path"] == "/you/yours/resolve/main/tiny.mq4"
    record = read_manifest(done.path)
    assert record is not None
    assert record.source == "hf:you/yours/tiny.mq4"


def test_file_in_the_hub_cache_needs_no_network(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.mq4").write_bytes(BODY)
    (hub / "models--me--tiny" / "refs").mkdir()
    (hub / "models--me--tiny" / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    done = install(hub_card(), tmp_path / "models", make_transfer()[0])
    assert done.path.read_bytes() == BODY
    assert (snapshot / "tiny.mq4").read_bytes() == BODY


def test_offline_mode_says_so(tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants  # noqa: PLC0415 - see the fixture

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TransportError, match="HF_HUB_OFFLINE"):
        install(hub_card(), tmp_path / "models", make_transfer()[0])


def test_second_source_is_tried_when_the_network_fails_the_first(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "wheels" / "tiny-1.0.whl", {"m": BODY})
    sources = [
        {"kind": "hf", "repo": "me/tiny", "file": "tiny.mq4"},
        {"kind": "pypi", "packages": [package("tiny", "m", BODY)]},
    ]
    transfer, recorder = make_transfer()
    with serving(Behaviour(BODY, always_status=404)) as base:
        monkeypatch.setenv("HIPFIRE_HF_BASE", base)
        done = install(
            one_card(card("tiny.mq4", BODY, sources)),
            tmp_path / "models",
            transfer,
            resolver=FolderResolver(tmp_path / "wheels"),
        )
    assert done.path.read_bytes() == BODY
    assert any("trying the next source" in note for note in recorder.notes)
