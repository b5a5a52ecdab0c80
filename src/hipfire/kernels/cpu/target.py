"""Which instructions the CPU kernels are built from: the best that this processor has, or what is asked for.

Paths, by falling speed: `vnni512` and `vnni256` (integer dot products of four bytes, in 512 or 256 bits),
`avx2` (pairs of bytes in 256 bits), `generic` (plain vector arithmetic, which LLVM lowers for any processor,
ARM included). All paths compute the same integers and the same float32 operations in the same order.
This file knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from numba import config
from numba.core.codegen import get_host_cpu_features

from hipfire.base import env
from hipfire.base.errors import ValidationError

PATHS = ("vnni512", "vnni256", "avx2", "generic")
# names the path instead of the best one; for machines that claim features which they cannot run
PATH_VARIABLE = "HIPFIRE_CPU_PATH"

_NEEDS: Mapping[str, frozenset[str]] = {
    "vnni512": frozenset({"avx512f", "avx512bw", "avx512vnni", "avx2", "fma"}),
    "vnni256": frozenset({"avxvnni", "avx2", "fma"}),
    "avx2": frozenset({"avx2", "fma"}),
    "generic": frozenset(),
}


@cache
def host_features() -> frozenset[str]:
    """Return the names of the features that Numba compiles for; empty where LLVM cannot tell.

    They are those of this processor, unless NUMBA_CPU_FEATURES, NUMBA_CPU_NAME or NUMBA_ENABLE_AVX ask for
    fewer.
    """
    settings: Any = config
    told = settings.CPU_FEATURES
    if told is None:
        told = get_host_cpu_features()
    return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))


def supported_paths(features: frozenset[str]) -> tuple[str, ...]:
    """Return the paths that a processor with these features can run, fastest first."""
    return tuple(path for path in PATHS if _NEEDS[path] <= features)


@cache
def cpu_path() -> str:
    """Return the path in use; ValidationError if the environment names one that cannot run here."""
    possible = supported_paths(host_features())
    wanted = env.get(PATH_VARIABLE)
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise ValidationError(
            f"{PATH_VARIABLE} is {wanted!r}, which this processor cannot run",
            hint=f"use one of {', '.join(possible)}",
        )
    return wanted
