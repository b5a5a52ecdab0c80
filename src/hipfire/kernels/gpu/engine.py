"""The GPU engine: runs Triton kernels on one device, and keeps a record of what ran.

Implementations of operations call `launch`; each launch is one row of the engine's tape while it records.
Memory for results comes from a scratch whose addresses do not change from step to step, so a recorded step
can be run again. This file knows no operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.target import INTERPRETED, TargetName

Arithmetic = Literal["int8", "float"]
Grid = tuple[int, ...]


class Scratch(Protocol):
    """Where results of a step are placed."""

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a result; equal sequences of calls get equal addresses."""

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Let everything taken so far be taken again, except what `kept` lies in."""


class FreshScratch:
    """Takes new memory for every result: for work outside of steps, and where no plan has been made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return new memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Do nothing: what nobody holds is gone."""


@dataclass(frozen=True)
class GpuLaunch:
    """One launch of a kernel, or one call into a library if `kernel` is None.

    `arguments` are what the kernel was given, tensors among them, by name; `constants` its compile-time
    parameters and `options` warps and stages. `compiled` is what Triton compiled for it (None if
    interpreted).
    """

    name: str
    kernel: Any
    grid: Grid
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    compiled: Any = None

    def run(self) -> Any:
        """Launch the kernel again on the same arguments; InternalError for a call into a library."""
        if self.kernel is None:
            raise InternalError(f"{self.name} is a library's and cannot be launched again")
        return self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


@dataclass
class GpuTape:
    """The launches of a step, in order; `spoiled` names what keeps it from being run again, if any."""

    launches: list[GpuLaunch] = field(default_factory=list)
    spoiled: str | None = None


class GpuEngine:
    """The engine of one loaded model on one device.

    `arithmetic` says how products with packed weights treat activations in decode steps: rounded to int8, 32
    at a time, or as they are. `processors` is the number of the device's multiprocessors. `overlapped` says
    that a launch may start up while the one before it ends; kernels that take TARGET wait for it themselves
    (`target.begin_launch`).
    """

    def __init__(
        self,
        device: torch.device,
        target: TargetName,
        *,
        arithmetic: Arithmetic = "int8",
        processors: int = 1,
        overlapped: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        if (target == "plain") != INTERPRETED:
            raise InternalError("kernels are interpreted for the plain target and compiled for all others")
        self.device = device
        self.target: TargetName = target
        self.arithmetic: Arithmetic = arithmetic
        self.processors = processors
        self.overlapped = overlapped
        self.scratch: Scratch = scratch or FreshScratch(device)
        self._tape: GpuTape | None = None
        self._rehearsing = False
        self._prepared: dict[str, tuple[tuple[torch.Tensor, Any], ...]] = {}

    @property
    def exact(self) -> bool:
        """Tell whether activations are used as they are."""
        return self.arithmetic == "float"

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        /,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        constants: Mapping[str, Any],
        warps: int = 4,
        stages: int = 1,
        **arguments: Any,
    ) -> None:
        """Run a kernel. `arguments` are by the kernel's own parameter names; None stands for no tensor."""
        if self._rehearsing or 0 in grid:
            return
        options = {"num_warps": warps, "num_stages": stages}
        if self.overlapped and "TARGET" in constants:
            options["launch_pdl"] = True
        compiled = kernel[grid](**arguments, **constants, **options)
        if self._tape is not None:
            launch = GpuLaunch(
                kernel.__name__,
                kernel,
                grid,
                arguments,
                constants,
                options,
                tuple(reads),
                tuple(writes),
                compiled,
            )
            self._tape.launches.append(launch)

    def library(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Run a call into a library on tensors of this device; a tape with one cannot be run again."""
        if self._rehearsing:
            return
        call()
        if self._tape is not None:
            self._tape.launches.append(GpuLaunch(name, None, (), {}, {}, {}, tuple(reads), tuple(writes)))
            self._tape.spoiled = self._tape.spoiled or name

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return memory for a result, contiguous and uninitialized. `name` says what it is for."""
        return self.scratch.take(name, shape, dtype)

    def settle(self, *kept: torch.Tensor) -> None:
        """Say that of all results so far only those in `kept` will be read again."""
        self._prepared.clear()
        self.scratch.settle(kept)

    def spoil(self, name: str) -> None:
        """Note that an operation ran outside of the engine, so this recording cannot be run again."""
        if self._tape is not None:
            self._tape.spoiled = self._tape.spoiled or name

    def record(self) -> None:
        """Begin to keep launches."""
        self._tape = GpuTape()
        self._prepared.clear()

    def finish(self) -> GpuTape:
        """End the recording and return it."""
        tape, self._tape = self._tape, None
        self._prepared.clear()
        if tape is None:
            raise InternalError("no recording was begun")
        return tape

    @contextmanager
    def rehearse(self, scratch: Scratch) -> Iterator[None]:
        """Run operations for the memory that they take from `scratch`, and launch nothing."""
        before, self.scratch, self._rehearsing = self.scratch, scratch, True
        self._prepared.clear()
        try:
            yield
        finally:
            self.scratch, self._rehearsing = before, False
            self._prepared.clear()

    def prepared(self, kind: str, x: torch.Tensor) -> Any:
        """Return the form of these very activations that `prepare` was given lately, or None."""
        held = self._prepared.get(kind, ())
        return next((form for known, form in held if _same_memory(known, x)), None)

    def prepare(self, kind: str, x: torch.Tensor, form: Any) -> None:
        """Keep a form of activations that several products will read; the last two of a kind are kept.

        Two, because weights of rotated and of other formats may read the same activations in turn.
        """
        self._prepared[kind] = ((x, form), *self._prepared.get(kind, ())[:1])


def _same_memory(some: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same elements in the same order, whatever shape they are seen in."""
    if some is other:
        return True
    return (
        some.untyped_storage() is other.untyped_storage()
        and some.storage_offset() == other.storage_offset()
        and some.numel() == other.numel()
        and some.dtype == other.dtype
        and some.is_contiguous()
        and other.is_contiguous()
    )
