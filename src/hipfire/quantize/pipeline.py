"""From a checkpoint to an HFQM container: plan every tensor, then stream them through their formats.

The plan (names, formats, sizes) is complete and checked before the first byte is written. Rows are
converted in chunks and the source's pages are given back, so memory does not grow with the model.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hipfire.base.errors import ArtifactError, UnsupportedError, ValidationError
from hipfire.base.qtypes import BLOCKS, QType
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.gguf import GgufFile
from hipfire.checkpoint.hfq_writer import container_nbytes, write_hfq
from hipfire.checkpoint.names import NamedCheckpoint, StoredTensor
from hipfire.checkpoint.safetensors import SafetensorsModel
from hipfire.checkpoint.source import Checkpoint, open_checkpoint
from hipfire.layers.weights import rope_row_order
from hipfire.models.family import ModelConfig
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of
from hipfire.quantize.metadata import container_metadata
from hipfire.quantize.policy import Recipe, recipe
from hipfire.quantize.report import FormatFigures, NoProgress, ProgressSink, QuantizeReport
from hipfire.runtime.identify import named_checkpoint, read_config, unused_tensors
from hipfire.runtime.weights import mapped_tensor

# weights converted at once: 16 MiB as float32, several times that in temporaries
CHUNK_ELEMENTS = 1 << 22

# formats that hold the same bytes under two numbers, so that a copy loses nothing
SAME_BYTES: Mapping[int, int] = {
    QType.GGUF_Q8_0: QType.Q8F16,
    QType.GGUF_F16: QType.F16,
    QType.GGUF_F32: QType.F32,
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the container: where it comes from and what it becomes.

    `copied` tells that the source's bytes already are in the wanted format.
    """

    info: TensorInfo
    source: StoredTensor
    copied: bool


def quantize(
    source: Path,
    fmt: str,
    out: Path,
    *,
    device: str = "cpu",
    progress: ProgressSink | None = None,
) -> QuantizeReport:
    """Convert the checkpoint at `source` by the recipe named `fmt` and write the container `out`.

    Raises ValidationError, UnsupportedError or ArtifactError before anything is written if the source
    cannot be converted; an interruption leaves an older `out` as it was.
    """
    chosen = recipe(fmt)
    sink = progress or NoProgress()
    target_device = _device(device)
    with open_checkpoint(source) as checkpoint:
        _check_not_source(out, checkpoint)
        family, config = read_config(checkpoint)
        named = named_checkpoint(checkpoint, family, config)
        plan = plan_tensors(named, config, chosen)
        report = QuantizeReport(checkpoint.path, out, chosen.name)
        report.skipped = unused_tensors(named, config)
        metadata = container_metadata(checkpoint, config, chosen.name)
        infos = [planned.info for planned in plan]
        _check_space(out, container_nbytes(family.arch_id, metadata, infos))
        began = time.perf_counter()
        sink.start(sum(planned.source.info.nbytes for planned in plan), len(plan))
        try:
            heads = {"q_rows": config.sizes.heads, "k_rows": config.sizes.kv_heads}
            converter = Converter(checkpoint, heads, target_device, report, sink)
            payloads = (converter.chunks(planned) for planned in plan)
            write_hfq(out, family.arch_id, metadata, infos, payloads)
        finally:
            sink.done()
        report.seconds = time.perf_counter() - began
        report.file_bytes = out.stat().st_size
        return report


def plan_tensors(named: NamedCheckpoint, config: ModelConfig, chosen: Recipe) -> list[PlannedTensor]:
    """Return the container's tensors in the order of their names; ArtifactError if one is missing."""
    plan = [
        _planned(name, named.require(name, shape), shape, chosen) for name, shape in config.tensors().items()
    ]
    for name in config.optional_tensors():
        stored = named.find(name)
        if stored is not None:
            plan.append(_planned(name, stored, stored.info.shape, chosen))
    return sorted(plan, key=lambda planned: planned.info.name)


def _planned(name: str, stored: StoredTensor, shape: tuple[int, ...], chosen: Recipe) -> PlannedTensor:
    qtype = chosen.qtype(name, shape)
    fmt = format_of(qtype)
    info = TensorInfo(name, qtype, shape, 0, BLOCKS[qtype].elements if BLOCKS[qtype].elements > 1 else 0)
    rows, cols = info.rows_cols
    info = TensorInfo(name, qtype, shape, fmt.nbytes(rows, cols), info.group_size)
    if not format_of(stored.info.qtype).has_whole_rows(stored.info.nbytes, rows, cols):
        raise UnsupportedError(
            f"tensor {stored.info.name} is packed across its rows",
            hint="convert the original checkpoint instead of this container",
        )
    same = SAME_BYTES.get(stored.info.qtype, stored.info.qtype) == qtype
    copied = same and stored.change != "minus_one" and stored.info.nbytes == info.nbytes
    return PlannedTensor(info, stored, copied)


