"""Finds the weight formats: every module of this package that has a `FORMATS` tuple. No list is kept by hand.

This file does not know any format by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from types import MappingProxyType, ModuleType

import hipfire.quant
from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.base.qtypes import GGUF_BASE, qtype_name
from hipfire.quant.format import WeightFormat
from hipfire.quant.gguf_other import other_format


def all_formats() -> tuple[WeightFormat, ...]:
    """Return every format that has a file here, by rising qtype."""
    return tuple(_table().values())


@cache
def format_of(qtype: int) -> WeightFormat:
    """Return the format of a qtype; GGML types without a file here get one that is read through `gguf`.

    Raises UnsupportedError naming the qtype where there is none.
    """
    known = _table().get(qtype)
    if known is not None:
        return known
    if qtype >= GGUF_BASE:
        return other_format(qtype - GGUF_BASE)
    raise UnsupportedError(
        f"weight format {qtype_name(qtype)} is not supported",
        hint=f"supported formats are {', '.join(found.name for found in all_formats())}",
    )


@cache
def _table() -> MappingProxyType[int, WeightFormat]:
    return MappingProxyType(collect_formats(_modules()))


def collect_formats(modules: Iterable[ModuleType]) -> dict[int, WeightFormat]:
    """Return the `FORMATS` of modules by rising qtype; raises InternalError when two claim one qtype."""
    found: dict[int, WeightFormat] = {}
    owners: dict[int, str] = {}
    for module in modules:
        for item in getattr(module, "FORMATS", ()):
            if item.qtype in found:
                raise InternalError(
                    f"qtype {item.qtype} is claimed by {owners[item.qtype]} and {module.__name__}",
                    hint="give one of them another qtype",
                )
            found[item.qtype] = item
            owners[item.qtype] = module.__name__
    return dict(sorted(found.items()))


def _modules() -> Iterable[ModuleType]:
    for entry in pkgutil.iter_modules(hipfire.quant.__path__, f"{hipfire.quant.__name__}."):
        if entry.name != __name__:
            yield importlib.import_module(entry.name)
