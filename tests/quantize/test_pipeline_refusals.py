"""What is refused, with the tensor or field by name, and that neither a refusal nor Ctrl-C harms any file."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hipfire.base.errors import ArtifactError, HipfireError, UnsupportedError, ValidationError
from hipfire.base.qtypes import QType, flat_nbytes
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.hfq_writer import write_hfq
from hipfire.quantize.pipeline import quantize
from tiny_models import change_config, change_weights, tiny_model, write_folder

OLD = b"the container of last week"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def matrix(rows: int, cols: int, row: int = 0, value: float = 0.5) -> torch.Tensor:
    values = torch.full((rows, cols), 0.25)
    values[row, 7] = value
    return values


def as_dtype(folder: Path, name: str, dtype: torch.dtype) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path)
    return folder


@pytest.fixture
def folder(source: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder of a tiny llama that the test may change."""
    return Path(shutil.copytree(source("llama"), tmp_path / "src"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A container of an earlier run, alone in its folder."""
    path = tmp_path / "out" / "m.hfq"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


def require_untouched(target: Path) -> None:
    assert target.read_bytes() == OLD
    assert list(target.parent.iterdir()) == [target]


DAMAGE: list[tuple[str, Callable[[Path], Any], str, type[HipfireError], list[str]]] = [
    ("missing", lambda f: change_weights(f, {O_PROJ: None}), "mq4", ArtifactError, [O_PROJ, "lacks"]),
    ("no head", lambda f: change_weights(f, {"lm_head.weight": None}), "mq4", ArtifactError, ["lm_head"]),
    ("wide", lambda f: change_weights(f, {O_PROJ: matrix(256, 128)}), "hf4", ArtifactError,
     [O_PROJ, "[256, 128]", "[256, 256]"]),
    ("transposed", lambda f: change_weights(f, {DOWN: matrix(352, 256)}), "q8", ArtifactError,
     [DOWN, "[352, 256]", "[256, 352]"]),
    ("nan", lambda f: change_weights(f, {O_PROJ: matrix(256, 256, 9, float("nan"))}), "mq4", ArtifactError,
     [O_PROJ, "not finite", "row 9"]),
    ("inf", lambda f: change_weights(f, {DOWN: matrix(256, 352, 255, -float("inf"))}), "q8", ArtifactError,
     [DOWN, "not finite", "row 255"]),
    ("copied nan", lambda f: change_weights(f, {O_PROJ: matrix(256, 256, 200, float("nan")).half()}), "f16",
     ArtifactError, [O_PROJ, "not finite", "row 200"]),
    ("f16 overflow", lambda f: change_weights(f, {O_PROJ: matrix(256, 256, 0, 1e5)}), "f16", ValidationError,
     [O_PROJ, "100000", "65504"]),
    ("norm overflow", lambda f: change_weights(f, {"model.norm.weight": torch.full((256,), 7e4)}), "hf4",
     ValidationError, ["model.norm.weight", "70000"]),
    ("integers", lambda f: as_dtype(f, O_PROJ, torch.int8), "hf4", UnsupportedError, [O_PROJ, "I8"]),
    ("model type", lambda f: change_config(f, model_type="mamba9"), "hf4", UnsupportedError,
     ["mamba9", "llama"]),
    ("bias", lambda f: change_config(f, attention_bias=True), "hf4", UnsupportedError, ["attention_bias"]),
    ("bias tensor", lambda f: change_weights(f, {"model.layers.1.self_attn.q_proj.bias": torch.ones(256)}),
     "hf4", UnsupportedError, ["model.layers.1.self_attn.q_proj.bias"]),
    ("rope", lambda f: change_config(f, rope_parameters={"rope_type": "yarn", "factor": 4.0}), "hf4",
     UnsupportedError, ["yarn"]),
    ("no config", lambda f: (f / "config.json").unlink(), "hf4", ArtifactError, ["config.json"]),
    ("cut off", lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-5]),
     "hf4", ArtifactError, ["model.safetensors"]),
    ("format", lambda f: f, "mq44", ValidationError, ["mq44", "mq4"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "fmt", "kind", "parts"), [pytest.param(*case[1:], id=case[0]) for case in DAMAGE]
)
def test_bad_sources_are_refused_by_name(
    damage: Callable[[Path], Any],
    fmt: str,
    kind: type[HipfireError],
    parts: list[str],
    folder: Path,
    target: Path,
) -> None:
    damage(folder)
    with pytest.raises(kind) as caught:
        quantize(folder, fmt, target)
    line = caught.value.line()
    assert all(part in line for part in parts), line
    assert caught.value.hint
    require_untouched(target)


def test_a_config_without_a_type_is_refused(folder: Path, target: Path) -> None:
    change_config(folder, model_type=None)
    with pytest.raises(ArtifactError, match="model_type"):
        quantize(folder, "hf4", target)
    require_untouched(target)


def test_a_place_in_a_late_chunk_is_named_by_its_row_in_the_tensor(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hipfire.quantize.pipeline.CHUNK_ELEMENTS", 10 * 256)
    change_weights(folder, {O_PROJ: matrix(256, 256, 133, float("nan"))})
    with pytest.raises(ArtifactError, match="row 133"):
        quantize(folder, "hf4", target)
    require_untouched(target)


@pytest.mark.parametrize(
    "name", [".", "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]
)
def test_no_part_of_the_source_can_be_the_target(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "src", tiny_model("llama"), shards=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shards = sorted(path for path in files if path.endswith(".safetensors"))
    target = folder / (name if name == "." else shards[0 if "00001" in name else -1])
    link = tmp_path / "link"
    link.symlink_to(target)
    for out in (target, link):
        with pytest.raises(ValidationError, match="belongs to the source"):
            quantize(folder, "q8", out)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_container_is_not_converted_onto_itself(source: Any, tmp_path: Path) -> None:
    quantize(source("qwen3"), "f16", tmp_path / "m")
    before = (tmp_path / "m").read_bytes()
    (tmp_path / "x").mkdir()
    with pytest.raises(ValidationError, match="belongs to the source"):
        quantize(tmp_path / "m", "q8", tmp_path / "x" / ".." / "m")
    assert (tmp_path / "m").read_bytes() == before


@pytest.mark.parametrize(
    ("out", "part"), [("none/m", "no folder"), ("src", "belongs to the source"), ("out", "is a folder")]
)
def test_places_that_cannot_hold_the_target(out: str, part: str, folder: Path, target: Path) -> None:
    with pytest.raises(HipfireError, match=part):
        quantize(folder, "q8", folder.parent / out)
    require_untouched(target)
    assert not (folder.parent / "none").exists()


def test_a_full_disk_is_noticed_before_work(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(folder, "hf4", folder.parent / "probe")
    size = (folder.parent / "probe").stat().st_size
    usage = namedtuple("usage", "total used free")
    asked = []

    def disk_usage(where: Path) -> Any:
        asked.append(Path(where))
        return usage(10**9, 0, free)

    monkeypatch.setattr("hipfire.quantize.pipeline.shutil.disk_usage", disk_usage)
    free = size - 1
    with pytest.raises(ValidationError, match="MiB free"):
        quantize(folder, "hf4", target)
    require_untouched(target)
    assert asked == [target.parent]
    free = size
    assert quantize(folder, "hf4", target).file_bytes == size


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta"])
def test_devices_that_cannot_compute(device: str, folder: Path, target: Path) -> None:
    with pytest.raises(ValidationError, match=device):
        quantize(folder, "q8", target, device=device)
    require_untouched(target)


def test_old_flat_packing_is_refused_before_work(source: Any, tmp_path: Path, target: Path) -> None:
    quantize(source("llama"), "hf4", tmp_path / "m")
    with HfqFile.open(tmp_path / "m") as container:
        infos, payloads = [], []
        for name, info in container.tensors.items():
            data = bytes(container.raw(name))
            if name == DOWN:
                data = data[: flat_nbytes(QType.HFQ4G128, *info.shape)]
            infos.append(TensorInfo(name, info.qtype, info.shape, len(data), info.group_size))
            payloads.append([data])
        write_hfq(tmp_path / "old", 0, container.metadata, infos, payloads)
    with pytest.raises(UnsupportedError, match=f"{DOWN} is packed across its rows"):
        quantize(tmp_path / "old", "q8", target)
    require_untouched(target)


class Stopper:
    """A progress sink that stops the run when so many steps are done; keeps what it was told."""

    def __init__(self, after: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.after, self.error = after, error
        self.total, self.tensors, self.ended = 0, 0, 0
        self.steps: list[tuple[str, int]] = []

    def start(self, total_bytes: int, tensors: int) -> None:
        self.total, self.tensors = total_bytes, tensors

    def tensor(self, name: str, nbytes: int) -> None:
        self.steps.append((name, nbytes))
        if len(self.steps) == self.after:
            raise self.error

    def done(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("after", [1, 9, 21])
@pytest.mark.parametrize("existing", [True, False])
def test_an_interrupted_run_leaves_no_trace(after: int, existing: bool, folder: Path, target: Path) -> None:
    if not existing:
        target.unlink()
    sink = Stopper(after)
    with pytest.raises(KeyboardInterrupt):
        quantize(folder, "q8", target, progress=sink)
    assert len(sink.steps) == after
    assert sink.ended == 1
    assert list(target.parent.iterdir()) == ([target] if existing else [])
    assert not existing or target.read_bytes() == OLD
    # the next run is not hindered
    assert quantize(folder, "q8", target).file_bytes == target.stat().st_size


def test_progress_counts_every_source_byte_once(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hipfire.quantize.pipeline.CHUNK_ELEMENTS", 50 * 256)
    sink = Stopper(-1)
    quantize(folder, "mq4", target, progress=sink)
    stored = load_file(folder / "model.safetensors")
    assert sink.tensors == len(stored)
    assert sink.total == sum(values.numel() * 4 for values in stored.values())
    for name, values in stored.items():
        parts = [nbytes for told, nbytes in sink.steps if told == name]
        assert sum(parts) == values.numel() * 4
        assert len(parts) == max(
            1, -(-values.numel() // values.shape[-1] // max(1, 12800 // values.shape[-1]))
        )
    assert sink.ended == 1
    with HfqFile.open(target) as container:
        assert list(dict.fromkeys(told for told, _ in sink.steps)) == list(container.tensors)
