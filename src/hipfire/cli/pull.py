"""`hipfire pull`: fetch a model of the registry, and on request quantize it on arrival."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import requests
from cyclopts import Parameter

from hipfire.base import log
from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.checkpoint.fetch import Transfer
from hipfire.checkpoint.install import Installed, install
from hipfire.checkpoint.library import Library, LocalModel, manifest_path, variant_file
from hipfire.checkpoint.partial import sha256_file
from hipfire.checkpoint.progress import TransferProgress
from hipfire.checkpoint.records import read_manifest, write_manifest
from hipfire.checkpoint.registry import Card
from hipfire.checkpoint.registry_fields import repo as checked_repo
from hipfire.cli.output import size_text, write
from hipfire.cli.progress import TensorProgress, make_progress
from hipfire.cli.settings import load_library
from hipfire.cli.support import is_runnable, needs_later_version
from hipfire.quantize.policy import recipe


def pull(
    model: str,
    /,
    *,
    force: Annotated[bool, Parameter(negative="")] = False,
    fmt: Annotated[str | None, Parameter(name="--format")] = None,
    repo: str | None = None,
) -> None:
    """Fetch a model of the registry; prints the path of the installed file.

    An interrupted pull continues where it was. A model that is there is left alone.

    Parameters
    ----------
    model
        Tag or alias, such as smollm2:135m; `hipfire list -r` shows all.
    force
        Fetch it again although it is there.
    fmt
        Quantize on arrival: mq4, mq4v1, hf4, mq6, mq6v2, hf6, q8 or f16.
    repo
        OWNER/NAME on the model hub to take the file from, instead of the registry's source.
    """
    library = load_library()
    card = library.registry.require(model)
    fmt = _checked_format(card, fmt)
    _check_repo(repo)
    for line in (card.terms, "" if is_runnable(card) else needs_later_version(card)):
        if line:
            log.logger().info(f"{card.tag}: {line}")
    progress = make_progress()
    done = fetch_card(card, library.models_dir, progress, force=force, repo=repo)
    target = done.path if fmt is None else _quantized(card, done, fmt, force, progress)
    write(str(target))


def fetch_card(
    card: Card, models_dir: Path, progress: TransferProgress, *, force: bool = False, repo: str | None = None
) -> Installed:
    """Install a card's file and say on stderr what happened."""
    with requests.Session() as session:
        done = install(card, models_dir, Transfer(progress, session), force=force, repo=repo)
    if done.already:
        log.logger().info(f"{card.tag} is already installed")
    else:
        log.logger().info(f"installed {card.tag}: {size_text(card.size_bytes)}, sha256 {done.sha256}")
    return done


def installed(library: Library, name: str) -> LocalModel:
    """Return the model that `name` means; one of the registry that is not on this disk is fetched first."""
    local = library.find(name)
    if local is not None:
        return local
    card = library.registry.require(name)
    if not is_runnable(card):
        raise UnsupportedError(needs_later_version(card), hint="`hipfire list -r` shows what this one runs")
    if card.terms:
        log.logger().info(f"{card.tag}: {card.terms}")
    fetch_card(card, library.models_dir, make_progress())
    return library.require(name)


def _checked_format(card: Card, fmt: str | None) -> str | None:
    if fmt is None:
        return None
    name = recipe(fmt).name
    if not card.file.endswith(".gguf"):
        raise UnsupportedError(
            f"{card.tag} is in hipfire's own format already", hint="pull it without --format"
        )
    return name


def _check_repo(repo: str | None) -> None:
    try:
        checked_repo(repo or "owner/name")
    except ValueError as error:
        raise ValidationError(f"--repo: {error}") from error


def _quantized(card: Card, done: Installed, fmt: str, force: bool, progress: TransferProgress) -> Path:
    out = done.path.parent / variant_file(card.tag, fmt)
    if out.is_file() and not force:
        log.logger().info(f"{card.tag}-{fmt} is already there")
        if read_manifest(out) is None:
            # an earlier call ended between the two files
            _record(card, fmt, out)
        return out
    # a record of the file that is replaced would contradict the new one if this ends between the two
    manifest_path(out).unlink(missing_ok=True)
    # the quantizer needs torch, which takes seconds to import
    from hipfire.quantize.pipeline import quantize  # noqa: PLC0415

    quantize(done.path, fmt, out, progress=TensorProgress(progress, f"{card.tag}-{fmt}"))
    digest = _record(card, fmt, out)
    log.logger().info(f"quantized {card.tag}-{fmt}: {size_text(out.stat().st_size)}, sha256 {digest}")
    return out


def _record(card: Card, fmt: str, out: Path) -> str:
    digest = sha256_file(out)
    write_manifest(out, tag=f"{card.tag}-{fmt}", source=f"quantized from {card.file}", sha256=digest)
    return digest
