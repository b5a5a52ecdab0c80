"""The isolated home of a harness run: a folder with its own settings file and nothing but the model in it.

No setting of the user and no variable of the user's environment reaches the server. This file does not know
processes or requests.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hipfire.base.config import SCHEMA_VERSION
from hipfire.base.cpu_cache import VARIABLE as KERNEL_CACHE
from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import Library, LocalModel
from hipfire.checkpoint.registry import Registry
from hipfire.validate.identity import PACKAGE

MARK: Final = "# written by the serve harness; it may be overwritten"
# where compiled kernels are kept changes no number, and compiling them again takes long
_KEPT: Final = frozenset({KERNEL_CACHE})


@dataclass(frozen=True, slots=True)
class Home:
    """An isolated home: its folder, the model as seen from there, and the library that only knows it."""

    folder: Path
    model: LocalModel
    library: Library
    config_text: str

    def environment(self, registry: Path | None, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of a server: the outer one without hipfire's variables, but for the home."""
        kept = {
            name: value for name, value in outer.items() if not name.startswith("HIPFIRE_") or name in _KEPT
        }
        paths = [str(PACKAGE.parent), *filter(None, [outer.get("PYTHONPATH")])]
        own = {"HIPFIRE_HOME": str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}
        if registry is not None:
            own["HIPFIRE_REGISTRY_FILE"] = str(registry.absolute())
        return kept | own


@contextmanager
def isolated_home(chosen: Path | None, model: LocalModel, registry: Registry) -> Iterator[Home]:
    """Make a home for this model; a temporary one, removed at the end, unless `chosen` names a folder.

    Raises ValidationError for a chosen folder with anything in it that the harness did not make.
    """
    if chosen is not None:
        _claim(chosen)
        yield _furnish(chosen.absolute(), model, registry)
        return
    folder = Path(tempfile.mkdtemp(prefix="hipfire-harness-"))
    try:
        yield _furnish(folder, model, registry)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def config_text() -> str:
    """Return the settings file of an isolated home: only what a measurement needs."""
    # a model that is unloaded between two turns would lose what the second one is to reuse
    return f"{MARK}\nschema_version = {SCHEMA_VERSION}\n\n[serve]\nidle_timeout_seconds = 0\n"


def server_words(
    command: tuple[str, ...] | None,
    home: Home,
    *,
    port: int,
    kv: str,
    max_seq: int | None,
    threads: int | None,
) -> list[str]:
    """Return the words that start a server for the model of a home, on the loopback address."""
    words = [*(command or (sys.executable, "-m", "hipfire.cli"))]
    words += ["serve", str(home.model.path), "127.0.0.1", str(port), "--kv-mode", kv]
    for flag, value in (("--max-seq", max_seq), ("--threads", threads)):
        words += [] if value is None else [flag, str(value)]
    return words


def _claim(folder: Path) -> None:
    """Empty a folder that an earlier run made; refuse one that holds anything else."""
    try:
        if folder.exists() and any(folder.iterdir()):
            settings = folder / "config.toml"
            if not settings.is_file() or not settings.read_text(encoding="utf-8").startswith(MARK):
                raise ValidationError(
                    f"--home {folder} holds files that the harness did not make", hint="name an empty folder"
                )
            for link in (folder / "models").iterdir():
                if not link.is_symlink():
                    raise ValidationError(f"--home: {link} is no link that the harness made")
                link.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"--home {folder} cannot be used: {error}") from error


def _furnish(folder: Path, model: LocalModel, registry: Registry) -> Home:
    models = folder / "models"
    models.mkdir(exist_ok=True)
    text = config_text()
    (folder / "config.toml").write_text(text, encoding="utf-8")
    parts = [model.path] if model.path.is_dir() else model.parts()
    for part in parts:
        (models / part.name).symlink_to(part.absolute())
    library = Library(models, registry)
    return Home(folder, library.require(str(models / parts[0].name)), library, text)