class Converter:
    """Produces the payload of one tensor after the other and sums up the figures of the report."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        heads: Mapping[str, int],
        device: torch.device,
        report: QuantizeReport,
        sink: ProgressSink,
    ) -> None:
        self._checkpoint = checkpoint
        self._heads = heads
        self._device = device
        self._report = report
        self._sink = sink

    def chunks(self, planned: PlannedTensor) -> Iterator[memoryview]:
        """Yield the tensor's bytes in the container, a chunk of rows at a time."""
        rows, cols = planned.info.rows_cols
        target = format_of(planned.info.qtype)
        source = format_of(planned.source.info.qtype)
        figures = self._report.formats.setdefault(planned.info.qtype, FormatFigures())
        figures.tensors += 1
        figures.weights += planned.info.numel
        figures.nbytes += planned.info.nbytes
        step = max(1, CHUNK_ELEMENTS // max(cols, 1))
        done = 0
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            packed = self._rows(planned, begin, end)
            values = self._values(planned, source, packed, begin, end)
            figures.squared_source += _sum_of_squares(values)
            encoded = packed
            if not planned.copied:
                encoded = _encoded(planned.source.info.name, values, target)
                figures.squared_error += _sum_of_squares(target.dense(encoded, end - begin, cols) - values)
            yield encoded.cpu().numpy().data
            share = planned.source.info.nbytes * end // rows
            self._sink.tensor(planned.info.name, share - done)
            done = share
            self._checkpoint.release(planned.source.info.name)

    def _rows(self, planned: PlannedTensor, begin: int, end: int) -> torch.Tensor:
        """Return packed source rows begin .. end of the tensor, in the canonical order of rows."""
        rows = planned.info.rows_cols[0]
        packed = mapped_tensor(self._checkpoint.raw(planned.source.info.name)).view(rows, -1)
        heads = self._heads.get(planned.source.change)
        if heads is None:
            return packed[begin:end].reshape(-1)
        return packed.index_select(0, rope_row_order(rows, heads)[begin:end]).reshape(-1)

    def _values(
        self, planned: PlannedTensor, source: WeightFormat, packed: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        """Return the canonical values of packed rows begin .. end as float32 [end - begin, cols]."""
        values = source.dense(packed.to(self._device), end - begin, planned.info.rows_cols[1])
        if not math.isfinite(_largest(values)):
            row, column = (~torch.isfinite(values)).nonzero()[0].tolist()
            raise ArtifactError(
                f"holds a value that is not finite in row {begin + row}, block {column // source.group}",
                path=self._checkpoint.path,
                field=f"tensor {planned.source.info.name}",
                hint="the file is damaged; download or convert it again",
            )
        return values - 1.0 if planned.source.change == "minus_one" else values


def _encoded(name: str, values: torch.Tensor, target: WeightFormat) -> torch.Tensor:
    if target.encode is None:
        raise UnsupportedError(f"format {target.name} can be read but not written")
    try:
        return target.encode(values)
    except ValidationError as error:
        raise ValidationError(f"tensor {name}: {error.message}", hint=error.hint) from error


def _largest(values: torch.Tensor) -> float:
    """Return the largest magnitude, NaN if there is one among the values."""
    low, high = torch.aminmax(values)
    return float(torch.maximum(-low, high))


def _sum_of_squares(values: torch.Tensor) -> float:
    # float32 is many times faster than float64 and exact enough for one row, where no square leaves its range
    dtype = torch.float32 if 1e-12 < _largest(values) < 1e12 else torch.float64
    return float(torch.linalg.vector_norm(values, dim=1, dtype=dtype).double().square().sum())


def _check_not_source(out: Path, checkpoint: Checkpoint) -> None:
    files = {checkpoint.path}
    if isinstance(checkpoint, (SafetensorsModel, GgufFile)):
        files.update(checkpoint.files)
    target = out.resolve()
    # in a source folder the config and tokenizer files belong to the source as the weights do
    inside = checkpoint.path.is_dir() and target.parent == checkpoint.path.resolve()
    if out.exists() and (inside or target in {path.resolve() for path in files}):
        raise ValidationError(f"{out} belongs to the source itself", hint="give another name with -o")


def _check_space(out: Path, needed: int) -> None:
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ValidationError(f"there is no folder {folder}", hint="make it first, or give another -o")
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValidationError(
            f"the container takes {needed >> 20} MiB but {folder} has {free >> 20} MiB free",
            hint="free some space or write elsewhere with -o",
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        # a device without memory of its own, such as meta, fails on the way back
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ValidationError(f"device {name!r} cannot be used", hint="use cpu") from error
    return device
