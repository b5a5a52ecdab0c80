"""From a checkpoint to an HFQM container: plan every tensor, then stream them through their formats.

The plan (names, formats, sizes) is complete and checked before the first byte is written. Rows are
converted in chunks and the source's pages are given back, so memory does not grow with the model.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hipfire.base.errors import ArtifactError, UnsupportedError, ValidationError
from hipfire.checkpoint.gguf import GgufFile
from hipfire.checkpoint.hfq_writer import container_nbytes, write_hfq
from hipfire.checkpoint.names import Change
from hipfire.checkpoint.safetensors import SafetensorsModel
from hipfire.checkpoint.source import Checkpoint, open_checkpoint
from hipfire.layers.weights import rope_row_order
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of
from hipfire.quantize.metadata import container_metadata
from hipfire.quantize.plan import PlannedTensor, SourceRows, plan_tensors
from hipfire.quantize.policy import recipe
from hipfire.quantize.report import FormatFigures, NoProgress, ProgressSink, QuantizeReport
from hipfire.runtime.identify import draft_head, named_checkpoint, read_config, unused_tensors
from hipfire.runtime.weights import mapped_tensor, undo_change

# weights converted at once: 16 MiB as float32, several times that in temporaries
CHUNK_ELEMENTS = 1 << 22


def quantize(
    source: Path,
    fmt: str,
    out: Path,
    *,
    device: str = "cpu",
    keep_mtp: bool = False,
    progress: ProgressSink | None = None,
) -> QuantizeReport:
    """Convert the checkpoint at `source` by the recipe named `fmt` and write the container `out`.

    With `keep_mtp` the container has the tensors of a head that predicts further tokens, too. Raises
    ValidationError, UnsupportedError or ArtifactError before anything is written if the source cannot be
    converted; an interruption leaves an older `out` as it was.
    """
    chosen = recipe(fmt)
    sink = progress or NoProgress()
    target_device = _device(device)
    with open_checkpoint(source) as checkpoint:
        _check_not_source(out, checkpoint)
        family, config = read_config(checkpoint)
        named = named_checkpoint(checkpoint, family, config)
        report = QuantizeReport(checkpoint.path, out, chosen.name, keeps_mtp=keep_mtp)
        report.skipped = unused_tensors(named, config)
        report.mtp = draft_head(named, config)
        plan = plan_tensors(named, config, chosen, _kept(checkpoint, report))
        metadata = container_metadata(checkpoint, config, chosen.name)
        infos = [planned.info for planned in plan]
        _check_space(out, container_nbytes(family.arch_id, metadata, infos))
        began = time.perf_counter()
        sink.start(sum(planned.source_nbytes for planned in plan), len(plan))
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
        target = format_of(planned.info.qtype)
        figures = self._report.formats.setdefault(planned.info.qtype, FormatFigures())
        figures.tensors += 1
        figures.weights += planned.info.numel
        figures.nbytes += planned.info.nbytes
        cols = planned.info.rows_cols[1]
        step = max(1, CHUNK_ELEMENTS // max(cols, 1))
        for part in planned.parts:
            done = 0
            for begin in range(0, part.rows, step):
                end = min(begin + step, part.rows)
                packed = self._rows(part, planned.change, begin, end)
                values = self._values(part, planned, packed, begin, end)
                figures.squared_source += _sum_of_squares(values)
                encoded = packed
                if not planned.copied:
                    encoded = _encoded(part.info.name, values, target)
                    # without a name for what is decoded, which would stay in memory for the next chunk
                    figures.squared_error += _sum_of_squares(
                        target.dense(encoded, end - begin, cols) - values
                    )
                yield encoded.cpu().numpy().data
                share = part.nbytes * end // part.rows
                self._sink.tensor(planned.info.name, share - done)
                done = share
                self._checkpoint.release(part.info.name)

    def _rows(self, part: SourceRows, change: Change, begin: int, end: int) -> torch.Tensor:
        """Return packed rows begin .. end of a part, in the canonical order of rows."""
        packed = mapped_tensor(self._checkpoint.raw(part.info.name)).view(part.total, -1)
        heads = self._heads.get(change)
        if heads is None:
            return packed[part.first + begin : part.first + end].reshape(-1)
        return packed.index_select(0, rope_row_order(part.total, heads)[begin:end]).reshape(-1)

    def _values(
        self, part: SourceRows, planned: PlannedTensor, packed: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        """Return the canonical values of packed rows begin .. end as float32 [end - begin, cols]."""
        source = format_of(part.info.qtype)
        values = source.dense(packed.to(self._device), end - begin, planned.info.rows_cols[1])
        if not math.isfinite(_largest(values)):
            row, column = (~torch.isfinite(values)).nonzero()[0].tolist()
            place = f"row {part.first + begin + row}, block {column // source.group}"
            raise ArtifactError(
                f"holds a value that is not finite in {place}",
                path=self._checkpoint.path,
                field=f"tensor {part.info.name}",
                hint="the file is damaged; download or convert it again",
            )
        return undo_change(values, planned.change)


def _kept(checkpoint: Checkpoint, report: QuantizeReport) -> tuple[str, ...]:
    """Return the tensors that the container has although the model does not read them."""
    if not report.keeps_mtp:
        return ()
    if checkpoint.kind == "gguf":
        raise UnsupportedError(
            "a head that predicts further tokens cannot be kept from a GGUF file",
            hint="convert the original checkpoint, or leave --keep-mtp out",
        )
    if not report.mtp:
        raise ValidationError(
            "this checkpoint has no head that predicts further tokens", hint="leave --keep-mtp out"
        )
    report.skipped = [name for name in report.skipped if name not in set(report.mtp)]
    return tuple(report.mtp)


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
