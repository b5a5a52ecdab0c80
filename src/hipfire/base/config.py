"""Settings: reading the two TOML files, and deciding which layer's value wins.

Layers, the strongest first: a one-shot command-line value, an environment variable, the model's own table
in `models.toml`, the global `config.toml`, the registry card, the model file's generation config, the
built-in default. An explicit global value beats the card: the user wrote it. Files are sparse, so a value
that nobody wrote never shadows anything. This file reads and never writes (cli/config_store.py does).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hipfire.base import env as paths
from hipfire.base.config_keys import BY_NAME, Key, Value, find_key
from hipfire.base.errors import ValidationError
from hipfire.base.safe_names import check_name

SCHEMA_VERSION = 1
Origin = Literal["cli", "env", "model", "global", "card", "model_file", "default"]

# names of a Hugging Face generation_config.json, and the settings that they stand for
GENERATION_CONFIG_KEYS: Mapping[str, str] = {
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "top_k": "generation.top_k",
    "min_p": "generation.min_p",
    "repetition_penalty": "generation.repeat_penalty",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value that one layer offers; `source` is the file, variable or option that it came from."""

    origin: Origin
    source: str
    value: Value


@dataclass(frozen=True, slots=True)
class Resolved:
    """The winning candidate of a key and those that it shadows, the strongest first."""

    key: Key
    winner: Candidate
    shadowed: tuple[Candidate, ...]

    @property
    def value(self) -> Value:
        """Return the effective value; None means automatic."""
        return self.winner.value


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model's table in `models.toml`: its overrides by dotted key, and a file that the name stands for."""

    values: Mapping[str, Value] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True)
class Config:
    """Both settings files and the environment; bad entries are left out and listed in `warnings`."""

    config_file: Path
    catalog_file: Path
    environment: Mapping[str, str]
    values: Mapping[str, Value] = field(default_factory=dict)
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def resolve(
        self,
        name: str,
        *,
        cli: Mapping[str, Value] | None = None,
        model: str | None = None,
        card: Mapping[str, Value] | None = None,
        model_file: Mapping[str, Value] | None = None,
    ) -> Resolved:
        """Return the effective value of one key (dotted or flat name).

        `cli` holds one-shot values; None there means "not given". `card` is a registry card's settings and
        `model_file` the output of `generation_defaults`; all three are keyed by dotted or flat names. `model`
        is the model's name in `models.toml` (its tag, or its file name without a suffix).
        """
        key = require_key(name)
        found = tuple(self._candidates(key, cli or {}, model, card or {}, model_file or {}))
        return Resolved(key, found[0], found[1:])

    def _candidates(
        self,
        key: Key,
        cli: Mapping[str, Value],
        model: str | None,
        card: Mapping[str, Value],
        model_file: Mapping[str, Value],
    ) -> Iterator[Candidate]:
        given = _pick(cli, key)
        if given is not None:
            yield Candidate("cli", "command line", key.check(given, source="command line"))
        variable = paths.get(key.env, self.environment)
        if variable is not None:
            yield Candidate("env", key.env, key.parse(variable, source=key.env))
        entry = self.models.get(model) if model is not None and key.scope == "model" else None
        if entry is not None and key.name in entry.values:
            yield Candidate("model", f"{self.catalog_file} [{model}]", entry.values[key.name])
        if key.name in self.values:
            yield Candidate("global", str(self.config_file), self.values[key.name])
        if (offered := _pick(card, key)) is not None:
            yield Candidate("card", "registry card", key.check(offered, source="registry card"))
        if (offered := _pick(model_file, key)) is not None:
            yield Candidate("model_file", "model file", key.check(offered, source="model file"))
        yield Candidate("default", "built-in", key.default)


def require_key(name: str) -> Key:
    """Return the key with this dotted or flat name, or raise with the way to list all keys."""
    key = find_key(name)
    if key is None:
        near = difflib.get_close_matches(name.lower(), BY_NAME, n=1)
        hint = f"did you mean {near[0]}?" if near else "`hipfire config schema` lists every setting"
        raise ValidationError(f"unknown setting {name[:80]!r}", hint=hint)
    return key


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the settings in a model's `generation_config.json`, by dotted name.

    Values outside a key's rule are left out: there they mean "off" (such as `top_k` 0). `do_sample` false
    means temperature 0.
    """
    settings: dict[str, Value] = {}
    for theirs, ours in GENERATION_CONFIG_KEYS.items():
        try:
            if theirs in generation_config:
                settings[ours] = require_key(ours).check(generation_config[theirs], source="model file")
        except ValidationError:
            continue
    if generation_config.get("do_sample") is False:
        settings["generation.temperature"] = 0.0
    return settings


def load_config(environment: Mapping[str, str] = os.environ) -> Config:
    """Read both files; a missing file is empty. A file that is not TOML at all is an error that names it."""
    config_file, catalog_file = paths.config_path(environment), paths.catalog_path(environment)
    warnings: list[str] = []
    values = _read_values(_without_version(read_document(config_file)), str(config_file), warnings)
    models: dict[str, ModelEntry] = {}
    for name, table in _model_tables(read_document(catalog_file), catalog_file, warnings):
        models[name] = _read_entry(name, table, catalog_file, warnings)
    return Config(config_file, catalog_file, environment, values, models, tuple(warnings))


def read_document(path: Path) -> dict[str, Any]:
    """Return a settings file as nested dicts; a missing file is empty."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValidationError(f"{path}: {error}", hint="correct the file or move it away") from error
    except OSError as error:
        raise ValidationError(f"{path} cannot be read: {error.strerror}") from error
    version = document.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValidationError(
            f"{path}: schema_version {version!r} is not supported",
            hint=f"this hipfire reads {SCHEMA_VERSION}",
        )
    return document


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested tables with their dotted names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _pick(layer: Mapping[str, Value], key: Key) -> Value:
    value = layer.get(key.name)
    return layer.get(key.flat) if value is None else value


def _without_version(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "schema_version"}


def _read_values(
    table: Mapping[str, Any], source: str, warnings: list[str], *, per_model: bool = False
) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, raw in flatten(table):
        key = find_key(name)
        if key is None:
            warnings.append(f"{source}: unknown setting {name!r} is ignored")
        elif per_model and key.scope == "process":
            warnings.append(f"{source}: {key.name} cannot differ per model and is ignored")
        else:
            try:
                values[key.name] = key.check(raw, source=source)
            except ValidationError as error:
                warnings.append(f"{error.line()}; ignored")
    return values


def _model_tables(
    document: Mapping[str, Any], path: Path, warnings: list[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in document:
        if name not in ("schema_version", "models"):
            warnings.append(f"{path}: unknown table {name!r} is ignored")
    tables = document.get("models", {})
    for name, table in tables.items() if isinstance(tables, Mapping) else ():
        try:
            check_name(name)
        except ValidationError as error:
            warnings.append(f"{path}: {error.line()}; ignored")
            continue
        if isinstance(table, Mapping):
            yield name, table
        else:
            warnings.append(f"{path}: models.{name} is not a table and is ignored")


def _read_entry(name: str, table: Mapping[str, Any], path: Path, warnings: list[str]) -> ModelEntry:
    source = f"{path} [{name}]"
    raw = table.get("path")
    target = None
    if isinstance(raw, str) and raw:
        target = paths.absolute(raw, what=source)
    elif raw is not None:
        warnings.append(f"{source}: path is not text and is ignored")
    settings = {key: value for key, value in table.items() if key != "path"}
    return ModelEntry(_read_values(settings, source, warnings, per_model=True), target)
