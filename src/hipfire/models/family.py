"""What a model file offers to the rest of the house, and how model files are found.

A model file defines `MODEL_TYPES` (the `model_type` strings of Hugging Face configs) and `FAMILY`. Files are
found by looking through this package; there is no list to keep.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.base.types import CacheSpec, StateSpec
from hipfire.checkpoint.names import NameRule
from hipfire.layers.context import StepContext
from hipfire.layers.weights import WeightSource
from hipfire.models.fields import GgufFields
from hipfire.models.sizes import Sizes


class ModelConfig(Protocol):
    """What every model's configuration offers."""

    @property
    def sizes(self) -> Sizes:
        """The sizes that all families share."""

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what every attention layer needs of the cache, in layer order."""

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return what every recurrent layer keeps of a sequence, in layer order."""

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the canonical names and shapes of all tensors that the model reads."""

    def optional_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of tensors that the model uses where a checkpoint has them."""

    def to_hf(self) -> dict[str, Any]:
        """Return the configuration in the form of a Hugging Face `config.json`."""


class Model(Protocol):
    """A model with its weights; it holds no state of any sequence."""

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: ids run from 0 to below this."""

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the final hidden states [T, hidden] of the step's tokens [T], normalized for the head."""

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return float32 logits [R, vocab] of R final hidden states."""


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    `arch_id` is the number in an HFQM header. `names` are the rules between canonical and GGUF names. `tiny`
    holds the fields of a small config of the Hugging Face class `oracle_config`, whose model class `oracle`
    is the reference in tests.
    """

    arch_id: int
    gguf_architectures: tuple[str, ...]
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    from_gguf: Callable[[GgufFields], ModelConfig]
    build: Callable[[Any, WeightSource], Model]
    names: Sequence[NameRule]
    oracle: str
    oracle_config: str
    tiny: Mapping[str, Any]


@cache
def families() -> Mapping[str, ModelFamily]:
    """Return all families by model type."""
    found: dict[str, ModelFamily] = {}
    package = importlib.import_module("hipfire.models")
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"hipfire.models.{module_info.name}")
        for model_type in getattr(module, "MODEL_TYPES", ()):
            if model_type in found:
                raise InternalError(f"two model files claim the type {model_type!r}")
            found[model_type] = module.FAMILY
    return found


def family_of(model_type: str) -> ModelFamily:
    """Return the family of a Hugging Face `model_type`; UnsupportedError if no model file claims it."""
    known = families()
    if model_type not in known:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported", hint=f"supported: {', '.join(sorted(known))}"
        )
    return known[model_type]


def family_of_gguf(architecture: str) -> ModelFamily:
    """Return the family of a GGUF `general.architecture`; UnsupportedError if no model file claims it."""
    for family in families().values():
        if architecture in family.gguf_architectures:
            return family
    known = sorted({name for family in families().values() for name in family.gguf_architectures})
    raise UnsupportedError(
        f"GGUF architecture {architecture!r} is not supported", hint=f"supported: {', '.join(known)}"
    )
