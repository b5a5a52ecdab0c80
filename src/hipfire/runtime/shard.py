"""One process's part of a model: which rows and columns of which matrices, and a checkpoint of only these.

Attention is divided by heads: rows of the query, key and value matrices, columns of the output matrix. Of
the feed-forward block the rows of gate and up are divided, and the columns of down; of an untied head its
rows, if they come out even. Everything else is in every process. This file knows names of matrices, but no
file layout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from hipfire.base.errors import UnsupportedError
from hipfire.base.types import CacheSpec, StateSpec, TensorInfo, TextAssets
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint
from hipfire.layers.decoder import HEAD
from hipfire.models.family import ModelConfig
from hipfire.models.sizes import Sizes
from hipfire.quant.registry import format_of

# rotated formats rotate so many columns at a time
ROTATED_COLUMNS = 256
# matrices whose product is a sum over the processes
SUMMED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_SHARED = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
_HINT = "use another number for tp"


@dataclass(frozen=True, slots=True)
class Part:
    """Process `rank` of `size`."""

    rank: int
    size: int

    def cut(self, total: int) -> tuple[int, int]:
        """Return the first and the last plus one of this process's even share of `total`."""
        share = total // self.size
        return self.rank * share, (self.rank + 1) * share

    def kv_cut(self, kv_heads: int) -> tuple[int, int]:
        """Return which key/value heads this process has; several have the same one if there are too few."""
        if kv_heads >= self.size:
            return self.cut(kv_heads)
        head = self.rank * kv_heads // self.size
        return head, head + 1


def divided(sizes: Sizes, part: Part) -> Sizes:
    """Return the sizes of a part; UnsupportedError, with the reason, where they do not come out even."""
    size = part.size
    for count, what in ((sizes.heads, "query heads"), (sizes.intermediate, "feed-forward columns")):
        if count % size:
            raise UnsupportedError(
                f"the model's {count} {what} cannot be divided among {size} devices", hint=_HINT
            )
    if sizes.kv_heads % size and size % sizes.kv_heads:
        raise UnsupportedError(
            f"the model's {sizes.kv_heads} key/value heads cannot be divided among {size} devices", hint=_HINT
        )
    first, last = part.kv_cut(sizes.kv_heads)
    return replace(
        sizes, heads=sizes.heads // size, kv_heads=last - first, intermediate=sizes.intermediate // size
    )


