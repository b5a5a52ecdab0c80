"""The record beside an installed file, and proving with it that the file is still the same.

This file reads and hashes what is on disk; it fetches nothing (install.py does).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.library import STAGING, LocalModel, manifest_path
from hipfire.checkpoint.partial import sha256_file
from hipfire.checkpoint.shard_names import shard_count, shard_name


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record beside an installed file. `installed_at` is UTC in ISO 8601."""

    tag: str
    file: str
    source: str
    sha256: str
    size_bytes: int
    installed_at: str
    schema_version: int = 1


def verify(model: LocalModel) -> dict[Path, str]:
    """Hash every file of an installed model and return the SHA-256 of each.

    The registry's digest counts for a registry file, else the record beside it.

    Raises:
        ArtifactError: a file is not what it should be, or a shard of a split model is missing.
        UnsupportedError: there is nothing to compare a file with.
    """
    parts = model.parts()
    names = {part.name.lower() for part in parts}
    for number in range(1, shard_count(model.path.name) + 1):
        wanted = shard_name(model.path.name, number)
        if wanted and wanted.lower() not in names:
            raise ArtifactError(
                f"{wanted} is missing", path=model.path.parent, hint="put all parts of the model there"
            )
    for part in parts:
        if read_manifest(part) is None and not (model.is_registry_file and part == model.path):
            raise UnsupportedError(
                f"nothing to compare {part} with: the registry does not know it and it has no record",
                hint="only models that hipfire installed can be verified",
            )
    return {part: _verify_file(part, model) for part in parts}


def _verify_file(path: Path, model: LocalModel) -> str:
    record = read_manifest(path)
    card = model.card if model.is_registry_file and path == model.path else None
    size = path.stat().st_size
    wanted = card.size_bytes if card is not None else record.size_bytes if record is not None else size
    again = f"fetch it again with `hipfire pull {card.tag} --force`" if card is not None else "make it again"
    if size != wanted:
        raise ArtifactError(f"has {size} bytes instead of {wanted}", path=path, hint=again)
    digest = sha256_file(path)
    expected = (card.sha256 if card is not None else None) or (record.sha256 if record is not None else None)
    if (card is not None and not card.digest_matches(digest)) or (expected or digest) != digest:
        wanted_digest = expected or (card.sha256_prefix if card is not None else "")
        raise ArtifactError(f"sha256 is {digest}, expected {wanted_digest}", path=path, hint=again)
    return digest


def write_manifest(path: Path, *, tag: str, source: str, sha256: str) -> None:
    """Write the record of an installed file beside it."""
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    record = Manifest(tag, path.name, source, sha256, path.stat().st_size, moment)
    target = manifest_path(path)
    beside = target.with_name(target.name + ".new")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(record), indent=1) + "\n")
        stream.flush()
        # the name must not come to disk before the bytes do
        os.fsync(stream.fileno())
    beside.replace(target)


def read_manifest(path: Path) -> Manifest | None:
    """Return the record beside a file; a missing or damaged one is None."""
    try:
        raw: Any = json.loads(manifest_path(path).read_text(encoding="utf-8"))
        if not isinstance(raw, Mapping) or raw.get("schema_version") != 1:
            return None
        tag, file, source, sha256, moment = (
            str(raw[name]) for name in ("tag", "file", "source", "sha256", "installed_at")
        )
        return Manifest(tag, file, source, sha256, int(raw["size_bytes"]), moment)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def leftovers(models_dir: Path, file: str) -> list[Path]:
    """Return the files that an unfinished `install` of this file left behind."""
    return sorted(path for path in (models_dir / STAGING / file).glob("*") if path.is_file())


def discard_staging(models_dir: Path, file: str) -> None:
    """Remove the staging folder of a file, finished or not."""
    shutil.rmtree(models_dir / STAGING / file, ignore_errors=True)
