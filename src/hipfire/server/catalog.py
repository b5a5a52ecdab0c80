"""Which models requests may name, and what a name means.

A request comes from another program, so it may name what lies in the models folder and what the server's
owner named, and no other file. This file loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import Library, LocalModel
from hipfire.checkpoint.records import read_manifest
from hipfire.server.errors import FieldError, NotFoundError

LATEST = ":latest"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model on this disk.

    `id` is what requests call it, `size` in bytes, `modified` a Unix time, `digest` a SHA-256 or "".
    """

    id: str
    path: Path
    size: int
    modified: int
    digest: str
    format: str
    family: str


class Catalog:
    """Names of models for requests.

    `own` is the model that the server's owner started it with; it may be a path, and requests may name it in
    the same words, by its short name, or by the path if `paths` is set.
    """

    def __init__(self, library: Library, *, own: str | None = None, paths: bool = False) -> None:
        self._library = library
        self._own = own
        self._paths = paths

    def own(self) -> LocalModel | None:
        """Return the owner's model; raises ValidationError if it is not there."""
        return None if self._own is None else self._library.require(self._own)

    def resolve(self, name: str) -> LocalModel:
        """Return the model that a request's name means.

        Raises NotFoundError, with the way to get a registered model, and FieldError for a name that means
        several.
        """
        if not name.strip():
            raise FieldError("model", "model is empty", hint="GET /v1/models lists the models")
        for spelling in dict.fromkeys((name, name.removesuffix(LATEST))):
            if (found := self._find(spelling)) is not None:
                return found
        card = None
        if "/" not in name and "\\" not in name:
            card = self._library.registry.resolve(name)
        hint = "GET /v1/models lists the models"
        if card is not None:
            hint = f"fetch it with `hipfire pull {card.tag}`"
        raise NotFoundError(
            f"the model {name[:200]!r} does not exist here", hint=hint, code="model_not_found", param="model"
        )

    def entries(self) -> list[ModelEntry]:
        """Return every model on this disk, and the owner's."""
        models = {model.path: model for model in self._library.scan()}
        own = self._own_if_there()
        if own is not None:
            models.setdefault(own.path, own)
        return [made for model in models.values() if (made := self._entry(model)) is not None]

    def _find(self, name: str) -> LocalModel | None:
        own = self._own_if_there()
        if own is not None and name in (self._own, own.name):
            return own
        try:
            found = self._library.find(name, fuzzy=False)
        except ValidationError as error:
            if "several" not in error.message:
                # no usable name, or no such file: said the same way, so that nothing tells of the disk
                return None
            raise FieldError("model", error.message, hint=error.hint) from error
        if found is None or self._paths:
            return found
        if own is not None and found.path == own.path and not _is_path(name):
            return own
        # a file beside the server's working folder, or a path, is not for a request to name
        inside = any(model.path == found.path for model in self._library.scan())
        return found if inside and not _is_path(name) else None

    def _own_if_there(self) -> LocalModel | None:
        try:
            return self.own()
        except ValidationError:
            return None

    def _entry(self, model: LocalModel) -> ModelEntry | None:
        try:
            record = read_manifest(model.path)
            card = model.card if model.is_registry_file else None
            digest = record.sha256 if record is not None else (card.sha256 if card is not None else None)
            return ModelEntry(
                id=model.name,
                path=model.path,
                size=model.nbytes(),
                modified=int(model.path.stat().st_mtime),
                digest=digest or "",
                format=model.format,
                family=model.card.family if model.card is not None else "",
            )
        except OSError:
            # removed between the listing and now
            return None


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.startswith("~")
