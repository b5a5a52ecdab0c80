"""The peer's own Python environment: made once with venv and pip, then used again.

This file does not know what the peer does. pip builds it from source, which takes minutes and a C++
compiler; pip brings cmake along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from hipfire.base.env import get
from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.printable import one_line
from peers.worker import worker_environment

PACKAGE = "llama-cpp-python"
MODULE = "llama_cpp"
VERSION = "0.3.36"
COMPILERS = ("c++", "g++", "clang++")
# written last: an environment without it is a build that did not end
_STAMP = "built"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which the environment and files made for a run are kept; it need not exist."""
    chosen = get("XDG_CACHE_HOME", environment)
    # the variable's specification says to ignore a relative path
    base = Path(chosen) if chosen is not None and Path(chosen).is_absolute() else Path.home() / ".cache"
    return base / "hipfire" / "peers"


def environment_python(folder: Path) -> Path:
    """Return the Python of an environment; ValidationError if there is none."""
    for name in ("bin/python", "Scripts/python.exe"):
        if (folder / name).is_file():
            return folder / name
    raise ValidationError(f"{folder} is not a Python environment", hint="make one with `python -m venv`")


def peer_python(cache: Path, chosen: Path | None, tell: Callable[[str], None]) -> Path:
    """Return the Python of the environment `chosen`, or of the one in `cache`, which is made if need be.

    `tell` gets a line before something that takes long. Raises ValidationError or UnsupportedError.
    """
    if chosen is not None:
        python = environment_python(chosen)
        _check(python, f"install it there: {python} -m pip install {PACKAGE}=={VERSION}")
        return python
    folder = cache / f"{PACKAGE}-{VERSION}"
    cache.mkdir(parents=True, exist_ok=True)
    # two runs at once must not build into one folder
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not (folder / _STAMP).is_file():
            _build(folder, tell)
    python = environment_python(folder)
    _check(python, f"remove {folder} to have it built again")
    return python


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the C++ compiler that a build would use, or None if this machine has none."""
    chosen = get("CXX", environment)
    names = COMPILERS if chosen is None else (chosen.split()[0],)
    return next((name for name in names if shutil.which(name, path=environment.get("PATH"))), None)


def _build(folder: Path, tell: Callable[[str], None]) -> None:
    # Visual Studio's compiler is not on the path, and found by cmake alone
    if os.name == "posix" and find_compiler() is None:
        raise UnsupportedError(
            f"{PACKAGE} is built from source, and this machine has no C++ compiler",
            hint="install g++ or clang++, or name an environment that has it with --peer-env",
        )
    log = folder.with_name(f"{folder.name}.log")
    tell(f"building {PACKAGE} {VERSION} in {folder}, which takes some minutes (log: {log})")
    python = str(folder / ("bin/python" if os.name == "posix" else "Scripts/python.exe"))
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], log, "the environment could not be made")
    requirement = f"{PACKAGE}=={VERSION}"
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", requirement]
    _run(install, log, f"pip could not build {requirement}")
    (folder / _STAMP).touch()


def _run(command: Sequence[str], log: Path, failure: str) -> None:
    """Run a program with its output in `log`; end it with all that it started if this is interrupted."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait()
        except BaseException:
            _kill_all(process)
            raise
    if status != 0:
        raise UnsupportedError(
            f"{failure}{_last_error(log)}",
            hint=f"see {log}; it needs a C++ compiler and access to the package index",
        )


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        # a compiler runs several levels below pip
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _last_error(log: Path) -> str:
    """Return the first line in which pip or a compiler names an error, as an end of a sentence."""
    lines = log.read_text("utf-8", "replace").splitlines()
    errors = [line for line in lines if "error:" in line.lower()]
    return f": {one_line(errors[0])}" if errors else ""


def _check(python: Path, hint: str) -> None:
    """Raise UnsupportedError if the package cannot be imported."""
    program = f"import {MODULE}; print({MODULE}.__version__)"
    done = subprocess.run(
        [str(python), "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=worker_environment(own=False),
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UnsupportedError(f"{PACKAGE} cannot be used: {one_line(last[0])}", hint=hint)
