"""The models on this disk: which files there are, and which one a name means.

A file of the registry keeps its own name; one that hipfire quantized is `<tag with - for :>.<format>`. A
name is looked up as a path, in `models.toml`, as a tag, as a file or stem in the models folder, and last as
a part of one. This file reads folders and names only; it opens no model (source.py) and fetches none
(install.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hipfire.base import env
from hipfire.base.config import Config, load_config
from hipfire.base.errors import ValidationError
from hipfire.base.safe_names import check_name
from hipfire.checkpoint.registry import Card, Registry, load_registry
from hipfire.checkpoint.shard_names import file_set, set_name, siblings

# formats that `hipfire quantize` writes, by the suffix of their files
FORMAT_SUFFIXES = ("mq4", "mq4v1", "hf4", "mq6", "mq6v2", "hf6", "q8", "f16")
MODEL_SUFFIXES = frozenset({*FORMAT_SUFFIXES, "gguf", "hfq", "mq2", "mq4p"})
STAGING = ".pull"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model file, the first file of a split model, or a safetensors folder on this disk.

    `name` is what to call it on a command line; `card` the registry's card of its tag, if it has one (a
    quantized variant has the card of its original); `format` a short word for people.
    """

    name: str
    path: Path
    format: str
    card: Card | None = None

    @property
    def settings_name(self) -> str:
        """Return the model's name in `models.toml`: its tag, or its own name."""
        return self.card.tag if self.card is not None else self.name

    @property
    def is_registry_file(self) -> bool:
        """Return whether this is the file that the registry's tag names, not a variant made from it."""
        return self.card is not None and self.path.name == self.card.file

    def parts(self) -> list[Path]:
        """Return the files that hold the model: itself, all shards of a split model, or all of a folder."""
        if self.path.is_dir() and not self.path.is_symlink():
            return sorted(path for path in self.path.rglob("*") if not path.is_dir())
        return siblings(self.path)

    def files(self) -> list[Path]:
        """Return every file of the model: its parts and the records beside them."""
        parts = self.parts()
        if self.path.is_dir() and not self.path.is_symlink():
            return parts
        records = (manifest_path(part) for part in parts)
        return [*parts, *(record for record in records if record.exists())]

    def nbytes(self) -> int:
        """Return the model's size on disk in bytes."""
        return sum(path.stat().st_size for path in self.parts() if path.is_file())


@dataclass(frozen=True, slots=True)
class Library:
    """The models folder, the registry and the user's own names for files."""

    models_dir: Path
    registry: Registry
    aliases: Mapping[str, Path] = field(default_factory=dict)

    def scan(self) -> list[LocalModel]:
        """Return the models in the folder and one level of subfolders, and those that `models.toml` names."""
        found = {path: self._describe(path) for path in _model_paths(self.models_dir)}
        for name, path in self.aliases.items():
            if path.exists():
                path = siblings(path)[0]
                found[path] = LocalModel(name, path, format_of(path))
        return sorted(found.values(), key=lambda model: (model.name.lower(), str(model.path)))

    def find(self, name: str, *, fuzzy: bool = True) -> LocalModel | None:
        """Return the model that `name` means, or None if it is not on this disk.

        Raises ValidationError for a name that means several files, or that could leave the models folder.
        `fuzzy` False leaves out the search for a part of a name.
        """
        literal = _literal(name)
        if literal is not None and literal.exists():
            return self._describe(literal)
        if name in self.aliases:
            return self._aliased(name)
        if literal is not None and _looks_like_path(name):
            raise ValidationError(f"no such file: {literal}")
        check_name(name)
        card = self.registry.resolve(name)
        if card is not None and (self.models_dir / card.file).is_file():
            return self._describe(self.models_dir / card.file)
        paths = list(_model_paths(self.models_dir))
        for matches in self._searches(name, card, paths, fuzzy):
            if len(matches) > 1:
                listed = ", ".join(sorted(path.name for path in matches))
                raise ValidationError(f"{name!r} means several models", hint=f"say which: {listed}")
            if matches:
                return self._describe(matches[0])
        return None

    def require(self, name: str) -> LocalModel:
        """Return `find(name)`, or raise with the way to get the model."""
        model = self.find(name)
        if model is not None:
            return model
        card = self.registry.require(name)
        raise ValidationError(f"{card.tag} is not installed", hint=f"fetch it with `hipfire pull {card.tag}`")

    def _searches(self, name: str, card: Card | None, paths: list[Path], fuzzy: bool) -> Iterator[list[Path]]:
        yield [path for path in paths if path.name == name]
        if shards := set_name(name):
            yield [path for path in paths if file_set(path) == shards]
        base, fmt = split_format(name)
        origin = self.registry.resolve(base) if fmt else None
        if origin is not None:
            yield [path for path in paths if path.name == variant_file(origin.tag, fmt)]
        stems = {name, name.replace(":", "-"), *([variant_stem(card.tag)] if card else [])}
        yield [path for path in paths if path.stem in stems]
        if fuzzy:
            plain = name.lower().replace(":", "-")
            yield [path for path in paths if plain in path.name.lower()]
            yield [path for path in paths if _squeezed(plain) in _squeezed(path.name)]

    def _aliased(self, name: str) -> LocalModel:
        path = self.aliases[name]
        if not path.exists():
            raise ValidationError(
                f"{name} stands for {path}, which is not there",
                hint=f"correct models.{name}.path in models.toml",
            )
        return LocalModel(name, siblings(path)[0], format_of(path))

    def _describe(self, path: Path) -> LocalModel:
        path = siblings(path)[0]
        for card in self.registry.models.values():
            if path.name == card.file:
                return LocalModel(card.tag, path, card.quant, card)
            if path.stem == variant_stem(card.tag) and path.suffix[1:] in FORMAT_SUFFIXES:
                return LocalModel(f"{card.tag}-{path.suffix[1:]}", path, path.suffix[1:], card)
        return LocalModel(path.stem if path.is_file() else path.name, path, format_of(path))


