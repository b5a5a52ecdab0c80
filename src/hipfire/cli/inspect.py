"""`hipfire inspect`: what a model file holds. Reads headers only; needs no tensor library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from hipfire.base.errors import ValidationError
from hipfire.base.printable import one_line
from hipfire.base.qtypes import qtype_name
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.source import Checkpoint, open_checkpoint
from hipfire.cli.output import size_text, write, write_fields, write_json, write_table
from hipfire.cli.settings import load_library

VALUE_WIDTH = 60
# a vocabulary has a hundred thousand entries; only its length says something
LONG_LIST = 8


def inspect(
    model: str,
    /,
    *,
    tensors: int | None = None,
    as_json: Annotated[bool, Parameter(name=["-j", "--json"], negative="")] = False,
) -> None:
    """Show the kind, metadata and tensors of a model, with bits per weight.

    Parameters
    ----------
    model
        Path, tag or name.
    tensors
        List at most this many tensors; all of them without it. Totals always count all.
    as_json
        Write JSON.
    """
    if tensors is not None and tensors < 0:
        raise ValidationError(f"--tensors: {tensors} is not allowed", hint="use 0 or more")
    path = load_library().require(model).path
    with open_checkpoint(path) as checkpoint:
        infos = list(checkpoint.tensors.values())
        facts = _facts(checkpoint, infos)
        listed = infos[:tensors]
        if as_json:
            write_json(facts | {"totals": _totals(infos), "tensors": [_as_json(info) for info in listed]})
        else:
            _write_text(facts, infos, listed)


def bits_per_weight(nbytes: int, weights: int) -> float:
    """Return the bits of storage that one weight takes; 0 for no weights."""
    return 8 * nbytes / weights if weights else 0.0


def _facts(checkpoint: Checkpoint, infos: list[TensorInfo]) -> dict[str, Any]:
    config = checkpoint.model_config
    weights, nbytes = sum(info.numel for info in infos), sum(info.nbytes for info in infos)
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "architecture": _architecture(config),
        "tensor_count": len(infos),
        "weights": weights,
        "tensor_bytes": nbytes,
        "bits_per_weight": round(bits_per_weight(nbytes, weights), 4),
        "metadata": {str(name): _summary(value) for name, value in config.items()},
    }


def _architecture(config: Mapping[str, Any]) -> str:
    for name in ("general.architecture", "model_type"):
        if isinstance(config.get(name), str):
            return str(config[name])
    return "unknown"


def _summary(value: Any) -> Any:
    """Return a metadata value short enough to read; long lists and tables become their size."""
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    if isinstance(value, Mapping):
        return {str(name): _summary(inner) for name, inner in value.items()}
    try:
        items = list(value)
    except TypeError:
        return str(value)
    return f"list of {len(items)}" if len(items) > LONG_LIST else [_summary(item) for item in items]


def _totals(infos: list[TensorInfo]) -> dict[str, dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {}
    for info in infos:
        total = totals.setdefault(qtype_name(info.qtype), {"tensors": 0, "weights": 0, "nbytes": 0})
        total["tensors"] += 1
        total["weights"] += info.numel
        total["nbytes"] += info.nbytes
    for total in totals.values():
        total["bits_per_weight"] = round(bits_per_weight(total["nbytes"], total["weights"]), 4)
    return totals


def _as_json(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "qtype": qtype_name(info.qtype),
        "shape": list(info.shape),
        "nbytes": info.nbytes,
        "bits_per_weight": round(bits_per_weight(info.nbytes, info.numel), 4),
    }


def _write_text(facts: dict[str, Any], infos: list[TensorInfo], listed: list[TensorInfo]) -> None:
    metadata = facts.pop("metadata")
    write_fields({name: value for name, value in facts.items() if name != "tensor_bytes"})
    write(f"size: {size_text(facts['tensor_bytes'])}")
    write_fields({"metadata": [f"{name}: {_line(value)}" for name, value in metadata.items()]})
    write()
    rows = [
        (
            info.name,
            qtype_name(info.qtype),
            "x".join(str(extent) for extent in info.shape),
            str(info.nbytes),
            f"{bits_per_weight(info.nbytes, info.numel):.3f}",
        )
        for info in listed
    ]
    write_table(("TENSOR", "QTYPE", "SHAPE", "BYTES", "BITS/WEIGHT"), rows, right=frozenset({3, 4}))
    if len(listed) < len(infos):
        write(f"... {len(infos) - len(listed)} more tensors")
    write()
    totals = [
        (
            name,
            str(total["tensors"]),
            str(total["weights"]),
            str(total["nbytes"]),
            f"{total['bits_per_weight']:.3f}",
        )
        for name, total in _totals(infos).items()
    ]
    write_table(
        ("QTYPE", "TENSORS", "WEIGHTS", "BYTES", "BITS/WEIGHT"), totals, right=frozenset({1, 2, 3, 4})
    )


def _line(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = one_line(text)
    return text if len(text) <= VALUE_WIDTH else f"{text[:VALUE_WIDTH]}... ({len(text)} characters)"
