"""Compiled kernels on disk: one file for each, in a folder that a hash of all kernel sources names.

A kernel is built from many small functions, and Numba's own cache would not notice when one of them
changes, nor find kernels that are made by functions. Here the folder's name covers every source file, the
versions of the compilers, and the processor. A file is a line of JSON and the object file that it describes.
Anything wrong with it only means that the kernel is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba

from hipfire.base.cpu_cache import kernel_cache_dir, prune, source_key
from hipfire.base.errors import UnsupportedError
from hipfire.kernels.cpu.target import cpu_path, host_features

log = logging.getLogger(__name__)
# what kernels are built from, also where a constant of another package is baked into them
SOURCES = (Path(__file__).parents[1], Path(__file__).parents[2] / "base")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """An object file, and the name of the function in it that is meant."""

    symbol: str
    code: bytes


@cache
def cache_folder() -> Path | None:
    """Return the folder of this build's kernels, made if need be; None where nothing can be kept."""
    processor = (platform.machine(), llvm.get_host_cpu_name(), cpu_path(), *sorted(host_features()))
    versions = (numba.__version__, llvmlite.__version__, sys.version, sys.platform)
    try:
        found = kernel_cache_dir(source_key(SOURCES, (*versions, *processor)))
    except UnsupportedError as error:
        # no sources beside the code, as in a packed application
        log.warning("compiled kernels are not kept: %s", error)
        return None
    if found.problem is not None:
        log.warning("%s", found.problem)
    if found.path is not None:
        prune(found.path.parent, found.path.name)
    return found.path


def is_kept(name: str) -> bool:
    """Tell whether there is a file for this kernel."""
    folder = cache_folder()
    return folder is not None and _file(folder, name).is_file()


def kept_code(name: str) -> MachineCode | None:
    """Return the kept machine code of a kernel; None if there is none that is whole."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        head, _, code = _file(folder, name).read_bytes().partition(b"\n")
        facts = json.loads(head)
        symbol, digest = facts["symbol"], facts["sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("compiled kernel %s cannot be used: %s", name, error)
        return None
    if not isinstance(symbol, str) or digest != hashlib.sha256(code).hexdigest():
        log.debug("compiled kernel %s is damaged", name)
        return None
    return MachineCode(symbol, code)


def keep_code(name: str, made: MachineCode) -> None:
    """Keep the machine code of a kernel; a failure is only a slower next start."""
    folder = cache_folder()
    if folder is None:
        return
    beside = _file(folder, name).with_suffix(f".{os.getpid()}.part")
    facts = {"symbol": made.symbol, "sha256": hashlib.sha256(made.code).hexdigest()}
    try:
        beside.write_bytes(json.dumps(facts).encode() + b"\n" + made.code)
        beside.replace(_file(folder, name))
    except OSError as error:
        _warn_once(folder, error.strerror or type(error).__name__)
        with contextlib.suppress(OSError):
            beside.unlink()


@cache
def _warn_once(folder: Path, reason: str) -> None:
    """Say that nothing can be written: once, for a model has dozens of kernels."""
    log.warning("compiled kernels are not kept in %s: %s", folder, reason)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.kernel"
