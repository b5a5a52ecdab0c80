"""Views of a mapped file stay inside it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from hipfire.base.errors import ArtifactError
from hipfire.checkpoint.mapped import MappedFile


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, 11), (10, 1), (11, 0), (2**63, 1), (0, 2**64), (4, -1)]
)
def test_ranges_that_leave_the_file(tmp_path: Path, offset: int, length: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    with MappedFile(path) as file, pytest.raises(ArtifactError, match="the file ends at byte 10") as caught:
        file.view(offset, length)
    assert caught.value.offset == offset


def test_ranges_inside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    with MappedFile(path) as file:
        assert (file.size, file.mtime_ns) == (10, path.stat().st_mtime_ns)
        assert bytes(file.view(0, 10)) == b"0123456789"
        assert bytes(file.view(3, 2)) == b"34"
        assert bytes(file.view(10, 0)) == b""


def test_an_empty_file_is_an_empty_view(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    with MappedFile(path) as file:
        assert bytes(file.view(0, 0)) == b""
        file.release(0, 10)
        with pytest.raises(ArtifactError, match="ends at byte 0"):
            file.view(0, 1)


def test_release_takes_any_range_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = bytes(range(256)) * (mmap.PAGESIZE // 64)
    path.write_bytes(data)
    with MappedFile(path) as file:
        view = file.view(0, len(data))
        for offset, length in ((0, len(data)), (1, 5), (-10, 2**40), (len(data), 1), (1, mmap.PAGESIZE * 2)):
            file.release(offset, length)
            assert bytes(view) == data
