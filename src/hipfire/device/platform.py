"""Which GPU this process has, whether hipfire can use it, and where its compiled kernels are kept.

Everything is asked before weights are loaded, so that an old driver or a card that no kernel can be built for
is one line at the start and not a fault in the first step. AMD's GPUs appear under torch's CUDA names. This
file does not know kernels and never imports their compiler.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hipfire.base.cpu_cache import VARIABLE, CacheDir, kernel_cache_dir
from hipfire.base.env import get
from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.printable import one_line

log = logging.getLogger(__name__)

Vendor = Literal["cuda", "hip"]

# the compute capability from which bfloat16 and asynchronous copies exist, as in sm_80
LEAST_CAPABILITY = 80
# AMD generations with the 4-way integer product and matrix instructions that the kernels use
HIP_GENERATIONS = ("gfx11", "gfx12")
# the first driver that runs programs of a CUDA version, by its major number
_LEAST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
# how torch says that there is no device at all, which is no error
_ABSENT = (
    "No CUDA GPUs are available",
    "No HIP GPUs are available",
    "Found no NVIDIA driver",
    "no CUDA-capable device",
    "not compiled with CUDA",
)
_CPU_HINT = "or run the model on the CPU"
_KERNEL_FOLDER = "TRITON_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `total_memory` is in bytes; `processors` counts its multiprocessors (AMD: compute units).

    `arch` is the architecture that kernels are compiled for, as in sm_90 or gfx1100; `built_for` lists those
    that this build of torch has code for. `driver` is "unknown" where the system does not tell.
    """

    name: str
    vendor: Vendor
    arch: str
    index: int
    total_memory: int
    processors: int
    driver: str
    torch_version: str
    runtime: str
    built_for: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """The device for tensors."""
        return torch.device("cuda", self.index)


def find_gpu(index: int = 0) -> Gpu | None:
    """Return the GPU of that number, or None on a machine without GPUs or with a torch for CPUs only.

    Raises UnsupportedError, with the driver's own words, if there is one that cannot be used, and
    ValidationError if there are GPUs but none of that number.
    """
    vendor: Vendor = "hip" if torch.version.hip is not None else "cuda"
    runtime = torch.version.hip or torch.version.cuda
    if runtime is None or not _start(vendor, runtime):
        return None
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValidationError(f"GPU {index} is not there", hint=f"this machine has {count}, counted from 0")
    facts = torch.cuda.get_device_properties(index)
    arch = facts.gcnArchName.partition(":")[0] if vendor == "hip" else f"sm_{facts.major}{facts.minor}"
    return Gpu(
        name=one_line(facts.name),
        vendor=vendor,
        arch=arch,
        index=index,
        total_memory=facts.total_memory,
        processors=facts.multi_processor_count,
        driver=driver_version(vendor),
        torch_version=str(torch.__version__),
        runtime=runtime,
        built_for=tuple(torch.cuda.get_arch_list()),
    )


def check_supported(gpu: Gpu, probe: Callable[[Gpu], None] | None = None) -> None:
    """Raise UnsupportedError, which names GPU, driver and what is needed, if hipfire cannot use this GPU.

    `probe` runs something small on the GPU, and raises RuntimeError if that fails.
    """
    if gpu.vendor == "cuda":
        capability = int(gpu.arch.removeprefix("sm_"))
        fits = capability >= LEAST_CAPABILITY
        needed = f"compute capability {LEAST_CAPABILITY / 10} (sm_{LEAST_CAPABILITY}) or later"
    else:
        fits = gpu.arch.startswith(HIP_GENERATIONS)
        needed = f"one of the generations {' and '.join(HIP_GENERATIONS)}"
    if not fits:
        raise _unsupported(gpu, f"hipfire needs {needed}", "use another GPU")
    if gpu.built_for and not _is_built_for(gpu):
        names = ", ".join(gpu.built_for)
        raise _unsupported(gpu, f"this torch has code for {names} only", "install a torch build for this GPU")
    try:
        (probe or _probe)(gpu)
    except RuntimeError as error:
        reason = f"a first test on it failed: {_first_sentence(error)}"
        raise _unsupported(gpu, reason, _driver_hint(gpu.vendor, gpu.runtime)) from error


