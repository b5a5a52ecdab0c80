"""Sizes of model files: bytes, weights, bits per weight. This file reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.shard_names import siblings
from hipfire.checkpoint.source import open_checkpoint

# a table of which a step reads a row, unless it is the head too
_EMBEDDINGS, _HEADS = {"token_embd.weight", "model.embed_tokens.weight"}, {"output.weight", "lm_head.weight"}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file: sizes in bytes, and the number of weights.

    `step_bytes` are the tensors that every step reads whole. `memory_bytes` is what all tensors take when
    loaded, if that is known.
    """

    name: str
    nbytes: int
    weights: int
    tensor_bytes: int
    step_bytes: int
    memory_bytes: int | None = None

    @property
    def file_bits(self) -> float:
        """Return bits per weight, with vocabulary and metadata."""
        return 8 * self.nbytes / self.weights

    @property
    def tensor_bits(self) -> float:
        """Return bits per weight of the tensors alone."""
        return 8 * self.tensor_bytes / self.weights

    @property
    def memory_bits(self) -> float | None:
        """Return bits per weight in memory."""
        return None if self.memory_bytes is None else 8 * self.memory_bytes / self.weights

    def to_json(self) -> dict[str, Any]:
        """Return all sizes as plain JSON values."""
        return {
            "file": self.name,
            "bytes": self.nbytes,
            "weights": self.weights,
            "tensor_bytes": self.tensor_bytes,
            "bytes_per_step": self.step_bytes,
            "memory_bytes": self.memory_bytes,
        }


def check_gguf(path: Path) -> None:
    """Raise ValidationError if a model is not in the one format that both sides read."""
    with open_checkpoint(path) as checkpoint:
        if checkpoint.kind != "gguf":
            raise ValidationError(f"{path} is no GGUF file, and the peer reads nothing else")


def describe(path: Path) -> ModelFile:
    """Return the sizes of a model: all files of a split one together."""
    with open_checkpoint(path) as checkpoint:
        tensors = dict(checkpoint.tensors)
    return ModelFile(
        name=path.name,
        nbytes=sum(part.stat().st_size for part in siblings(path)),
        weights=sum(info.numel for info in tensors.values()),
        tensor_bytes=sum(info.nbytes for info in tensors.values()),
        step_bytes=sum(info.nbytes for info in read_whole(tensors)),
    )


def read_whole(tensors: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """Return the tensors that a step reads whole: all but an embedding that is not the head as well."""
    tied = _HEADS.isdisjoint(tensors)
    return [info for name, info in tensors.items() if tied or name not in _EMBEDDINGS]
