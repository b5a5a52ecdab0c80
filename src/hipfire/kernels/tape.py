"""The identity of a recorded step: what ran, in which order, on which memory, as one number.

Two recordings with one sequence hash launched the same code with the same arguments in the same order, also
in two processes: an address stands in it as the memory that it lies in and the offset there, and memory is
numbered in the order in which it first appears. This file knows no engine and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

FNV_OFFSET: Final = 0xCBF29CE484222325
FNV_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def fnv1a64(data: bytes, state: int = FNV_OFFSET) -> int:
    """Return the 64-bit FNV-1a hash of some bytes, going on from the hash of what came before."""
    for byte in data:
        state = (state ^ byte) * FNV_PRIME & _MASK
    return state


@dataclass(frozen=True, slots=True)
class Identity:
    """One launch without its addresses.

    `code` is a digest of what was compiled, or of its source. `arguments`, `reads` and `writes` are text in
    which an address is a number of memory, an offset and a length.
    """

    kernel: str
    code: str
    grid: tuple[int, ...]
    options: str
    arguments: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def variant(self) -> tuple[str, str, str]:
        """Return what makes two launches launches of one kernel."""
        return self.kernel, self.code, self.options

    def to_bytes(self) -> bytes:
        """Return what the sequence hash is taken over; no two launches that differ have the same bytes."""
        fields = (self.kernel, self.code, ",".join(map(str, self.grid)), self.options, self.arguments)
        parts = (*fields, ";".join(self.reads), ";".join(self.writes))
        encoded = (part.encode() for part in parts)
        return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


@dataclass(frozen=True, slots=True)
class TapeKey:
    """What a step's recording is known by."""

    launches: int
    kernels: int
    sequence_hash: str


@dataclass(frozen=True, slots=True)
class TapeFacts:
    """A recording in words: its launches, and what is wrong with it.

    `faults` keep it from being run again: kernels whose code is not known or that use local memory,
    operations that ran outside of the engine. `undeclared` are arguments whose use a launch does not state,
    `libraries` calls that are no kernels of this package.
    """

    identities: tuple[Identity, ...]
    faults: tuple[str, ...] = ()
    undeclared: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    @property
    def key(self) -> TapeKey:
        """Return the number of launches, of unique kernels, and the hash of the sequence."""
        state = FNV_OFFSET
        for identity in self.identities:
            state = fnv1a64(identity.to_bytes(), state)
        return TapeKey(len(self.identities), len({each.variant for each in self.identities}), f"{state:016x}")


class MemoryNames:
    """Names memory by the order in which it appears, so that names are the same in every process."""

    def __init__(self) -> None:
        # by the address of a storage: its number, and where the first tensor lay that was seen in it
        self._known: dict[int, tuple[int, int]] = {}

    def place(self, tensor: torch.Tensor) -> str:
        """Return the memory that a tensor lies in, and its offset, extent and type there.

        Offsets count from the first tensor seen: where it lies in its memory may be a matter of alignment.
        """
        address, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        number, origin = self._known.setdefault(storage, (len(self._known), address))
        return f"m{number}{address - origin:+d}:{extent(tensor)}:{_dtype(tensor.dtype)}"

    def arguments(self, values: Mapping[str, Any]) -> str:
        """Return a launch's arguments by name as text."""
        return ",".join(f"{name}={self._value(value)}" for name, value in values.items())

    def places(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the places of several tensors."""
        return tuple(self.place(tensor) for tensor in tensors)

    def _value(self, value: Any) -> str:
        return self.place(value) if isinstance(value, torch.Tensor) else scalar_text(value)


def scalar_text(value: Any) -> str:
    """Return a plain value as text that is the same in every process, exact for floats."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if value is None or isinstance(value, str | int):
        return repr(value)
    # a type of Triton's prints as its name
    return str(value)


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size()


def undeclared(
    arguments: Mapping[str, Any], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> list[str]:
    """Return the names of tensor arguments that lie in nothing that a launch says it reads or writes."""
    ranges = [(each.data_ptr(), each.data_ptr() + extent(each)) for each in (*reads, *writes)]
    return [
        name
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
        and value.numel()
        and not any(low <= value.data_ptr() < high for low, high in ranges)
    ]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
