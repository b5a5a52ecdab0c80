"""What exactly was run: hashes of the source tree and of files, and versions of what does the work.

A report without these is no evidence: nobody could say what produced it. This file does not know reports.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import hipfire
from hipfire.base.errors import ValidationError

PACKAGE: Final = Path(hipfire.__file__).resolve().parent
LIBRARIES: Final = (
    *("torch", "triton", "numba", "llvmlite", "numpy", "tokenizers", "jinja2", "gguf"),
    *("llguidance", "fastapi", "uvicorn"),
)
GIT_TIMEOUT_S: Final = 10
_BLOCK: Final = 1 << 20


def md5(data: bytes) -> str:
    """Return the MD5 of some bytes in hexadecimal; it names a prompt or a request and protects nothing."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def tree_sha256(root: Path) -> str:
    """Return one SHA-256 over the names and contents of all files below a folder.

    Compiled Python files and hidden ones do not count. Raises ValidationError for a folder without files: a
    hash of nothing would look like evidence.
    """
    digest = hashlib.sha256()
    empty = True
    for path in _tree_files(root):
        name = path.relative_to(root).as_posix().encode()
        digest.update(len(name).to_bytes(8, "little") + name)
        digest.update(bytes.fromhex(file_sha256(path)))
        empty = False
    if empty:
        raise ValidationError(f"{root} holds no files to identify")
    return digest.hexdigest()


def source_identity(package: Path) -> dict[str, Any]:
    """Return `tree_sha256` of a source tree, its `commit`, and whether it differs from that (`dirty`).

    `commit` and `dirty` are None where the tree is not under git.
    """
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".") if commit else None
    return {
        "commit": commit or None,
        "dirty": None if changes is None else bool(changes),
        "tree_sha256": tree_sha256(package),
    }


def runtime_identity() -> dict[str, Any]:
    """Return versions of hipfire, Python, the libraries and the system; None for what is not installed."""
    versions: dict[str, Any] = {"hipfire": hipfire.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    system = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    return versions | system


def artifact(role: str, path: Path) -> dict[str, Any]:
    """Return the role, path, size and SHA-256 of a file; ValidationError if it cannot be read."""
    try:
        return {
            "role": role,
            "path": str(path),
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
        }
    except OSError as error:
        raise ValidationError(f"{path} cannot be read: {error.strerror}") from error


def _tree_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            yield path


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says about a folder, or None if it says nothing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
