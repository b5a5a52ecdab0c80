"""What a recording of the GPU engine is known by, and whether it may be run again from its tape.

Kernels with spilled registers or other local memory are refused: a graph or a tape has no place for it. This
file starts nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

from hipfire.kernels.gpu.engine import GpuLaunch, GpuTape
from hipfire.kernels.gpu.target import INTERPRETED
from hipfire.kernels.tape import Identity, MemoryNames, TapeFacts, scalar_text, undeclared

LIBRARY = "library"


def describe(tape: GpuTape) -> TapeFacts:
    """Return the identities of a tape's launches, and every reason why it is not fit to run again."""
    names = MemoryNames()
    faults: dict[str, None] = {}
    silent: dict[str, None] = {}
    identities = []
    for launch in tape.launches:
        faults |= dict.fromkeys(launch_faults(launch))
        for name in undeclared(launch.arguments, launch.reads, launch.writes):
            silent[f"{launch.name}: {name}"] = None
        identities.append(_identity(launch, names))
    libraries = dict.fromkeys(launch.name for launch in tape.launches if launch.kernel is None)
    if not tape.launches:
        faults["nothing was launched"] = None
    if tape.spoiled is not None and tape.spoiled not in libraries:
        faults[f"operation {tape.spoiled} ran outside of the engine"] = None
    return TapeFacts(tuple(identities), tuple(faults), tuple(silent), tuple(libraries))


def launch_faults(launch: GpuLaunch) -> list[str]:
    """Return what is wrong with a launch of a compiled kernel: code that is not known, local memory."""
    if launch.kernel is None or INTERPRETED:
        return []
    spills = getattr(launch.compiled, "n_spills", None)
    metadata = getattr(launch.compiled, "metadata", None)
    if spills is None or metadata is None:
        return [f"the machine code of {launch.name} is not known"]
    found = []
    if spills > 0:
        found.append(f"{launch.name} uses {4 * spills} bytes of local memory in each thread")
    if getattr(metadata, "global_scratch_size", 0):
        found.append(f"{launch.name} needs scratch memory that is allocated when it is launched")
    return found


def _identity(launch: GpuLaunch, names: MemoryNames) -> Identity:
    constants = {**launch.constants, **launch.options}
    return Identity(
        kernel=launch.name,
        code=_code(launch),
        grid=launch.grid,
        options=",".join(f"{name}={scalar_text(value)}" for name, value in sorted(constants.items())),
        arguments=names.arguments(launch.arguments),
        reads=names.places(launch.reads),
        writes=names.places(launch.writes),
    )


def _code(launch: GpuLaunch) -> str:
    """Return a digest of the machine code that ran, or of its source where it was interpreted."""
    if launch.kernel is None:
        return LIBRARY
    binary = getattr(launch.compiled, "kernel", None)
    return _digest(binary) if isinstance(binary, bytes) else _source_digest(launch.kernel)


@functools.lru_cache(maxsize=4096)
def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]


@functools.cache
def _source_digest(kernel: Any) -> str:
    return _digest(inspect.getsource(getattr(kernel, "fn", kernel)).encode())
