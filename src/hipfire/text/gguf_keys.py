"""The types of the `tokenizer.ggml.*` keys of a GGUF file, checked before anything relies on them.

This file knows what kind of value each key holds, not what the values mean or which keys a file must have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hipfire.base.errors import ArtifactError

_PREFIX: Final = "tokenizer.ggml."
_HINT: Final = "the file is damaged or badly converted; fetch or convert the model again"
_TEXTS: Final = ("model", "pre")
_FLAGS: Final = ("add_bos_token", "add_eos_token", "add_space_prefix")
_LISTS: Final[tuple[tuple[str, tuple[type, ...], str], ...]] = (
    ("tokens", (str,), "strings"),
    ("merges", (str,), "strings"),
    ("token_type", (int,), "integers"),
    ("scores", (int, float), "numbers"),
)


def check_types(keys: Mapping[str, Any]) -> None:
    """Raise ArtifactError, naming the key, for a value of the wrong type; keys may be absent or None."""
    for name in _TEXTS:
        _check(keys, name, isinstance(keys.get(_PREFIX + name), str), "a string")
    for name in _FLAGS:
        _check(keys, name, isinstance(keys.get(_PREFIX + name), bool), "true or false")
    for name, types, words in _LISTS:
        _check(keys, name, _is_list(keys.get(_PREFIX + name), types), f"a list of {words}")
    for key, value in keys.items():
        if key.startswith(_PREFIX) and key.endswith("_token_id"):
            good = _is_list(value if isinstance(value, list | tuple) else [value], (int,))
            _check(keys, key.removeprefix(_PREFIX), good, "a token id or a list of them")


def _check(keys: Mapping[str, Any], name: str, good: bool, wanted: str) -> None:
    value = keys.get(_PREFIX + name)
    if value is not None and not good:
        raise ArtifactError(
            f"the value, of type {type(value).__name__}, is not {wanted}", field=_PREFIX + name, hint=_HINT
        )


def _is_list(value: Any, types: tuple[type, ...]) -> bool:
    """Say whether `value` is a list of these types; true and false are no numbers."""
    return isinstance(value, list | tuple) and all(
        isinstance(item, types) and not isinstance(item, bool) for item in value
    )
