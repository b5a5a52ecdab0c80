"""What a recorded program of the CPU engine is known by.

A kernel's code is named by a digest of all kernel sources, since the machine code is built from many of them.
This file runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hipfire.base.cpu_cache import source_key
from hipfire.base.errors import UnsupportedError
from hipfire.kernels.cpu.cache import SOURCES
from hipfire.kernels.cpu.engine import Launch
from hipfire.kernels.tape import Identity, MemoryNames, TapeFacts


def describe(launches: Sequence[Launch]) -> TapeFacts:
    """Return the identities of a program's rows, and what is wrong with them."""
    names, code = MemoryNames(), _code()
    faults = {} if code else {"the sources of the kernels are not known": None}
    if not launches:
        faults["nothing was launched"] = None
    identities = []
    for launch in launches:
        arguments = {str(index): value for index, value in enumerate(launch.arguments)}
        identities.append(
            Identity(
                kernel=launch.kernel.name,
                code=code,
                grid=(),
                options="",
                arguments=names.arguments(arguments),
                reads=names.places(launch.reads),
                writes=names.places(launch.writes),
            )
        )
    return TapeFacts(tuple(identities), tuple(faults))


@cache
def _code() -> str:
    try:
        return source_key(SOURCES, ())
    except UnsupportedError:
        return ""