class ShardConfig:
    """The configuration of a part: a `ModelConfig` with smaller sizes. `whole` is the model's own."""

    def __init__(self, whole: ModelConfig, part: Part) -> None:
        self.whole = whole
        self.part = part
        # configurations are dataclasses with sizes; nothing else in them depends on the divided ones
        config = cast(Any, whole)
        self.own: ModelConfig = replace(config, sizes=divided(whole.sizes, part))

    @property
    def sizes(self) -> Sizes:
        """The sizes of this part; the vocabulary is whole."""
        return self.own.sizes

    @property
    def cuts_head(self) -> bool:
        """Tell whether the head is a matrix of its own whose rows come out even."""
        return HEAD in self.own.tensors() and self.sizes.vocab_size % self.part.size == 0

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what every layer of this part needs of the cache."""
        return self.own.cache_specs()

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return what every recurrent layer keeps: models that have any are not divided."""
        return self.own.state_specs()

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and the shapes, in this part, of all tensors that the model reads."""
        shapes = dict(self.own.tensors())
        if self.cuts_head:
            rows, cols = shapes[HEAD]
            shapes[HEAD] = (rows // self.part.size, cols)
        return shapes

    def optional_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return those that are used where a checkpoint has them."""
        return self.own.optional_tensors()

    def to_hf(self) -> dict[str, Any]:
        """Return the whole model's configuration."""
        return self.whole.to_hf()


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which rows, and which bytes of every row, a part has of a stored matrix of `rows` rows."""

    rows: int
    taken: slice
    columns: slice | None


class ShardCheckpoint:
    """A checkpoint of which only this part's rows and columns are seen; `Checkpoint` otherwise.

    Raises UnsupportedError, with the matrix and the reason, where a matrix cannot be cut.
    """

    def __init__(self, named: NamedCheckpoint, config: ShardConfig) -> None:
        self._whole = named.checkpoint
        self._cuts: dict[str, _Cut] = {}
        tensors = dict(self._whole.tensors)
        own = config.tensors()
        for name, shape in config.whole.tensors().items():
            if len(shape) == 2 and own[name] != shape:
                info = named.require(name, shape).info
                cut, tensors[info.name] = _cut(name, info, shape, own[name], config)
                self._cuts[info.name] = cut
        self._tensors = tensors

    @property
    def kind(self) -> str:
        """Return which kind of files this is."""
        return self._whole.kind

    @property
    def path(self) -> Path:
        """Return the path that was opened."""
        return self._whole.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the tensors by name, as this part has them."""
        return self._tensors

    @property
    def model_config(self) -> Mapping[str, Any]:
        """Return the model's configuration."""
        return self._whole.model_config

    def raw(self, name: str) -> memoryview:
        """Return this part's bytes of a tensor: mapped if they are whole rows, else a copy."""
        data, cut = self._whole.raw(name), self._cuts.get(name)
        if cut is None:
            return data
        row = data.nbytes // cut.rows
        rows = data[cut.taken.start * row : cut.taken.stop * row]
        if cut.columns is None:
            return rows
        matrix = np.frombuffer(rows, dtype=np.uint8).reshape(-1, row)
        part: Any = np.ascontiguousarray(matrix[:, cut.columns])
        return memoryview(part).cast("B")

    def release(self, name: str, nbytes: int | None = None) -> None:
        """Let a tensor's pages leave resident memory."""
        self._whole.release(name, None if name in self._cuts else nbytes)

    def text_assets(self) -> TextAssets:
        """Return everything about text that the checkpoint carries."""
        return self._whole.text_assets()

    def close(self) -> None:
        """Give back the files."""
        self._whole.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def shard_names(named: NamedCheckpoint, config: ShardConfig) -> NamedCheckpoint:
    """Return the checkpoint of a part under the names of the whole; raises as `ShardCheckpoint`."""
    checkpoint: Checkpoint = ShardCheckpoint(named, config)
    found = copy.copy(named)
    found.checkpoint = checkpoint
    return found


def _cut(
    name: str, info: TensorInfo, shape: tuple[int, ...], own: tuple[int, ...], config: ShardConfig
) -> tuple[_Cut, TensorInfo]:
    (rows, cols), part, fmt = shape, config.part, format_of(info.qtype)
    if not fmt.has_whole_rows(info.nbytes, rows, cols):
        raise _refused(name, "its blocks run over the ends of rows")
    if own[1] == cols:
        shared = name.endswith(_SHARED)
        head_dim = config.sizes.head_dim
        first, last = part.kv_cut(rows // head_dim) if shared else part.cut(rows)
        scale = head_dim if shared else 1
        taken, columns = slice(first * scale, last * scale), None
    else:
        step = math.lcm(fmt.group, ROTATED_COLUMNS if fmt.rotated else 1)
        if own[1] % step:
            raise _refused(name, f"{fmt.name} groups {step} columns, and a part would have {own[1]}")
        width = fmt.row_nbytes(own[1])
        taken, columns = slice(0, rows), slice(part.rank * width, (part.rank + 1) * width)
    return _Cut(rows, taken, columns), replace(info, shape=own, nbytes=fmt.nbytes(*own))


def _refused(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{name} cannot be divided among devices: {reason}", hint=_HINT)


def whole_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the model that a part belongs to, or of a model that is not divided."""
    return config.whole if isinstance(config, ShardConfig) else config
