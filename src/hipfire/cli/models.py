"""`hipfire list`, `rm` and `verify`: the models on this disk."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from filelock import FileLock, Timeout

from hipfire.base import log
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.base.printable import printable
from hipfire.checkpoint import records
from hipfire.checkpoint.library import STAGING, Library, LocalModel
from hipfire.checkpoint.registry import Card
from hipfire.cli.output import size_text, write, write_json, write_table
from hipfire.cli.settings import load_library
from hipfire.cli.support import is_runnable

DEFAULT_TAG = "smollm2:135m"
Json = Annotated[bool, Parameter(name=["-j", "--json"], negative="")]


def list_models(
    *,
    remote: Annotated[bool, Parameter(name=["-r", "--remote"], negative="")] = False,
    as_json: Json = False,
) -> None:
    """Show installed models.

    Parameters
    ----------
    remote
        Also show the models of the registry.
    as_json
        Write JSON.
    """
    library = load_library()
    models = library.scan()
    if as_json:
        write_json(_as_json(library, models))
        return
    if models:
        write("Local models:")
        rows = [(m.name, size_text(m.nbytes()), m.format, str(m.path)) for m in models]
        write_table(("NAME", "SIZE", "FORMAT", "PATH"), rows, right=frozenset({1}))
    else:
        log.logger().info(f"no models yet; fetch one with `hipfire pull {DEFAULT_TAG}`")
    if remote or not models:
        installed = {m.card.tag for m in models if m.card is not None and m.is_registry_file}
        write("Available models:")
        rows = [_available(card, card.tag in installed) for card in library.registry.models.values()]
        write_table(("TAG", "SIZE", "MEMORY", "DESCRIPTION"), rows, right=frozenset({1, 2}))


def rm(
    model: str,
    /,
    *,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
) -> None:
    """Remove an installed model, or what an unfinished pull left behind.

    Parameters
    ----------
    model
        Tag, file name or stem; a part of a name is not enough.
    yes
        Do not ask.
    """
    library = load_library()
    found = library.find(model, fuzzy=False)
    if found is not None:
        _require_inside(found.path, library.models_dir)
    card = found.card if found is not None else library.registry.resolve(model)
    whole = card is not None and (found is None or found.is_registry_file)
    partial = records.leftovers(library.models_dir, card.file) if card is not None and whole else []
    files = [*(found.files() if found is not None else []), *partial]
    if not files:
        near = library.registry.suggest(model) if card is None else []
        hint = f"did you mean {' or '.join(near)}?" if near else "`hipfire list` shows what is installed"
        raise ValidationError(f"{model} is not installed", hint=hint)
    if not yes and not _confirmed(files):
        log.logger().info("cancelled")
        return
    if card is not None and whole:
        _discard_partial(card, library.models_dir)
    if found is not None:
        _remove(found)
    log.logger().info(f"removed {len(files)} file(s) of {found.name if found is not None else model}")


def verify(model: str, /) -> None:
    """Hash an installed model and compare it with the registry or with its record; exit code 1 if it differs.

    Parameters
    ----------
    model
        Tag, file name or path.
    """
    found = load_library().require(model)
    if found.path.is_dir():
        raise ValidationError(f"{found.path} is a folder", hint="only files can be verified")
    digests = records.verify(found)
    for path, digest in digests.items():
        write(printable(f"{found.name if len(digests) == 1 else path.name} ok sha256 {digest}"))


def _available(card: Card, installed: bool) -> tuple[str, str, str, str]:
    marks = (" [downloaded]" if installed else "") + ("" if is_runnable(card) else " [needs a later version]")
    return card.tag, size_text(card.size_bytes), f"{card.min_memory_gb:g} GB", card.desc + marks


def _as_json(library: Library, models: list[LocalModel]) -> dict[str, Any]:
    installed = {m.card.tag for m in models if m.card is not None and m.is_registry_file}
    local = [
        {
            "name": m.name,
            "path": str(m.path),
            "size_bytes": m.nbytes(),
            "format": m.format,
            "registry_tag": m.card.tag if m.card is not None else None,
        }
        for m in models
    ]
    cards = [
        {"name": card.file, "downloaded": card.tag in installed, "runnable": is_runnable(card)} | asdict(card)
        for card in library.registry.models.values()
    ]
    return {"models": local, "registry": cards, "registry_source": library.registry.source}


def _require_inside(path: Path, models_dir: Path) -> None:
    if models_dir.resolve() not in path.parent.resolve().joinpath(path.name).parents:
        raise ValidationError(f"{path} is outside of the models folder", hint="remove it yourself")


def _confirmed(files: list[Path]) -> bool:
    for path in files:
        sys.stderr.write(f"  {printable(str(path))}\n")
    sys.stderr.write(f"Remove {len(files)} file(s)? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _discard_partial(card: Card, models_dir: Path) -> None:
    lock = models_dir / STAGING / f"{card.file}.lock"
    if not lock.exists():
        return
    try:
        with FileLock(lock, timeout=0):
            records.discard_staging(models_dir, card.file)
    except Timeout as error:
        raise ValidationError(
            f"{card.tag} is being fetched by another process", hint="wait for it, or stop it first"
        ) from error


def _remove(model: LocalModel) -> None:
    try:
        if model.path.is_dir() and not model.path.is_symlink():
            shutil.rmtree(model.path)
        else:
            for path in model.files():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise HipfireError(f"{error.filename or model.path} cannot be removed: {error.strerror}") from error
