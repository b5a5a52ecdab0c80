"""How CPU kernels are compiled, and how a kernel finds its arguments and its share of the work.

A kernel is `kernel(arguments, thread, threads)`: the address of its int64 arguments, and which of how many
threads it is. Programs hold kernels by the address of their machine code, so a model compiles only what it
uses. This file knows no kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from hipfire.kernels.cpu.cache import MachineCode, is_kept, keep_code, kept_code
from hipfire.kernels.cpu.native import export, link
from hipfire.kernels.cpu.simd import load_float, load_long

F = TypeVar("F", bound=Callable[..., Any])
# no Python inside, no checks, and strict IEEE arithmetic: nothing reordered or fused but what is written so
STRICT: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}


def helper(function: F) -> F:
    """Compile a function that kernels call."""
    compiled: F = njit(nogil=True, **STRICT)(function)
    return compiled


class Compiled:
    """A function of int64 that returns int64 or nothing, as machine code.

    It is compiled, or loaded from disk, when it is first called or its address is asked for. `name` is unique
    among all of them.
    """

    def __init__(self, name: str, function: Callable[..., Any], arity: int, *, result: bool) -> None:
        self.name = name
        self._function = function
        self._arity = arity
        self._result = result

    @cached_property
    def address(self) -> int:
        """Return where the machine code lies."""
        kept = kept_code(self.name)
        place = 0 if kept is None else link(kept.symbol, kept.code)
        if place == 0:
            made = self._compiled()
            keep_code(self.name, made)
            place = link(made.symbol, made.code)
        return place

    def _compiled(self) -> MachineCode:
        signature = ((types.int64,) * self._arity, types.int64 if self._result else types.void)
        compiler: Any = CFunc(self._function, signature, {}, dict(STRICT))
        with global_compiler_lock:
            made = compiler._compile_uncached()
            made.library.finalize()
        text, function = made.library.get_llvm_str(), made.fndesc.llvm_cfunc_wrapper_name
        symbol = f"hipfire-{self.name}"
        return MachineCode(symbol, export(text, function, symbol, made.library.codegen._tm))

    @cached_property
    def call(self) -> Callable[..., Any]:
        """Return the function for Python; other Python threads run while it does."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int64 if self._result else None, *(ctypes.c_int64,) * self._arity)
        return kind(self.address)

    def compile(self) -> None:
        """Compile the function or load it, unless that is done."""
        _ = self.address

    @property
    def ready(self) -> bool:
        """Tell whether asking for the address will not compile."""
        return "address" in self.__dict__ or is_kept(self.name)


class Kernel(Compiled):
    """A kernel: `kernel(arguments, thread, threads)`."""

    def __init__(self, name: str, function: Callable[[int, int, int], None]) -> None:
        super().__init__(name, function, 3, result=False)

    def __call__(self, arguments: int, thread: int, threads: int) -> None:
        """Run it alone, as one of `threads` threads."""
        self.call(arguments, thread, threads)


def kernel(name: str) -> Callable[[Callable[[int, int, int], None]], Kernel]:
    """Make a kernel of this unique name from a function in Numba's subset of Python."""
    return partial(Kernel, name)


@helper
def argument(arguments: int, index: int) -> int:
    """Return the int64 argument at `index`."""
    return load_long(arguments + 8 * index)  # type: ignore[no-any-return]


@helper
def number(arguments: int, index: int) -> float:
    """Return the float32 argument at `index`: the first four of its eight bytes."""
    return load_float(arguments + 8 * index)  # type: ignore[no-any-return]


@helper
def share(units: int, thread: int, threads: int) -> tuple[int, int]:
    """Return the range [first, last) of this thread among `units` pieces of work."""
    return units * thread // threads, units * (thread + 1) // threads
