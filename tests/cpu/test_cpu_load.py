"""Loading models for the CPU engine: residency, threads, files of every kind, and damage in the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_kit import raw_bytes
from model_kit import MODELS, decode, fill, tiny_runner

from helpers import MemoryCheckpoint, rms
from hipfire.base.cpu import usable_threads
from hipfire.base.errors import ArtifactError, InternalError, ValidationError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.names import DECODER_RULES, NamedCheckpoint
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.fwht import inverse_fwht256
from hipfire.layers.weights import Weight
from hipfire.quant.registry import format_of
from hipfire.runtime import panels
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model
from hipfire.runtime.weights import CheckpointWeights
from tiny_models import TOKENS, reference, tiny_model, write_folder, write_gguf

NAME = "model.layers.0.mlp.up_proj.weight"


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, LoadOptions(kv_cache="f32", max_seq=64, **options))


def logits(loaded: LoadedModel) -> torch.Tensor:
    return loaded.runner.all_logits(0, TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen3"), tiny_model("qwen3"))


def test_every_residency_gives_the_same_answers(folder: Path) -> None:
    want = reference(tiny_model("qwen3"))
    for residency in ("panels", "decoded", "packed", "auto"):
        loaded = load(folder, residency=residency)
        assert loaded.residency == ("panels" if residency == "auto" else residency)
        assert rms(logits(loaded), want) < 1e-5
        assert ("numba" in loaded.runner.launcher.engines) == (loaded.residency == "panels")


def test_the_number_of_threads_is_the_one_asked_for_or_that_of_the_machine(folder: Path) -> None:
    three = load(folder, residency="panels", threads=3)
    engine = three.runner.launcher.engines["numba"]
    assert isinstance(engine, CpuEngine)
    assert three.threads == engine.threads == engine.pool.threads == 3
    own = load(folder, residency="panels")
    assert own.threads == usable_threads()
    assert raw_bytes(logits(three)) == raw_bytes(logits(own))
    assert load(folder, residency="decoded").threads == torch.get_num_threads()


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_impossible_numbers_of_threads_are_refused(threads: Any) -> None:
    with pytest.raises(ValidationError, match=r"threads is .* but must be an integer of at least 1"):
        LoadOptions(threads=threads)
    with pytest.raises(ValidationError, match="residency 'gpu' is unknown"):
        LoadOptions(residency="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("types", "bound"), [({}, 1e-5), ({"attn_": "Q8_0", "ffn_": "Q4_1", "token_embd": "Q5_0"}, 3e-2)]
)
def test_gguf_files_give_the_logits_of_their_weights(
    kind: str, types: dict[str, str], bound: float, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    path = write_gguf(tmp_path / "model.gguf", model, types)
    assert rms(logits(load(path, residency="panels")), reference(model)) < bound


@pytest.mark.parametrize("kind", MODELS)
def test_all_kernels_that_steps_use_are_known_before_the_first(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner(kind, QType.MQ4G256)
    known = {kernel.name for kernel in runner.kernels()}
    used: set[str] = set()
    launch = CpuEngine.launch

    def noting(self: CpuEngine, kernel: Any, *arguments: Any, **touched: Any) -> None:
        used.add(kernel.name)
        launch(self, kernel, *arguments, **touched)

    monkeypatch.setattr(CpuEngine, "launch", noting)
    fill(runner, [1, 2, 9, 64, 70])
    for further in range(2):
        decode(runner, [(0, 1 + further), (3, 64 + further)], [5, 6])
    assert used - known == set()
    assert known - used == set()


def weights(checkpoint: MemoryCheckpoint) -> CheckpointWeights:
    named = NamedCheckpoint(checkpoint, DECODER_RULES, 1)
    return CheckpointWeights(named, heads=8, kv_heads=2, residency="panels", engine=CpuEngine(2))


def stored(qtype: QType, rows: int, cols: int, data: bytes | None = None) -> MemoryCheckpoint:
    checkpoint = MemoryCheckpoint()
    if data is None:
        torch.manual_seed(3)
        checkpoint.add(NAME, torch.randn(rows, cols), qtype)
    else:
        checkpoint.add_raw(NAME, qtype, (rows, cols), data)
    return checkpoint


def dense(weight: Weight) -> torch.Tensor:
    assert weight.panels is not None
    values = weight.panels.dense()
    return inverse_fwht256(values) if weight.format.rotated else values


@pytest.mark.parametrize(
    ("qtype", "cols", "layout"),
    [
        (QType.F32, 40, "f32"),
        (QType.BF16, 40, "bf16"),
        (QType.Q8F16, 40, "i8g32"),
        (QType.HFQ4G128, 300, "u4g128"),
        (QType.HFQ6G256, 576, "u6g256"),
        (QType.MQ4G256, 512, "u4g256"),
        (QType.MQ6G256V2, 512, "u6g128h"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_matrices_are_packed_as_their_format_asks(qtype: QType, cols: int, layout: str) -> None:
    checkpoint = stored(qtype, 33, cols)
    weight = weights(checkpoint).matrix(NAME, 33, cols)
    assert weight.panels is not None
    assert weight.panels.layout.name == layout
    assert weight.panels.data.data_ptr() % 64 == 0
    data = torch.frombuffer(bytearray(checkpoint.raw(NAME)), dtype=torch.uint8)
    assert rms(dense(weight), format_of(qtype).dense(data, 33, cols)) < 1e-6


def test_what_cannot_be_packed_as_it_is_becomes_float32() -> None:
    # one scale of a Q6_K block that no half can hold: 2^15 times 127
    fmt = format_of(QType.GGUF_Q6_K)
    block = torch.zeros(fmt.nbytes(2, 256), dtype=torch.uint8).view(2, -1)
    block[1, 192:208] = 127
    block[:, 208:210] = torch.tensor([2.0**15], dtype=torch.float16).view(torch.uint8)
    weight = weights(stored(QType.GGUF_Q6_K, 2, 256, block.numpy().tobytes())).matrix(NAME, 2, 256)
    assert weight.panels is not None
    assert weight.panels.layout.name == "f32"
    assert torch.equal(weight.panels.dense(), fmt.decode(block.flatten(), 2, 256))
    assert weight.panels.dense().abs().max() == 2.0**15 * 127 * 32


@pytest.mark.parametrize("qtype", [QType.Q8F16, QType.MQ4G256, QType.F32])
def test_a_large_matrix_is_packed_in_pieces_whose_pages_are_given_back(
    qtype: QType, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = stored(qtype, 50, 512)
    whole = weights(checkpoint).matrix(NAME, 50, 512)
    assert checkpoint.released == [(NAME, checkpoint.tensors[NAME].nbytes), (NAME, None)]
    checkpoint.released.clear()
    monkeypatch.setattr(panels, "PIECE_BYTES", 17 * format_of(qtype).row_nbytes(512))
    pieces = weights(checkpoint).matrix(NAME, 50, 512)
    assert whole.panels is not None
    assert pieces.panels is not None
    assert raw_bytes(pieces.panels.data) == raw_bytes(whole.panels.data)
    ends = [rows * format_of(qtype).row_nbytes(512) for rows in (16, 32, 48, 50)]
    assert checkpoint.released == [*((NAME, end) for end in ends), (NAME, None)]


@pytest.mark.parametrize("piece", [1, panels.PIECE_BYTES])
@pytest.mark.parametrize(("qtype", "cols"), [(QType.Q8F16, 96), (QType.HFQ4G256, 512), (QType.F32, 5)])
def test_a_number_that_is_not_finite_is_named_by_row_and_block(
    qtype: QType, cols: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "PIECE_BYTES", piece)
    fmt = format_of(qtype)
    data = bytearray(stored(qtype, 20, cols).raw(NAME))
    place = 17 * fmt.row_nbytes(cols) + fmt.group_bytes
    size = 2 if qtype is QType.Q8F16 else 4
    data[place : place + size] = b"\xff" * size
    with pytest.raises(ArtifactError, match="not finite in row 17, block 1"):
        weights(stored(qtype, 20, cols, bytes(data))).matrix(NAME, 20, cols)


def test_panels_need_an_engine() -> None:
    named = NamedCheckpoint(stored(QType.F32, 2, 4), DECODER_RULES, 1)
    with pytest.raises(InternalError, match="packed by an engine"):
        CheckpointWeights(named, heads=1, kv_heads=1, residency="panels")
