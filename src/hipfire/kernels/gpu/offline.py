"""What is compiled of each kernel where no GPU is, for which machines, and what must be in the result.

A kernel's file states `OFFLINE`, one entry for each way in which it is started. The gate in
`hipfire.validate.compile_gate` compiles them all. This file knows no kernel and judges nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hipfire.base.errors import InternalError, UnsupportedError

Backend = Literal["cuda", "hip"]
NEEDS: Final = frozenset({"dot4", "matrix"})
TRITON_VERSION: Final[str] = triton.__version__
_SCALARS: Final = frozenset({"fp32", *(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)), "i1"})
_TARGET: Final = "TARGET"
_WARP: Final = 32


@dataclass(frozen=True, slots=True)
class OfflineTarget:
    """A machine to compile for. `shared` is what one program may use of shared memory (LDS), in bytes."""

    name: str
    backend: Backend
    arch: int | str
    shared: int


TARGETS: Final[Mapping[str, OfflineTarget]] = MappingProxyType(
    {
        "gfx1100": OfflineTarget("gfx1100", "hip", "gfx1100", 65536),
        "gfx1151": OfflineTarget("gfx1151", "hip", "gfx1151", 65536),
        "gfx1201": OfflineTarget("gfx1201", "hip", "gfx1201", 65536),
        "sm_90": OfflineTarget("sm_90", "cuda", 90, 232448),
    }
)


@dataclass(frozen=True)
class Offline:
    """One way in which a kernel is started.

    `arguments` gives the Triton type of each run-time parameter ("*fp32", "*u8", "i32"), `constants` the
    values of the others: compile-time parameters, and what Triton makes one of, which is None for a tensor
    that is absent and 1 for an integer that is 1. `TARGET` is filled in for each machine, and parameters with
    a default may be left out. `name` tells the entries of one kernel apart. `needs` names instructions that
    must be there: "dot4" (a product of four bytes), "matrix" (tensor cores). Pointers count as divisible by
    16 but for those in `unaligned`, integers only if they are in `aligned`. `on` limits the entry to some
    backends ("cuda", "hip") or machines (names of `TARGETS`).
    """

    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 1
    name: str = ""
    needs: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()
    unaligned: frozenset[str] = frozenset()
    on: frozenset[str] = field(default=frozenset({"cuda", "hip"}))

    def __post_init__(self) -> None:
        """Raise `InternalError` where the entry does not fit the kernel's parameters."""
        for fault in self._faults():
            raise InternalError(f"OFFLINE entry {self.label}: {fault}")

    @property
    def function(self) -> Any:
        """Return the Python function under Triton's decorators."""
        kernel = self.kernel
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        return kernel

    @property
    def label(self) -> str:
        """Name the kernel, and the entry where it has a name."""
        return f"{self.function.__name__}{f'[{self.name}]' if self.name else ''}"

    def runs_on(self, target: OfflineTarget) -> bool:
        """Tell whether the kernel is started like this on such a machine."""
        return target.name in self.on or target.backend in self.on

    def compile(self, target: OfflineTarget) -> Any:
        """Return what Triton compiles for a machine; `UnsupportedError` where kernels are interpreted.

        A fault of the kernel raises one of Triton's errors, and a fault of the compiler may end the process.
        """
        kernel = self.kernel
        while not hasattr(kernel, "cache_key"):
            if not hasattr(kernel, "fn") or not hasattr(kernel.fn, "fn"):
                hint = "unset TRITON_INTERPRET before Python starts"
                raise UnsupportedError("this process interprets kernels and cannot compile them", hint=hint)
            kernel = kernel.fn
        constants = {**self._defaults(), **self.constants}
        if _TARGET in self._parameters():
            constants[_TARGET] = target.backend
        names = list(self._parameters())
        signature = {name: self.arguments.get(name, "constexpr") for name in names}
        attributes = {
            (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if self._divisible(name)
        }
        source = ASTSource(kernel, signature, constants, attributes)
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return triton.compile(source, target=GPUTarget(target.backend, target.arch, _WARP), options=options)

    def _divisible(self, name: str) -> bool:
        if self.arguments.get(name, "").startswith("*"):
            return name not in self.unaligned
        return name in self.aligned

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def _defaults(self) -> dict[str, Any]:
        empty = inspect.Parameter.empty
        return {
            name: parameter.default
            for name, parameter in self._parameters().items()
            if parameter.default is not empty and name not in self.arguments
        }

    def _faults(self) -> list[str]:
        parameters = set(self._parameters())
        given = [*self.arguments, *self.constants]
        faults = [f"the kernel has no parameter {name}" for name in given if name not in parameters]
        faults += [f"{name} is argument and constant" for name in self.arguments if name in self.constants]
        lacking = parameters - set(given) - set(self._defaults()) - {_TARGET}
        faults += [f"nothing is said about {name}" for name in sorted(lacking)]
        if _TARGET in given:
            faults.append(f"{_TARGET} is set by the machine")
        faults += [
            f"{name} cannot have the type {kind!r}"
            for name, kind in self.arguments.items()
            if not kind.startswith("*") and kind not in _SCALARS
        ]
        named = (self.aligned | self.unaligned) - set(self.arguments)
        faults += [f"{name} is no argument" for name in sorted(named)]
        faults += [f"nothing is known of the need {need!r}" for need in sorted(self.needs - NEEDS)]
        machines = {*TARGETS, *(target.backend for target in TARGETS.values())}
        faults += [f"{name!r} is no machine" for name in sorted(self.on - machines)]
        return faults if self.on else [*faults, "it is for no machine"]


def tool(name: str) -> str:
    """Return the path of one of the programs that come with Triton, such as `cuobjdump`."""
    path: str = getattr(triton.knobs.nvidia, name).path
    return path
