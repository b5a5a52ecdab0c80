"""The one door: every operation of a forward pass is started here, and here only.

A `Launcher` is an explicit object that the step context carries. It picks the implementation from the device
of the operation's tensors and, when a tape is attached, records what ran, on what, reading and writing which
buffers. Replay, hazard analysis, profiles and parity reports read that record. This file knows no operation.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hipfire.base.errors import InternalError

# the order in which implementations are preferred on each kind of device, before the reference
PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cpu": ("numba",),
    "cuda": ("triton",),
    # tensors without memory: a rehearsal of what a step takes
    "meta": ("triton",),
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor as the tape sees it: where it lies and how it is read, not what is in it.

    `nbytes` counts from its first element to the end of its last.
    """

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch: names the operation and implementation, and the buffers by argument name.

    `scalars` holds every argument that is not a tensor, as text that is the same in every process.
    """

    op: str
    implementation: str
    reads: Mapping[str, Buffer]
    writes: Mapping[str, Buffer]
    scalars: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: its reference and the faster implementations.

    `kernels` gives the implementations by the dotted names of functions, which are imported when they are
    first used: they take the engine that runs them, then what the reference takes. `writes` names the
    arguments that the operation changes in place. What it returns counts as written too.
    """

    name: str
    reference: Callable[..., Any]
    kernels: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.writes) - set(inspect.signature(self.reference).parameters)
        if unknown:
            raise InternalError(
                f"operation {self.name} declares writes to unknown arguments {sorted(unknown)}"
            )

    def implementation(self, name: str) -> Callable[..., Any] | None:
        """Return the implementation of that name, or None where the operation has none."""
        if name == "reference":
            return self.reference
        return _imported(self.kernels[name]) if name in self.kernels else None


class Engine(Protocol):
    """What runs the implementations of one name, on one kind of device."""

    def spoil(self, name: str) -> None:
        """Note that an operation ran outside of the engine."""

    def settle(self, *kept: torch.Tensor) -> None:
        """Take note that of all results so far only those in `kept` will be read again."""


@functools.cache
def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _buffer(tensor: torch.Tensor) -> Buffer:
    """Describe a view: from its first element to its last, not the storage that it may be a part of."""
    span = 0
    if tensor.numel():
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return Buffer(
        address=tensor.data_ptr(),
        nbytes=span * tensor.element_size(),
        dtype=str(tensor.dtype),
        shape=tuple(tensor.shape),
    )


def _scalar(value: Any) -> str:
    """Print an argument the same way in every process: functions by name, not by address."""
    if isinstance(value, functools.partial):
        arguments = [_scalar(item) for item in value.args]
        arguments += [f"{name}={_scalar(item)}" for name, item in sorted(value.keywords.items())]
        return f"{_scalar(value.func)}({', '.join(arguments)})"
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


class Launcher:
    """Runs operations, on the implementation that fits their tensors.

    `engines` gives, by the name of an implementation, what runs it; implementations without an engine are
    not used. `only` pins one implementation (for comparing arm against arm); asking for one that an
    operation does not have is an `InternalError`. `tape`, if given, receives one `LaunchRecord` per launch,
    in order.
    """

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine] | None = None,
        only: str | None = None,
        tape: list[LaunchRecord] | None = None,
    ) -> None:
        self.engines = dict(engines or {})
        self.only = only
        self.tape = tape

    def run(self, op: Op, *args: Any, **kwargs: Any) -> Any:
        """Run `op` and return what it returns."""
        name = self.only or self._choose(op, args, kwargs)
        implementation = op.implementation(name)
        if implementation is None:
            raise InternalError(f"operation {op.name} has no implementation named {name}")
        if name == "reference":
            for engine in self.engines.values():
                engine.spoil(op.name)
            result = implementation(*args, **kwargs)
        elif name in self.engines:
            result = implementation(self.engines[name], *args, **kwargs)
        else:
            raise InternalError(f"this launcher has no engine for {name}")
        if self.tape is not None:
            self.tape.append(self._record(op, name, args, kwargs, result))
        return result

    def settle(self, *kept: torch.Tensor) -> None:
        """Tell the engines that of all results so far only those in `kept` will be read again."""
        for engine in self.engines.values():
            engine.settle(*kept)

    def _choose(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if not op.kernels or not self.engines:
            return "reference"
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                candidates = PREFERENCE.get(value.device.type, ())
                fitting = (name for name in candidates if name in op.kernels and name in self.engines)
                return next(fitting, "reference")
        return "reference"

    @staticmethod
    def _record(
        op: Op, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> LaunchRecord:
        bound = inspect.signature(op.reference).bind(*args, **kwargs)
        bound.apply_defaults()
        reads: dict[str, Buffer] = {}
        writes: dict[str, Buffer] = {}
        scalars: dict[str, str] = {}
        for argument, value in bound.arguments.items():
            if not isinstance(value, torch.Tensor):
                scalars[argument] = _scalar(value)
            elif argument in op.writes:
                writes[argument] = _buffer(value)
            else:
                reads[argument] = _buffer(value)
        results = result if isinstance(result, tuple) else (result,)
        for index, value in enumerate(results):
            if isinstance(value, torch.Tensor):
                writes[f"result{index}"] = _buffer(value)
        return LaunchRecord(op.name, name, reads, writes, scalars)
