"""Opening a model by content: every kind of path leads to the right reader or to one clear error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_samples import Ggml, Stored, gguf_bytes, hfq_bytes, safetensors_bytes

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.source import open_checkpoint

HFQ = hfq_bytes(b"{}", [Stored(b"w", 2, (1,), b"abcd")])
GGUF = gguf_bytes([], [Ggml("w", (1,), 0, b"abcd")])
SAFE = safetensors_bytes({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abcd")


@pytest.mark.parametrize(("data", "kind"), [(HFQ, "hfq"), (GGUF, "gguf"), (SAFE, "safetensors")])
@pytest.mark.parametrize(
    "name", ["model", "m.bin", "misleading.gguf", "mit leerzeichen", "🔥.x", "模型.hfq", "n" * 255]
)
def test_content_decides_whatever_the_name(tmp_path: Path, data: bytes, kind: str, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(data)
    with open_checkpoint(str(tmp_path / name)) as model:
        assert model.kind == kind
        assert model.path == tmp_path / name
        assert bytes(model.raw("w")) == b"abcd"


@pytest.mark.parametrize(("data", "kind"), [(HFQ, "hfq"), (GGUF, "gguf"), (SAFE, "safetensors")])
def test_a_folder_with_one_model(tmp_path: Path, data: bytes, kind: str) -> None:
    root = tmp_path / "some model 🔥"
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "README.md").write_text("read me")
    (root / ".hidden").write_bytes(GGUF)
    (root / ("w.safetensors" if data is SAFE else "w.any")).write_bytes(data)
    with open_checkpoint(root) as model:
        assert model.kind == kind
        assert bytes(model.raw("w")) == b"abcd"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is an empty folder"),
        ({"README.md": b"hello"}, "holds no model weights"),
        ({"config.json": b"{}", "pytorch_model.bin": b"PK\x03\x04"}, "PyTorch pickle weights.*safetensors"),
        ({"a.hfq": HFQ, "b.gguf": GGUF}, r"several models: a\.hfq, b\.gguf"),
        ({"a.gguf": GGUF, "b.gguf": GGUF}, r"several models: a\.gguf, b\.gguf"),
        ({"w.safetensors": SAFE}, r"config\.json is missing"),
        ({"model.safetensors.index.json": b"{}", "config.json": b"{}"}, "weight_map"),
    ],
)
def test_folders_that_do_not_hold_one_model(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint or words == "weight_map"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is an empty file"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"\x80\x04rest", "is a Python pickle"),
        (b"version https://git-lfs", "is a Git LFS pointer"),
        (b"<html>", "is an HTML page"),
        (b"tjgg....", "older than GGUF"),
        (b"what is this", "no known model file"),
    ],
)
def test_unknown_content_says_what_it_is(tmp_path: Path, body: bytes, words: str) -> None:
    path = tmp_path / "m"
    path.write_bytes(body)
    with pytest.raises(ArtifactError, match=words) as caught:
        open_checkpoint(path)
    assert caught.value.hint


def test_a_reversed_gguf_magic_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"FUGG\0\0\0\3" + bytes(100))
    with pytest.raises(UnsupportedError, match="big-endian"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["absent", "absent/deeper", "x" * 300, "nul\0byte", "file/inside"])
def test_paths_that_lead_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(HFQ)
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(tmp_path / name)
    assert caught.value.hint


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    path.write_bytes(HFQ)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArtifactError, match="permission denied; make the file readable"):
        open_checkpoint(path)


def test_opening_needs_no_tensor_library() -> None:
    code = "import sys, hipfire.checkpoint.source; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
