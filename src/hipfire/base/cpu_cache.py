"""Where compiled kernels are kept between runs: choosing the folder, its key, and clearing out old ones.

A folder is `<base>/<key>`. Who can write there can run code as its reader, since compiled kernels are loaded
and called: it must be the user's own and no link. No failure here stops a run: without a folder kernels live
in memory. This file does not know the compiler, and not what is in the files that it keeps.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hipfire.base.env import absolute, get
from hipfire.base.errors import HipfireError, UnsupportedError, ValidationError
from hipfire.base.printable import one_line
from hipfire.base.safe_names import check_file_name

VARIABLE = "HIPFIRE_KERNEL_CACHE"
STAMP = ".used"
KEY_DIGITS = 24
_OWN_FOLDER = Path("hipfire", "kernels")
_HINT = f"set {VARIABLE} to a folder of yours that can be written"
# longer than the names of kernels in the folder: systems limit names and whole paths, which must show here
# and not when the first kernel is saved
_PROBE_LENGTH = 140
_SECONDS_PER_DAY = 86400
_WORLD_WRITABLE = stat.S_IWOTH
_ANY_OTHER = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class CacheDir:
    """The folder for compiled kernels (None: keep them in memory only).

    `problem` is one printable line, with a hint, if this is not the place that comes first by the rules.
    """

    path: Path | None
    problem: str | None


def kernel_cache_dir(
    key: str, *, environment: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> CacheDir:
    """Return the folder for kernels of this key: it exists, belongs to the user and was just written to.

    The places in order: HIPFIRE_KERNEL_CACHE, XDG_CACHE_HOME, the system's folder for caches in the user's
    home, a private folder among the temporary files. `platform` is a value of `sys.platform`. Raises
    ValidationError only for a key that cannot be a file name.
    """
    check_file_name(key, what="kernel cache key")
    faults: list[str] = []
    places: tuple[Callable[[], Path | None], ...] = (
        partial(_chosen, environment),
        partial(_xdg, environment),
        partial(_user_cache, environment, platform),
        _temporary,
    )
    for place in places:
        base = None
        try:
            base = place()
            if base is None:
                continue
            _make(base / key)
            _check_owned(base / key, _WORLD_WRITABLE)
            _prove_writable(base / key)
        except (OSError, ValueError, HipfireError) as error:
            faults.append(_fault(error, base))
            continue
        where = f"compiled kernels are kept in {base}"
        return CacheDir(base / key, _problem(where, faults) if faults else None)
    return CacheDir(None, _problem("compiled kernels are not kept for the next run", faults))


def prune(base: Path, keep: str, days: int = 30) -> None:
    """Remove the folders of other keys than `keep` that no `kernel_cache_dir` returned for so many days.

    Only the user's own folders with a stamp in them go. Links are neither followed nor removed from `base`,
    what cannot be removed stays, and nothing is raised.
    """
    oldest = time.time() - days * _SECONDS_PER_DAY
    try:
        names = [entry.name for entry in base.iterdir()]
    except (OSError, ValueError):
        return
    for name in names:
        if name != keep and _unused_since(base / name, oldest):
            shutil.rmtree(base / name, ignore_errors=True)


def source_key(package_folders: Sequence[Path], extra: Sequence[str]) -> str:
    """Return 24 hexadecimal digits that change with any Python file in the folders and with `extra`.

    Kernels call helpers in other files, so each file counts, with its name inside its folder and its bytes;
    where the folders lie does not. `extra` is what else decides the machine code: versions, host features.
    Raises UnsupportedError for a folder without Python files or with one that cannot be read.
    """
    digest = hashlib.sha256()
    for part in (*_sources(package_folders), *(text.encode("utf-8", "surrogatepass") for text in extra)):
        # lengths, so that no two lists of parts look alike
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:KEY_DIGITS]


def _chosen(environment: Mapping[str, str]) -> Path | None:
    text = get(VARIABLE, environment)
    return None if text is None else absolute(text, what=VARIABLE)


def _xdg(environment: Mapping[str, str]) -> Path | None:
    text = get("XDG_CACHE_HOME", environment)
    # its specification says to ignore a relative path
    return Path(text) / _OWN_FOLDER if text is not None and Path(text).is_absolute() else None


def _user_cache(environment: Mapping[str, str], platform: str) -> Path:
    local = get("LOCALAPPDATA", environment) if platform == "win32" else None
    if local is not None:
        return absolute(local, what="LOCALAPPDATA") / _OWN_FOLDER
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ValidationError("this user has no home folder") from error
    if not home.is_absolute():
        raise ValidationError(f"the home folder {str(home)!r} is not an absolute path")
    folders = {"win32": ("AppData", "Local"), "darwin": ("Library", "Caches")}
    return home.joinpath(*folders.get(platform, (".cache",))) / _OWN_FOLDER


def _temporary() -> Path:
    """Return a folder of this user alone among the temporary files, where others may have put traps."""
    owner = os.geteuid() if hasattr(os, "geteuid") else "user"
    base = Path(tempfile.gettempdir()) / f"hipfire-kernels-{owner}"
    base.mkdir(mode=0o700, exist_ok=True)
    _check_owned(base, _ANY_OTHER)
    return base


def _make(folder: Path) -> None:
    """Make a folder and its missing parents; unlike with `parents=True`, none is open to other users."""
    for place in (*reversed(folder.parents), folder):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


def _check_owned(folder: Path, forbidden: int) -> None:
    """Refuse what is no folder, belongs to another user, or gives others one of the `forbidden` rights."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ValidationError(f"{folder} is a link or a file, not a folder")
    # Windows has neither; its temporary and local folders are each user's own
    if hasattr(os, "geteuid"):
        if info.st_uid != os.geteuid():
            raise ValidationError(f"{folder} belongs to another user")
        if info.st_mode & forbidden:
            raise ValidationError(f"{folder} is open to other users")


def _prove_writable(folder: Path) -> None:
    """Write and remove a file, and stamp the folder as used; rights alone do not tell of full disks."""
    probe = folder / f".probe-{os.getpid()}-{secrets.token_hex(8)}-".ljust(_PROBE_LENGTH, "x")
    try:
        with probe.open("xb") as file:
            file.write(b"x")
    finally:
        probe.unlink(missing_ok=True)
    (folder / STAMP).touch()


def _unused_since(folder: Path, oldest: float) -> bool:
    try:
        _check_owned(folder, 0)
        stamp = (folder / STAMP).lstat()
    except (OSError, HipfireError):
        return False
    return stat.S_ISREG(stamp.st_mode) and stamp.st_mtime < oldest


def _sources(package_folders: Sequence[Path]) -> Iterator[bytes]:
    for folder in package_folders:
        try:
            files = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in folder.rglob("*.py")
                if path.is_file()
            }
        except OSError as error:
            raise UnsupportedError(f"the kernels' source cannot be read: {_fault(error, folder)}") from error
        if not files:
            raise UnsupportedError(
                f"no Python files are in {folder}, so kernels compiled from them cannot be kept",
                hint="install hipfire with its sources",
            )
        yield str(len(files)).encode()
        for name in sorted(files):
            yield os.fsencode(name)
            yield files[name]


def _fault(error: Exception, folder: Path | str | None) -> str:
    """Return what is wrong, with the folder where the error itself does not name one."""
    if isinstance(error, HipfireError):
        return error.message
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        folder = folder or error.filename
    return text if folder is None else f"{folder}: {text}"


def _problem(result: str, faults: Sequence[str]) -> str:
    return one_line(f"{result}: {', '.join(faults)}; {_HINT}")
