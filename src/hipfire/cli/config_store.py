"""Changing the two settings files: under a lock, written beside and renamed, unknown content kept.

Comments and the order of keys inside a table are not kept, since TOML is read into plain tables. Reading and
precedence are base/config.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock

from hipfire.base.config import SCHEMA_VERSION, Config, flatten, read_document, require_key
from hipfire.base.config_keys import Value, find_key
from hipfire.base.errors import HipfireError, ValidationError

Table = MutableMapping[str, Any]


def set_value(config: Config, name: str, text: str, *, model: str | None = None) -> Value:
    """Check `text` by the key's rule, store it globally or for one model, and return the value."""
    key = require_key(name)
    if model is not None and key.scope == "process":
        raise ValidationError(f"{key.name} cannot differ per model", hint="set it without --model")
    path = _file(config, model)
    value = key.parse(text, source=str(path))

    def change(document: Table) -> None:
        table = _table(document, model, path)
        _remove(table, {key.name, key.flat})
        section, _, leaf = key.name.partition(".")
        inner = table.setdefault(section, {})
        if not isinstance(inner, MutableMapping):
            raise ValidationError(f"{path}: {section} is not a table", hint="correct the file")
        inner[leaf] = key.stored(value)

    _edit(path, change)
    return value


def reset_values(config: Config, name: str | None, *, model: str | None = None) -> list[str]:
    """Remove one override, or all of them; return the dotted names that are gone.

    A name that hipfire does not know can be removed if it stands in the file. A model's `path` stays.
    """
    path = _file(config, model)
    removed: list[str] = []

    def change(document: Table) -> None:
        table = _table(document, model, path)
        kept = ("schema_version", "path") if model is not None else ("schema_version",)
        if name is None:
            removed.extend(dotted for dotted, _ in flatten(table) if dotted not in kept)
            for entry in [entry for entry in table if entry not in kept]:
                del table[entry]
        else:
            key = find_key(name)
            removed.extend(_remove(table, {key.name, key.flat} if key is not None else {name}))
        models = document.get("models")
        if model is not None and isinstance(models, MutableMapping) and not models.get(model):
            models.pop(model, None)
            if not models:
                del document["models"]

    if name is not None and find_key(name) is None and not _stands_in(path, name, model):
        require_key(name)
    _edit(path, change)
    return removed


def _file(config: Config, model: str | None) -> Path:
    return config.config_file if model is None else config.catalog_file


def _stands_in(path: Path, name: str, model: str | None) -> bool:
    return any(dotted == name for dotted, _ in flatten(_table(read_document(path), model, path)))


def _table(document: Table, model: str | None, path: Path) -> Table:
    """Return the table that holds the overrides, made if it is missing."""
    if model is None:
        return document
    table = document
    for name in ("models", model):
        inner = table.setdefault(name, {})
        if not isinstance(inner, MutableMapping):
            raise ValidationError(f"{path}: {name} is not a table", hint="correct the file")
        table = inner
    return table


def _remove(table: Table, names: set[str], prefix: str = "") -> list[str]:
    """Remove leaves by dotted name, in every spelling, and the tables that this leaves empty."""
    removed: list[str] = []
    for entry in list(table):
        value, dotted = table[entry], prefix + entry
        if isinstance(value, MutableMapping):
            inner = _remove(value, names, f"{dotted}.")
            removed.extend(inner)
            if inner and not value:
                del table[entry]
        elif dotted in names:
            del table[entry]
            removed.append(dotted)
    return removed


def _edit(path: Path, change: Callable[[Table], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            document: Table = read_document(path)
            change(document)
            document.pop("schema_version", None)
            ordered = {"schema_version": SCHEMA_VERSION, **document}
            beside = path.with_name(path.name + ".new")
            with beside.open("wb") as file:
                tomli_w.dump(ordered, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
    except OSError as error:
        raise HipfireError(f"{path} cannot be written: {error.strerror or error}") from error