def free_memory(gpu: Gpu) -> int:
    """Return the bytes that no process uses now. Memory that torch keeps for later counts as used."""
    free, _ = torch.cuda.mem_get_info(gpu.index)
    return free


def driver_version(vendor: Vendor, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> str:
    """Return the version of the kernel's driver, or "unknown"; nothing is raised."""
    module = "nvidia" if vendor == "cuda" else "amdgpu"
    for path in (sys / "module" / module / "version", proc / "driver" / module / "version"):
        try:
            found = re.search(r"\d+(\.\d+)+", path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if found is not None:
            return found[0]
    return "unknown"


def keep_kernels(environment: MutableMapping[str, str] = os.environ) -> CacheDir:
    """Choose the folder for compiled GPU kernels and name it to the compiler, before it first compiles.

    It is the user's TRITON_CACHE_DIR, else a folder beside the CPU's kernels; where that cannot be written or
    belongs to someone else, the next place by the rules of `kernel_cache_dir`, with one line in the log. The
    compiler cannot work without a folder, so UnsupportedError if there is none.
    """
    key = f"triton-{re.sub(r'[^A-Za-z0-9.]', '-', _compiler_version())}"
    places = dict(environment)
    chosen = get(_KERNEL_FOLDER, environment)
    if chosen is not None:
        # a child process finds what its parent chose, which ends with the key already
        path = Path(chosen)
        places[VARIABLE] = str(path.parent if path.name == key else path)
    found = kernel_cache_dir(key, environment=places)
    if found.path is None:
        raise UnsupportedError(f"there is no folder for compiled GPU kernels: {found.problem}")
    if found.problem is not None:
        log.warning("%s", found.problem)
    environment[_KERNEL_FOLDER] = str(found.path)
    return found


def _start(vendor: Vendor, runtime: str) -> bool:
    """Start torch's runtime; False if there is no GPU, UnsupportedError if there is but it does not start."""
    try:
        with warnings.catch_warnings():
            # torch says in a warning what its error says too
            warnings.simplefilter("ignore")
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        if any(words in str(error) for words in _ABSENT):
            return False
        raise UnsupportedError(
            f"the GPU cannot be used (driver {driver_version(vendor)}): {_first_sentence(error)}",
            hint=f"{_driver_hint(vendor, runtime)}, {_CPU_HINT}",
        ) from error
    return torch.cuda.device_count() > 0


def _is_built_for(gpu: Gpu) -> bool:
    """Tell whether one of torch's architectures runs on this GPU."""
    if gpu.vendor == "hip":
        return any(built.partition(":")[0] == gpu.arch for built in gpu.built_for)
    own = int(gpu.arch.removeprefix("sm_"))
    for built in gpu.built_for:
        kind, _, number = built.partition("_")
        if not number.isdecimal():
            # code for one exact card, as in sm_90a
            fits = number.rstrip("af") == str(own)
        elif kind == "compute":
            fits = int(number) <= own
        else:
            fits = int(number) // 10 == own // 10 and int(number) <= own
        if fits:
            return True
    return False


def _probe(gpu: Gpu) -> None:
    total = torch.arange(5, device=gpu.device).sum().item()
    if total != 10:
        raise RuntimeError(f"0 + 1 + 2 + 3 + 4 gave {total}")


def _unsupported(gpu: Gpu, reason: str, hint: str) -> UnsupportedError:
    return UnsupportedError(
        f"{gpu.name} ({gpu.arch}, driver {gpu.driver}) cannot be used: {reason}", hint=f"{hint}, {_CPU_HINT}"
    )


def _driver_hint(vendor: Vendor, runtime: str) -> str:
    if vendor == "hip":
        return f"install a driver for ROCm {runtime}"
    least = _LEAST_DRIVER.get(runtime.partition(".")[0])
    return (
        f"CUDA {runtime} needs driver {least} or later" if least else f"install a driver for CUDA {runtime}"
    )


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error as one line: torch appends addresses and advice for debugging."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return one_line(text.rstrip(".")) or type(error).__name__


def _compiler_version() -> str:
    for name in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
