"""Machine code in this process: object files made from LLVM IR, linked and callable.

Linking needs no compiler. This file does not know what the code does or where it is kept.
"""

from __future__ import annotations

import ctypes
import re
import threading
from functools import cache
from typing import Any

import llvmlite.binding as llvm

# what Numba's wrappers would call if a function could raise; those of kernels cannot
_HELPERS = re.compile(rb"\x00_?((?:numba_|NRT_)\w+)(?=\x00)")
_LOCK = threading.Lock()


@cache
def _linker() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def export(text: str, function: str, symbol: str, machine: Any) -> bytes:
    """Return LLVM IR as an object file that offers one of its functions to others, under the name `symbol`.

    All its other names become its own. Numba numbers functions from one in every process, so kernels that
    different processes compiled have names in common, and linking would take one function for another.
    `machine` is LLVM's target machine.
    """
    module = llvm.parse_assembly(text)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = llvm.Linkage.internal
    offered = module.get_function(function)
    offered.linkage, offered.name = llvm.Linkage.external, symbol
    code: bytes = machine.emit_object(module)
    return code


def link(symbol: str, code: bytes) -> int:
    """Add an object file to this process and return the address of a function in it; 0 if it is not there.

    The bytes must be those of a sound object file for this processor.
    """
    with _LOCK:
        for name in {match.decode() for match in _HELPERS.findall(code)}:
            if llvm.address_of_symbol(name) is None:
                llvm.add_symbol(name, _last_resort())
        linker = _linker()
        linker.add_object_file(llvm.ObjectFileRef.from_data(code))
        linker.finalize_object()
        return int(linker.get_function_address(symbol))


@cache
def _last_resort() -> int:
    """Return the address of what ends the process."""
    return ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value or 0
