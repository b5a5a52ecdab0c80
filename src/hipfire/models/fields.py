"""Reading a checkpoint's configuration field by field, and refusing what a model does not implement.

A missing or ill-typed field is an `ArtifactError` that names it; a value that the model cannot honour is an
`UnsupportedError`. Nothing is guessed, nothing is ignored in silence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import TensorInfo

# no size of a real model comes near these; larger ones are damage, and would cost time before they show
LARGEST: Final = 2**31 - 1
LARGEST_NUMBER: Final = 1e30


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
        """Return an integer of at least one."""
        return _integer(self._present(key, default), self.name(key))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero."""
        return _positive(self._present(key, default), self.name(key))

    def optional_number(self, key: str) -> float | None:
        """Return a finite number above zero, or None if the field is absent."""
        value = self.get(key)
        return None if value is None else _positive(value, self.name(key))

    def strings(self, key: str) -> list[str] | None:
        """Return a list of strings, or None if the field is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ArtifactError(f"is {value!r}, not a list of strings", field=self.name(key))
        return value

    def nested(self, key: str) -> Fields | None:
        """Return the object under `key` as fields, or None if it is absent or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise ArtifactError(f"is {value!r}, not an object", field=self.name(key))
        return Fields(value, f"{self.name(key)}.")

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ArtifactError(f"is {value!r}, not a boolean", field=self.name(key))
        return value

    def uniform(self, key: str, layers: int, default: int | None = None) -> int:
        """Return the one value that all layers share, stored as a scalar or as one entry per layer.

        Raises UnsupportedError if layers differ.
        """
        value = self.get(key)
        if not isinstance(value, list):
            return self.integer(key, default)
        if len(value) != layers:
            raise ArtifactError(f"has {len(value)} entries for {layers} layers", field=self.name(key))
        values = {_integer(item, self.name(key)) for item in value}
        if len(values) > 1:
            raise UnsupportedError(f"{self.name(key)} differs between layers: {sorted(values)}")
        return values.pop()

    def require(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Return the value if the model implements it, else raise UnsupportedError."""
        value = self.get(key, default)
        if value not in allowed:
            raise UnsupportedError(
                f"{self.name(key)} = {value!r} is not supported",
                hint=f"supported: {', '.join(repr(item) for item in allowed)}",
            )
        return value

    def name(self, key: str) -> str:
        """Return the field's name for messages."""
        return f"{self.what}{self.prefix}{key}"

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ArtifactError("is missing", field=self.name(key), hint="the checkpoint is incomplete")
        return value


class GgufFields(Fields):
    """The metadata of a GGUF file, keys under the architecture's prefix, and its tensors."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.architecture = str(metadata.get("general.architecture", ""))
        super().__init__(metadata, "GGUF key ", f"{self.architecture}.")
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
        return Fields(nested, "config.json text_config.", defaults=defaults)
    return Fields(config, "config.json ", defaults=defaults)


def _integer(value: Any, name: str) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 1 <= value <= LARGEST:
        raise ArtifactError(f"is {_shown(value)}, not an integer from 1 to {LARGEST}", field=name)
    return int(value)


def _positive(value: Any, name: str) -> float:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not 0 < value < LARGEST_NUMBER:
        raise ArtifactError(f"is {_shown(value)}, not a number above zero", field=name)
    return float(value)


def _shown(value: Any) -> str:
    return reprlib.repr(value)
