"""What the tests of the CPU engine share: poisoned memory, padded inputs, comparisons, child processes."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import hipfire.kernels
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.launch import Launcher

Floats = np.ndarray[Any, np.dtype[np.float64]]
ROWS = (1, 2, 3, 5, 8, 17)
HEAD_DIMS = (8, 16, 20, 24, 64, 80, 128, 256)
GUARD, GUARD_BYTE, POISON_BYTE = 1024, 0xA5, 0xFF
PATHS_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One call of an operation: `run(launcher)` returns its results, `want` is what they are in float64.

    With `rowwise` the relative RMS of every row must not exceed `bound`, else that is the largest relative
    error of any number, beside the absolute `floor`. `size` replaces the RMS of the rows that errors are
    relative to, for results that may come out small by chance.
    """

    label: str
    run: Callable[[Launcher], Sequence[torch.Tensor]]
    want: Sequence[Floats]
    bound: float
    floor: float = 0.0
    rowwise: bool = False
    size: Floats | None = None

    def check(self, results: Sequence[torch.Tensor]) -> None:
        assert len(results) == len(self.want), self.label
        for got, want in zip(results, self.want, strict=True):
            found = got.detach().double().numpy()
            assert found.shape == want.shape, self.label
            assert np.isfinite(found).all(), f"{self.label}: what nobody wrote was read, or left"
            if self.rowwise:
                worst = row_errors(found, want, self.size).max(initial=0.0)
                assert worst <= self.bound, f"{self.label}: relative RMS {worst:.3g} of a row"
            else:
                excess = np.abs(found - want) - self.bound * np.abs(want) - self.floor
                assert excess.max(initial=0.0) <= 0.0, f"{self.label}: {excess.max():.3g} beyond the bound"


def row_errors(got: Floats, want: Floats, size: Floats | None = None) -> Floats:
    """Relative RMS of each row, of which all dimensions but the first are made."""
    got, want = got.reshape(len(got), -1), want.reshape(len(want), -1)
    if size is None:
        size = np.sqrt(np.square(want).mean(1))
    errors: Floats = np.sqrt(np.square(got - want).mean(1)) / np.where(size > 0, size, 1.0)
    return errors


@dataclass
class PoisonedMemory:
    """Stands in for `torch.empty`: memory full of NaN (bytes 0xFF), with guards before and behind."""

    blocks: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        nbytes = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
        block = torch.full((nbytes + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
        block[GUARD : GUARD + nbytes] = POISON_BYTE
        self.blocks.append((block, nbytes))
        return block[GUARD : GUARD + nbytes].view(dtype).view(sizes)

    def check(self) -> None:
        for block, nbytes in self.blocks:
            assert bool((block[:GUARD] == GUARD_BYTE).all()), "written before the start of a tensor"
            assert bool((block[GUARD + nbytes :] == GUARD_BYTE).all()), "written behind the end of a tensor"


@contextmanager
def poisoned_memory() -> Iterator[PoisonedMemory]:
    """Let `torch.empty` hand out poisoned memory, and check its guards in the end."""
    memory, real = PoisonedMemory(), torch.empty
    torch.empty = memory.empty  # type: ignore[assignment]
    try:
        yield memory
    finally:
        torch.empty = real
    memory.check()


def kernel_modules() -> list[ModuleType]:
    """All modules of the package of kernels."""
    found = pkgutil.walk_packages(hipfire.kernels.__path__, "hipfire.kernels.")
    return [importlib.import_module(module.name) for module in found]


@functools.cache
def _engine(threads: int) -> CpuEngine:
    return CpuEngine(threads)


def launcher_of(threads: int) -> Launcher:
    """A launcher for an engine that starts without scratch memory, so that it is taken and poisoned anew."""
    engine = _engine(threads)
    engine._scratch = torch.empty(0, dtype=torch.uint8)
    engine.forget()
    return Launcher(engines={"numba": engine})


def outcome(case: Case, threads: int) -> Sequence[torch.Tensor]:
    """Run a case in poisoned memory, scratch memory included."""
    with poisoned_memory():
        return case.run(launcher_of(threads))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(raw_bytes(tensor))
    return state.hexdigest()


def random_rows(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * size


def padded(x: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values as a view of a wider tensor that is NaN everywhere else."""
    flat = x.reshape(len(x), -1)
    wide = torch.full((len(x) + 1, flat.shape[1] + extra), float("nan"), dtype=x.dtype)
    view = wide[: len(x), : flat.shape[1]]
    view.copy_(flat)
    return view.view(x.shape)


def both_kinds(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor in one piece, and with rows that lie apart."""
    yield "in one piece", x
    yield "in a padded tensor", padded(x, 21)


def rounded_to_int8(x: torch.Tensor) -> tuple[Any, Any, Floats]:
    """What products make of float32 [T, K]: int8 codes and float32 scales of groups of 32, and their meaning.

    scale = peak / 127, code = x * (127 / peak) to the nearest even, all in float32; nothing below 1e-30.
    """
    rows, cols = x.shape
    groups = np.zeros((rows, -(-cols // 32) * 32), np.float32)
    groups[:, :cols] = x.numpy()
    groups = groups.reshape(rows, -1, 32)
    peak = np.abs(groups).max(-1)
    normal = peak > np.float32(1e-30)
    safe = np.where(normal, peak, np.float32(1.0))
    scale = np.where(normal, safe / np.float32(127.0), np.float32(0.0)).astype(np.float32)
    inverse = np.where(normal, np.float32(127.0) / safe, np.float32(0.0)).astype(np.float32)
    codes = np.rint(groups * inverse[..., None]).astype(np.int8)
    meant = codes * scale[..., None].astype(np.float64)
    return codes.reshape(rows, -1), scale, meant.reshape(rows, -1)[:, :cols]


def run_python(*arguments: str, timeout: float = 200.0, **environment: str | None) -> str:
    """Run Python with the tests on its path and a changed environment; returns what it prints."""
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join((str(PATHS_FOLDER), str(PATHS_FOLDER.parent)))}
    for name, value in environment.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=merged, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout
