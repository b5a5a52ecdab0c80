"""Split GGUF models: metadata decides which files belong together, whatever they are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_samples import Ggml, gguf_bytes, string, typed, u16

from hipfire.base.errors import ArtifactError
from hipfire.checkpoint.gguf import GgufFile
from hipfire.checkpoint.source import open_checkpoint


def shard(number: int, count: int, *, total: int | None = None, tag: bytes = b"a") -> bytes:
    """Return shard `number`, which holds one tensor `t{number}` with eight times its number and tag."""
    entries = [("split.no", u16(number)), ("split.count", u16(count))]
    if total is not None:
        entries.append(("split.tensors.count", typed(5, "i", total)))
    if number == 0:
        entries.append(("general.name", string("model " + tag.decode())))
    return gguf_bytes(entries, [Ggml(f"t{number}", (4,), 0, (bytes([number]) + tag) * 8)])


def conventional(folder: Path, stem: str = "m", count: int = 3, tag: bytes = b"a") -> list[Path]:
    paths = [folder / f"{stem}-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(shard(number, count, total=count, tag=tag))
    return paths


def open_files() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_any_shard_and_the_folder_stand_for_the_whole(tmp_path: Path) -> None:
    paths = conventional(tmp_path)
    for start in (*paths, tmp_path):
        with open_checkpoint(start) as model:
            assert list(model.tensors) == ["t0", "t1", "t2"]
            assert [bytes(model.raw(f"t{n}")[:2]) for n in range(3)] == [b"\0a", b"\1a", b"\2a"]
            assert model.model_config["general.name"] == "model a"
            assert isinstance(model, GgufFile)
            assert [path.name for path in model.files] == [path.name for path in paths]


def test_renamed_shards_are_found_by_their_metadata(tmp_path: Path) -> None:
    for name, path in zip(("z.gguf", "a.GGUF", "middle part.gguf"), conventional(tmp_path), strict=True):
        path.rename(tmp_path / name)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "other.gguf").write_bytes(gguf_bytes([("general.name", string("other"))]))
    model = GgufFile.open(tmp_path / "a.GGUF")
    assert [path.name for path in model.files] == ["z.gguf", "a.GGUF", "middle part.gguf"]
    assert model.model_config["general.name"] == "model a"


def test_names_keep_two_sets_in_one_folder_apart(tmp_path: Path) -> None:
    conventional(tmp_path, "one", tag=b"a")
    second = conventional(tmp_path, "two", tag=b"b")
    model = GgufFile.open(second[1])
    assert model.model_config["general.name"] == "model b"
    assert bytes(model.raw("t2")[:2]) == b"\2b"
    with pytest.raises(ArtifactError, match="several models"):
        open_checkpoint(tmp_path)


def test_a_foreign_set_never_fills_the_place_of_a_missing_shard(tmp_path: Path) -> None:
    conventional(tmp_path, "one", tag=b"a")
    second = conventional(tmp_path, "two", tag=b"b")
    second[1].unlink()
    with pytest.raises(ArtifactError, match=r"shard 2 of 3 is missing \(two-00002-of-00003\.gguf\)"):
        GgufFile.open(second[0])


def test_two_sets_that_nothing_tells_apart(tmp_path: Path) -> None:
    for stem in ("x", "y"):
        for number in range(2):
            (tmp_path / f"{stem}{number}.gguf").write_bytes(shard(number, 2))
    with pytest.raises(ArtifactError, match=r"several files claim to be shard 2 of 2: x1\.gguf, y1\.gguf"):
        GgufFile.open(tmp_path / "x0.gguf")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = conventional(tmp_path)
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(ArtifactError, match=r"shard 2 of 3 is missing \(m-00002-of-00003\.gguf\)"):
            GgufFile.open(path)
    alone = tmp_path / "alone" / "model.gguf"
    alone.parent.mkdir()
    alone.write_bytes(shard(1, 2))
    with pytest.raises(ArtifactError, match="shard 1 of 2 is missing"):
        GgufFile.open(alone)


def test_a_damaged_shard_is_reported_as_damaged(tmp_path: Path) -> None:
    paths = conventional(tmp_path)
    os.truncate(paths[1], paths[1].stat().st_size - 32)
    with pytest.raises(ArtifactError, match=r"tensor t1: .*the file ends") as caught:
        GgufFile.open(paths[0])
    assert str(paths[1]) in caught.value.line()


def test_a_whole_file_with_the_name_of_a_shard_loads(tmp_path: Path) -> None:
    path = tmp_path / "derived-00001-of-00013.gguf"
    path.write_bytes(gguf_bytes([("general.name", string("x"))], [Ggml("w", (1,), 0, b"abcd")]))
    assert bytes(GgufFile.open(path).raw("w")) == b"abcd"
    path.write_bytes(shard(0, 1))
    assert list(GgufFile.open(path).tensors) == ["t0"]


def test_concatenated_shards_are_explained(tmp_path: Path) -> None:
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(shard(number, 3) for number in range(3)))
    with pytest.raises(ArtifactError, match="must not be concatenated") as caught:
        GgufFile.open(joined)
    assert caught.value.offset == len(shard(0, 3))


def test_a_set_from_two_conversions_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"m{number}.gguf").write_bytes(shard(number, 2, total=5))
    with pytest.raises(ArtifactError, match=r"split\.tensors\.count: is 5, but the 2 shards hold 2"):
        GgufFile.open(tmp_path / "m0.gguf")


def test_one_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        entries = [("split.no", u16(number)), ("split.count", u16(2))]
        (tmp_path / f"m{number}.gguf").write_bytes(gguf_bytes(entries, [Ggml("w", (1,), 0, b"abcd")]))
    with pytest.raises(ArtifactError, match="tensor w is in two shards"):
        GgufFile.open(tmp_path / "m0.gguf")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("split.no", string("0")), ("split.count", u16(2))], r"split\.no: is '0'"),
        ([("split.count", u16(2))], r"split\.no: is None"),
        ([("split.no", u16(2)), ("split.count", u16(2))], r"split\.no: is 2, but there are 2"),
        ([("split.no", u16(0)), ("split.count", typed(7, "B", 1))], r"split\.count: is True"),
    ],
)
def test_split_keys_that_make_no_sense(
    tmp_path: Path, entries: list[tuple[str | bytes, bytes]], words: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries))
    with pytest.raises(ArtifactError, match=words):
        GgufFile.open(path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_no_file_stays_open_after_success_or_failure(tmp_path: Path) -> None:
    paths = conventional(tmp_path)
    conventional(tmp_path, "other", tag=b"b")
    GgufFile.open(paths[2]).close()
    paths[1].unlink()
    with pytest.raises(ArtifactError):
        GgufFile.open(paths[0])
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]
