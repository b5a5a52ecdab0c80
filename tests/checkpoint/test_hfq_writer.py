"""Writing HFQM containers: exact bytes, round trips, refusals, and targets that survive every failure."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import Stored, bounded, hfq_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.base.qtypes import BLOCKS, GGUF_BASE, QType, packed_nbytes
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.hfq_writer import STALE_SECONDS, container_nbytes, write_hfq

F32 = QType.F32
ONE = TensorInfo("w", F32, (2,), 8)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_equal_a_container_assembled_by_hand(tmp_path: Path) -> None:
    metadata = {
        "tokenizer": '{"a": "ü}{"}',
        "config": {"rms_norm_eps": 1e-06, "bos": None, "z": [1, 2.5, True]},
        "architecture": "llama",
    }
    text = (
        '{"architecture":"llama","config":{"bos":null,"rms_norm_eps":1e-6,"z":[1,2.5,true]},'
        '"tokenizer":"{\\"a\\": \\"ü}{\\"}"}'
    )
    stored = [
        Stored(b"model.norm.weight", QType.F16, (3,), b"abcdef"),
        Stored("gewicht.ö".encode(), QType.MQ4G256, (2, 256), bytes(range(136)) * 2, 256),
        Stored(b"odd", 99, (1, 2, 3), b"\x01\x02\x03\x04\x05", 32),
    ]
    infos = [TensorInfo(s.name.decode(), s.qtype, s.shape, len(s.data), s.group) for s in stored]
    target = tmp_path / "out.hfq"
    chunks = [[s.data[:3], memoryview(s.data)[3:], bytearray()] for s in stored]
    write_hfq(target, 6, metadata, infos, chunks)
    assert target.read_bytes() == hfq_bytes(text.encode(), stored, arch_id=6)
    assert container_nbytes(6, metadata, infos) == target.stat().st_size


def any_info(name: str) -> st.SearchStrategy[TensorInfo]:
    known = sorted(qtype for qtype in BLOCKS if qtype < GGUF_BASE)
    dims = st.lists(st.integers(0, 5), max_size=3).map(tuple)

    def sized(qtype: int, shape: tuple[int, ...]) -> TensorInfo:
        rows_cols = TensorInfo(name, qtype, shape, 0).rows_cols
        return TensorInfo(name, qtype, shape, packed_nbytes(qtype, *rows_cols), 32)

    unknown = st.builds(TensorInfo, st.just(name), st.integers(100, 255), dims, st.integers(0, 50))
    return st.builds(sized, st.sampled_from(known), dims) | unknown


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_of_random_containers(tmp_path: Path, data: st.DataObject) -> None:
    names = data.draw(st.lists(UNICODE.filter(bool), unique=True, max_size=5))
    infos = [data.draw(any_info(name)) for name in names]
    payloads = [data.draw(st.binary(min_size=i.nbytes, max_size=i.nbytes)) for i in infos]
    metadata = data.draw(st.dictionaries(UNICODE, UNICODE | st.integers(0, 2**64 - 1) | st.lists(UNICODE)))
    metadata = {key: value for key, value in metadata.items() if key != "config"}
    arch_id = data.draw(st.integers(0, 2**32 - 1))
    target = tmp_path / "r.hfq"
    write_hfq(target, arch_id, metadata, infos, [[payload] for payload in payloads])
    first = target.read_bytes()
    with HfqFile.open(target) as model:
        assert list(model.tensors.values()) == infos
        assert [bytes(model.raw(name)) for name in names] == payloads
        assert (model.metadata, model.arch_id) == (metadata, arch_id)
    write_hfq(target, arch_id, dict(reversed(metadata.items())), infos, ([p[:1], p[1:]] for p in payloads))
    assert target.read_bytes() == first
    assert names_in(tmp_path) == ["r.hfq"]


@pytest.mark.parametrize(
    ("arch_id", "metadata", "infos", "words"),
    [
        (-1, {}, [ONE], "arch_id"),
        (2**32, {}, [ONE], "arch_id"),
        (0, {}, [ONE, ONE], "two tensors are named 'w'"),
        (0, {}, [TensorInfo("", F32, (2,), 8)], "0 bytes"),
        (0, {}, [TensorInfo("ü" * 32768, F32, (2,), 8)], "65536 bytes"),
        (0, {}, [TensorInfo("\ud800", F32, (2,), 8)], "not Unicode"),
        (0, {}, [TensorInfo("w", GGUF_BASE + 2, (32,), 18)], "qtype 258"),
        (0, {}, [TensorInfo("w", -1, (32,), 18)], "qtype -1"),
        (0, {}, [TensorInfo("w", F32, (1,) * 256, 4)], "256 dimensions"),
        (0, {}, [TensorInfo("w", 99, (2**32,), 4)], "32 bits"),
        (0, {}, [TensorInfo("w", 99, (-1,), 4)], "32 bits"),
        (0, {}, [TensorInfo("w", 99, (1,), 4, 2**32)], "group size"),
        (0, {}, [TensorInfo("w", 99, (1,), -4)], "no possible size"),
        (0, {}, [TensorInfo("w", 99, (2**31, 2**31, 4), 4)], "more than 2\\^63"),
        (0, {}, [TensorInfo("w", F32, (2,), 9)], "takes 8 bytes, not 9"),
        (0, ["no object"], [ONE], "JSON object"),
        (0, {"a": float("nan")}, [ONE], "metadata.a is nan"),
    ],
)
def test_what_the_reader_would_refuse_is_refused_before_anything_is_written(
    tmp_path: Path, arch_id: int, metadata: Any, infos: list[TensorInfo], words: str
) -> None:
    def untouched() -> Iterator[list[bytes]]:
        pytest.fail("a payload was asked for")
        yield []

    with pytest.raises(ValidationError, match=words):
        write_hfq(tmp_path / "x.hfq", arch_id, metadata, infos, untouched())
    assert names_in(tmp_path) == []


def interrupted() -> Iterator[bytes]:
    yield b"1234"
    raise KeyboardInterrupt


def broken() -> Iterator[bytes]:
    yield b"1234"
    raise RuntimeError("the encoder failed")


@pytest.mark.parametrize(
    ("payloads", "error", "words"),
    [
        (lambda: [interrupted()], KeyboardInterrupt, None),
        (lambda: [broken()], RuntimeError, "the encoder failed"),
        (lambda: [[b"1234", b"567"]], ValidationError, "has 7 bytes, not 8"),
        (lambda: [[b"1234", b"56789"]], ValidationError, "longer than its 8 bytes"),
        (lambda: [], ValidationError, "no payload for tensor w"),
        (lambda: [[b"12345678"], [b""]], ValidationError, "more payloads than the 1 tensors"),
    ],
)
def test_any_failure_leaves_the_old_target_and_no_other_file(
    tmp_path: Path, payloads: Callable[[], Any], error: type[BaseException], words: str | None
) -> None:
    target = tmp_path / "x.hfq"
    write_hfq(target, 1, {"old": True}, [ONE], [[b"old data"]])
    before = target.read_bytes()
    with pytest.raises(error, match=words):
        write_hfq(target, 1, {"new": True}, [ONE], payloads())
    assert target.read_bytes() == before
    assert names_in(tmp_path) == ["x.hfq"]


def test_the_target_appears_only_when_the_file_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "x.hfq"

    def watching() -> Iterator[bytes]:
        yield b"1234"
        assert not target.exists()
        assert len(names_in(tmp_path)) == 1
        yield b"5678"

    write_hfq(target, 1, {}, [ONE], [watching()])
    assert names_in(tmp_path) == ["x.hfq"]
    assert target.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_one_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        write_hfq(tmp_path / "x.hfq", 1, {}, [ONE], [[b"12345678"]])
    assert names_in(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_write_that_fails_is_one_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda _, mode: real(Path("/dev/full"), "r+b", buffering=16))
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_hfq(tmp_path / "x.hfq", 1, {}, [ONE], [[b"12345678"]])


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is a folder"):
        write_hfq(tmp_path, 1, {}, [ONE], [[b"12345678"]])
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_hfq(tmp_path / "absent" / "x.hfq", 1, {}, [ONE], [[b"12345678"]])


@pytest.mark.parametrize("name", ["mit leerzeichen.hfq", "🔥.hfq", "模型.hfq", "n" * 251 + ".hfq"])
def test_unusual_names(tmp_path: Path, name: str) -> None:
    write_hfq(tmp_path / name, 1, {}, [ONE], [[b"12345678"]])
    assert bytes(HfqFile.open(tmp_path / name).raw("w")) == b"12345678"
    assert names_in(tmp_path) == [name]


def test_payloads_stream(tmp_path: Path) -> None:
    chunk = bytes(2**20)
    infos = [TensorInfo(f"w{n}", F32, (2**20,), 4 * 2**20) for n in range(10)]
    with bounded(seconds=30, nbytes=2 * 2**20):
        write_hfq(tmp_path / "x.hfq", 1, {}, infos, ((chunk for _ in range(4)) for _ in infos))
    assert (tmp_path / "x.hfq").stat().st_size == 4096 + 40 * 2**20


def test_vocabulary_metadata_is_written_quickly(tmp_path: Path) -> None:
    tokens = [f"token {n} ü" for n in range(300_000)]
    metadata = {"gguf_meta": {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.5] * 300_000}}
    start = time.process_time()
    write_hfq(tmp_path / "x.hfq", 1, metadata, [], [])
    assert time.process_time() - start < 8
    raw = json.loads((tmp_path / "x.hfq").read_bytes()[32:-4].rstrip(b"\0"))
    assert raw == metadata


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old = time.time() - STALE_SECONDS - 1
    made = {
        f".hipfire-{ended.pid}-{'0' * 16}.tmp": old,
        f".hipfire-{ended.pid}-{'1' * 16}.tmp": time.time(),
        f".hipfire-{os.getpid()}-{'2' * 16}.tmp": old,
        f".hipfire-{ended.pid}-mine.tmp": old,
        f"hipfire-{ended.pid}-{'3' * 16}.tmp": old,
    }
    for name, moment in made.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (moment, moment))
    write_hfq(tmp_path / "x.hfq", 1, {}, [ONE], [[b"12345678"]])
    assert names_in(tmp_path) == sorted([*list(made)[1:], "x.hfq"])


def test_a_device_or_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.hfq")
    with pytest.raises(ArtifactError, match="not a regular file"):
        write_hfq(tmp_path / "x.hfq", 1, {}, [ONE], [[b"12345678"]])
    assert (tmp_path / "x.hfq").is_fifo()
    assert names_in(tmp_path) == ["x.hfq"]