def open_library(config: Config | None = None) -> Library:
    """Return the library of this user: models folder, registry and the names in `models.toml`."""
    models = (config or load_config()).models
    aliases = {name: entry.path for name, entry in models.items() if entry.path is not None}
    return Library(env.models_dir(), load_registry(), aliases)


def variant_stem(tag: str) -> str:
    """Return the stem of the files made from a tag: `smollm2:135m` gives `smollm2-135m`."""
    return tag.replace(":", "-")


def variant_file(tag: str, fmt: str) -> str:
    """Return the file name of a tag quantized to `fmt`: `smollm2-135m.hf4`."""
    return f"{variant_stem(tag)}.{fmt}"


def split_format(name: str) -> tuple[str, str]:
    """Return (tag, format) of a name such as `smollm2:135m-hf4`; the format is empty if there is none."""
    base, dash, fmt = name.rpartition("-")
    return (base, fmt.lower()) if dash and fmt.lower() in FORMAT_SUFFIXES else (name, "")


def manifest_path(path: Path) -> Path:
    """Return the path of the record that is kept beside an installed file."""
    return path.with_name(path.name + ".manifest.json")


def format_of(path: Path) -> str:
    """Return a word for the format of a model that the registry does not know, from its name."""
    return "safetensors" if path.is_dir() else path.suffix[1:].lower() or "unknown"


def _model_paths(models_dir: Path) -> Iterator[Path]:
    yield from _in_folder(models_dir)
    for folder in _entries(models_dir):
        if folder.is_dir() and not folder.name.startswith("."):
            if _is_safetensors_folder(folder):
                yield folder
            else:
                yield from _in_folder(folder)


def _in_folder(folder: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for path in _entries(folder):
        known = path.suffix[1:].lower() in MODEL_SUFFIXES and not path.name.startswith(".")
        if not known or not path.is_file():
            continue
        # a split model is shown once, by its first file
        shards = file_set(path)
        if not shards or shards not in seen:
            seen.add(shards)
            yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_safetensors_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _literal(name: str) -> Path | None:
    """Return the path that a user may have meant, or None if `name` cannot be a path."""
    if not name.strip() or "\0" in name:
        return None
    path = env.absolute(name, what="model")
    if _looks_like_path(name):
        return path
    # a bare word is a path only if a model lies there: any folder of that name must not hide a tag
    try:
        return path if path.is_file() or _is_safetensors_folder(path) else None
    except OSError:
        return None


def _looks_like_path(name: str) -> bool:
    seps = {"/", os.sep, *([os.altsep] if os.altsep else [])}
    return any(sep in name for sep in seps) or name.startswith("~")


def _squeezed(text: str) -> str:
    return re.sub(r"[-._]", "", text.lower())


def find_model(name: str) -> Path:
    """Return the path of the model that `name` (a path, tag, alias, file or part of one) means for this user.

    Raises ValidationError with the way to get the model if it is not installed.
    """
    return open_library().require(name).path
