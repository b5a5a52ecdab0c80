"""Where chat templates hide in tokenizer configs and GGUF keys, and how several become one table.

Does not know Jinja; a template is text here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hipfire.base.errors import ArtifactError

DEFAULT = "default"
_GGUF_KEY = "tokenizer.chat_template"
_GGUF_NAMES = "tokenizer.chat_templates"


def from_config(config: Mapping[str, Any], *, path: Path, field: str) -> dict[str, str]:
    """Return the templates of a `tokenizer_config.json` by name; a single one is "default".

    Raises:
        ArtifactError: `chat_template` is neither a string nor a list of {name, template}.
    """
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    templates = {}
    for item in value if isinstance(value, list) else [value]:
        pair = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(pair[0], str) or not isinstance(pair[1], str):
            raise ArtifactError(
                "must be a string or a list of {name, template}", path=path, field=f"{field}.chat_template"
            )
        templates[pair[0]] = pair[1]
    return templates


def from_gguf(keys: Mapping[str, Any], *, path: Path) -> dict[str, str]:
    """Return the templates among GGUF keys: `tokenizer.chat_template` is "default", a suffix is a name.

    Raises:
        ArtifactError: one of them is not a string.
    """
    templates = {}
    for key, value in keys.items():
        if key == _GGUF_KEY or key.startswith(f"{_GGUF_KEY}."):
            if not isinstance(value, str):
                raise ArtifactError("must be a string", path=path, field=key)
            templates[key[len(_GGUF_KEY) + 1 :] or DEFAULT] = value
    return templates


def vocabulary_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `tokenizer.*` keys that are not chat templates."""
    return {
        key: value
        for key, value in keys.items()
        if key.startswith("tokenizer.") and key != _GGUF_NAMES and not f"{key}.".startswith(f"{_GGUF_KEY}.")
    }


def folded(config: Mapping[str, Any], templates: Mapping[str, str]) -> dict[str, Any]:
    """Return `config` with `chat_template` holding all `templates`, so that one object carries everything."""
    if not templates:
        return dict(config)
    if set(templates) == {DEFAULT}:
        return {**config, "chat_template": templates[DEFAULT]}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    return {**config, "chat_template": listed}
