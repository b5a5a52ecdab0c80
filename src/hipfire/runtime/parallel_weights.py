"""A model that is spread over processes, as one of them builds it: the model's own code on smaller sizes.

What the processes have to do together hangs on the weights, so layers and models know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch

from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.kernels.collective import Group, Spread
from hipfire.layers.decoder import HEAD
from hipfire.layers.weights import ExpertStack, ExpertTensors, Joined, Weight, WeightSource
from hipfire.models.family import Model, ModelConfig, ModelFamily
from hipfire.runtime.shard import SUMMED, Part, ShardConfig, shard_names


class SpreadWeights:
    """The `WeightSource` of a part: `source` has its tensors, the group makes products whole."""

    def __init__(self, source: WeightSource, config: ShardConfig, group: Group) -> None:
        self._source = source
        self._config = config
        self._group = group

    @property
    def device(self) -> torch.device:
        """Return where the tensors are."""
        return self._source.device

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint holds a tensor of this canonical name."""
        return self._source.has(name)

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """Return this part of a matrix; of a head that is cut, `rows` are those of the whole."""
        if name == HEAD and self._config.cuts_head:
            part = self._source.matrix(name, rows // self._config.part.size, cols)
            return replace(part, spread=Spread("gather", self._group))
        weight = self._source.matrix(name, rows, cols)
        return replace(weight, spread=Spread("sum", self._group)) if name.endswith(SUMMED) else weight

    def joined(self, parts: Sequence[tuple[str, int]], cols: int) -> Joined:
        """Return matrices that read the same activations: all of them cut by rows, so nothing is summed."""
        return self._source.joined(parts, cols)

    def experts(self, projections: Sequence[ExpertTensors]) -> tuple[ExpertStack, ...]:
        """Raise UnsupportedError: experts are not divided."""
        raise UnsupportedError(
            f"the experts of {projections[0].name} cannot be divided among devices",
            hint="load mixtures of experts with tp=1",
        )

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """Return a vector, which is whole in every process."""
        return self._source.vector(name, *shape)


class Described(Protocol):
    """What is known of a model before it is loaded: a dataclass."""

    @property
    def family(self) -> ModelFamily:
        """Its family, which builds it."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""

    @property
    def named(self) -> NamedCheckpoint:
        """Its tensors."""


D = TypeVar("D", bound=Described)


@dataclass(frozen=True, slots=True)
class Shard:
    """One process of a group that shares a model."""

    part: Part
    group: Group

    def of(self, found: D) -> D:
        """Return what this process has to load of a model; UnsupportedError where it cannot be divided."""
        if found.config.state_specs():
            raise UnsupportedError(
                "recurrent layers cannot be divided among devices", hint="load this model with tp=1"
            )
        family, config = found.family, ShardConfig(found.config, self.part)

        def build(_: Any, weights: WeightSource) -> Model:
            return family.build(config.own, SpreadWeights(weights, config, self.group))

        named = shard_names(found.named, config)
        part: D = replace(cast(Any, found), config=config, named=named, family=replace(family, build=build))
        return part


class _Planned:
    """A group that only plans are made for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def direct(self, x: torch.Tensor) -> bool:
        return True

    def sum(self, x: torch.Tensor) -> None:
        raise InternalError("a model that was only planned was run")

    def sum_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.sum(x)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.sum(x)


def planned_shard(size: int) -> Shard:
    """Return the first part of a model that is to be divided, for plans of what it takes."""
    return Shard(Part(0, size), _Planned(size))
