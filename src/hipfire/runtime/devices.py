"""Which device a load goes to. This file asks what is there and loads nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping

from hipfire.base import log
from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.device.platform import Gpu, check_supported, find_gpu
from hipfire.models.family import ModelConfig
from hipfire.runtime.load_options import LoadOptions, device_number


def choose_gpu(options: LoadOptions) -> Gpu | None:
    """Return the GPU that a load goes to, None for the CPU.

    `auto` takes the first GPU if hipfire can use it, else the CPU, and says why. Raises ValidationError if a
    GPU is asked for that is not there, or settings contradict each other; UnsupportedError, as
    `device.platform`, if it cannot be used.
    """
    number = device_number(options.device)
    if options.device == "cpu":
        return None
    if number is None:
        # how the CPU holds weights was chosen, so the CPU was
        return None if options.residency != "auto" else _first_usable()
    if options.residency != "auto":
        raise ValidationError(
            f"weights cannot be held as {options.residency} on a GPU", hint="leave memory.weights at auto"
        )
    gpu = find_gpu(number)
    if gpu is None:
        raise ValidationError(f"there is no GPU for device {options.device}", hint="use hardware.device=cpu")
    _check(gpu)
    return gpu


def gpu_for(config: ModelConfig, options: LoadOptions) -> Gpu | None:
    """Return the GPU that a load of this model goes to, None for the CPU; as `choose_gpu`.

    Models with recurrent layers are not brought to GPUs: their kernels gave wrong results on one, where the
    interpreter's are right. UnsupportedError where a GPU is asked for.
    """
    gpu = choose_gpu(options)
    if gpu is None or not config.state_specs():
        return gpu
    error = UnsupportedError(
        "models with gated DeltaNet layers do not run on GPUs in this version", hint="use hardware.device=cpu"
    )
    if options.device != "auto":
        raise error
    log.logger().warning(f"the model goes to the CPU: {error.message}")
    return None


def _first_usable() -> Gpu | None:
    try:
        gpu = find_gpu()
        if gpu is not None:
            _check(gpu)
    except UnsupportedError as error:
        log.logger().warning(f"the model goes to the CPU: {error}")
        return None
    return gpu


def _check(gpu: Gpu) -> None:
    check_supported(gpu)
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            f"kernels for {gpu.name} need Triton, which is not installed", hint="run: pip install triton"
        )
    if not _has_compiler(os.environ):
        raise UnsupportedError(
            f"Triton needs a C compiler to start kernels on {gpu.name}, and finds none",
            hint="install gcc or clang, or use hardware.device=cpu",
        )


def _has_compiler(environment: Mapping[str, str]) -> bool:
    """Tell whether Triton will find what it builds the start of kernels with, by its own rules."""
    return "CC" in environment or any(shutil.which(name) for name in ("gcc", "clang"))
