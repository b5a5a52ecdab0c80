"""Plain data that passes between rows of the house. No tensors, no files, no third-party packages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    `shape` is row-major, [out, in] for a matrix. `qtype` is a number of `base.qtypes`. `nbytes` is the size
    of the stored bytes; `group_size` is the container's informative field (0 where there is none).
    """

    name: str
    qtype: int
    shape: tuple[int, ...]
    nbytes: int
    group_size: int = 0

    @property
    def numel(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    @property
    def rows_cols(self) -> tuple[int, int]:
        """Return the tensor as a matrix: (product of the leading dims, last dim); a vector is one row."""
        cols = self.shape[-1] if self.shape else 1
        return (self.numel // cols if cols else 0), cols


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Everything in a checkpoint that tells how to turn text into tokens and back.

    `tokenizer_json` is the raw text of a Hugging Face `tokenizer.json`, or None. `gguf` holds the
    `tokenizer.ggml.*` keys (full key names) of a GGUF vocabulary, or is None. The other fields are parsed
    JSON objects, empty where the checkpoint has none. `chat_templates` maps a template's name to its Jinja
    source ("default" for the only one).
    """

    tokenizer_json: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one attention layer needs of a key/value cache.

    `kv_heads` heads of `head_dim` elements per position; `window` is the number of positions that a query
    sees, itself included, or None for all of them.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one gated DeltaNet layer keeps of a sequence, in float32.

    `channels` and `width` are those of its convolution, which keeps the last `width - 1` inputs; the matrix
    has `key_dim` rows and `value_dim` columns for each of `value_heads`. `key_heads` share them out.
    """

    channels: int
    width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def tail_shape(self) -> tuple[int, int]:
        """Return the shape of the convolution's tail."""
        return self.channels, self.width - 1

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Return the shape of the matrix."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def tail_nbytes(self) -> int:
        """Return the bytes of the convolution's tail."""
        return 4 * math.prod(self.tail_shape)

    @property
    def matrix_nbytes(self) -> int:
        """Return the bytes of the matrix."""
        return 4 * math.prod(self.matrix_shape)
