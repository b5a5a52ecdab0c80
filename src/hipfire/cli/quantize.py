"""`hipfire quantize`: convert a checkpoint, with a progress bar and a table of what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hipfire.base import log
from hipfire.base.errors import ValidationError
from hipfire.base.printable import printable
from hipfire.base.qtypes import qtype_name
from hipfire.checkpoint.library import open_library
from hipfire.cli.output import size_text, write, write_json, write_table
from hipfire.cli.progress import TensorProgress, make_progress
from hipfire.cli.settings import load_settings, use_threads
from hipfire.quantize.policy import recipe

if TYPE_CHECKING:
    from hipfire.quantize.report import FormatFigures, QuantizeReport

HEADER = ("format", "tensors", "weights", "bytes", "bits/weight", "relative RMS error")


def quantize(
    source: str,
    /,
    *,
    fmt: Annotated[str, Parameter(name="--format")] = "mq4",
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    force: Annotated[bool, Parameter(negative="")] = False,
    device: str = "cpu",
    keep_mtp: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(name=["--json", "-j"], negative="")] = False,
) -> None:
    """Convert a GGUF file or a safetensors folder into an HFQM container.

    Parameters
    ----------
    source
        Path, tag or installed name of the model to convert.
    fmt
        mq4, mq4v1, hf4, mq6, mq6v2, hf6, q8 or f16.
    out
        File to write; by default the source's name with the format as suffix, in the current folder.
    force
        Overwrite an existing file.
    device
        Where to compute: cpu, or a GPU such as cuda.
    keep_mtp
        Keep the head that predicts further tokens, which is listed and left out otherwise.
    json
        Print the report as JSON.
    """
    chosen = recipe(fmt)
    config = load_settings()
    threads = config.resolve("hardware.threads").value
    local = open_library(config).require(source)
    target = out if out is not None else Path(f"{_plain_name(local.path)}.{chosen.name}")
    if target.exists() and not target.is_file():
        raise ValidationError(f"{target} is not a regular file", hint="give the name of a file with -o")
    if target.exists() and not force:
        raise ValidationError(f"{target} exists", hint="give another name with -o, or --force to replace it")

    # torch takes a second or two to import
    from hipfire.quantize.pipeline import quantize as convert  # noqa: PLC0415

    use_threads(threads)
    progress = TensorProgress(make_progress(), f"{local.path.name} to {fmt}")
    report = convert(local.path, chosen.name, target, device=device, keep_mtp=keep_mtp, progress=progress)
    if json:
        write_json(report.to_json())
        return
    _print(report)


def _plain_name(source: Path) -> str:
    """Return a source's name without its suffix; the dots in a folder's name are part of it."""
    return source.name if source.is_dir() else source.stem


def _print(report: QuantizeReport) -> None:
    rows = [_row(qtype_name(qtype), report.formats[qtype]) for qtype in sorted(report.formats)]
    rows.append(_row("all", report.total))
    write_table(HEADER, rows, right=frozenset(range(1, len(HEADER))))
    drafts = set(report.mtp)
    for name in report.skipped:
        reason = "it predicts further tokens; --keep-mtp keeps it"
        if name not in drafts:
            reason = "the model has no use for it"
        log.logger().info(f"left out: {name} ({reason})")
    write(f"{printable(str(report.output))}: {size_text(report.file_bytes)} in {report.seconds:.1f} s")


def _row(name: str, figures: FormatFigures) -> tuple[str, ...]:
    return (
        name,
        str(figures.tensors),
        str(figures.weights),
        str(figures.nbytes),
        f"{figures.bits_per_weight:.3f}",
        f"{figures.relative_rms:.2e}" if figures.relative_rms else "-",
    )
