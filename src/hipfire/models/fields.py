"""Reading a checkpoint's configuration field by field, and refusing what a model does not implement.

A missing or ill-typed field is an `ArtifactError` that names it; a value that the model cannot honour is an
`UnsupportedError`. Nothing is guessed, nothing is ignored in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import TensorInfo

Number = TypeVar("Number", int, float)


class Fields:
    """Typed access to a mapping of configuration values.

    `what` names the mapping in messages; `defaults` are the values of fields that it leaves out or nulls.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        what: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.values = {**(defaults or {}), **{key: item for key, item in values.items() if item is not None}}
        self.what = what
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as it is, or `default` if it is absent."""
        return self.values.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a non-negative integer."""
        return self._number(key, default, int)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number as float."""
        return self._number(key, default, float)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ArtifactError(f"is {value!r}, not a boolean", field=self._name(key))
        return value

    def per_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return one integer per layer; a scalar stands for all layers."""
        value = self.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != layers:
                raise ArtifactError(f"has {len(value)} entries for {layers} layers", field=self._name(key))
            return [_checked(item, int, self._name(key)) for item in value]
        return [self.integer(key, default)] * layers

    def uniform(self, key: str, layers: int, default: int | None = None) -> int:
        """Return the one value that all layers share; UnsupportedError if they differ."""
        values = set(self.per_layer(key, layers, default))
        if len(values) != 1:
            raise UnsupportedError(f"{self._name(key)} differs between layers: {sorted(values)}")
        return values.pop()

    def require(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Return the value if the model implements it, else raise UnsupportedError."""
        value = self.get(key, default)
        if value not in allowed:
            raise UnsupportedError(
                f"{self._name(key)} = {value!r} is not supported",
                hint=f"supported: {', '.join(repr(item) for item in allowed)}",
            )
        return value

    def _number(self, key: str, default: Number | None, kind: type[Number]) -> Number:
        value = self.get(key, default)
        if value is None:
            raise ArtifactError("is missing", field=self._name(key), hint="the checkpoint is incomplete")
        return _checked(value, kind, self._name(key))

    def _name(self, key: str) -> str:
        return f"{self.what} {self.prefix}{key}"


class GgufFields(Fields):
    """The metadata of a GGUF file, keys under the architecture's prefix, and its tensors."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.architecture = str(metadata.get("general.architecture", ""))
        super().__init__(metadata, "GGUF key", f"{self.architecture}.")
        self.tensors = tensors

    def vocab_rows(self) -> int:
        """Return the rows of the token embedding."""
        info = self.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2:
            raise ArtifactError("is missing or not a matrix", field="tensor token_embd.weight")
        return info.shape[0]


def text_fields(config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Fields:
    """Return the text part of a Hugging Face config: `text_config` of a multimodal one, else all of it.

    `defaults` are those of the family's config class, which published configs rely on.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return Fields(nested, "config.json text_config", defaults=defaults)
    return Fields(config, "config.json", defaults=defaults)


def rope_parameters(fields: Fields, theta: float = 10000.0) -> dict[str, Any]:
    """Return one `rope_parameters` object from the current or the older pair of config keys."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ArtifactError(f"is {parameters!r}, not an object", field="config.json rope_parameters")
    merged = dict(parameters)
    merged.setdefault("rope_theta", fields.number("rope_theta", theta))
    return merged


def gguf_rope_parameters(fields: GgufFields, theta: float) -> dict[str, Any]:
    """Return the `rope_parameters` object that a GGUF file's rope keys mean."""
    parameters: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", theta)}
    kind = fields.get("rope.scaling.type", "none")
    if kind != "none":
        parameters["rope_type"] = kind
        parameters["factor"] = fields.number("rope.scaling.factor")
    elif fields.get("rope.scaling.factor", 1.0) != 1.0:
        parameters.update(rope_type="linear", factor=fields.number("rope.scaling.factor"))
    return parameters


def _checked(value: Any, kind: type[Number], name: str) -> Number:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not plain or (kind is int and (value != int(value) or value < 0)):
        raise ArtifactError(f"is {value!r}, not a usable {kind.__name__}", field=name)
    return kind(value)
