"""Finding a GPU, refusing what cannot work with the reason, and the folder of compiled kernels."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.device import platform
from hipfire.device.platform import (
    Gpu,
    check_supported,
    driver_version,
    find_gpu,
    free_memory,
    keep_kernels,
)

Patch = pytest.MonkeyPatch
CARD = Gpu(
    name="Test Card",
    vendor="cuda",
    arch="sm_90",
    index=0,
    total_memory=1 << 34,
    processors=100,
    driver="580.10",
    torch_version="2.13.0",
    runtime="13.0",
    built_for=("sm_80", "sm_90"),
)


def works(gpu: Gpu) -> None:
    """A probe that finds nothing wrong."""


def machine(patch: Patch, *, hip: str | None = None, cuda: str | None = "13.0", error: Any = None) -> None:
    """Make torch see two GPUs, or fail to start with an error."""

    def init() -> None:
        if error is not None:
            raise error

    facts = SimpleNamespace(
        name="Test\x1b Card",
        major=8,
        minor=9,
        gcnArchName="gfx1100:sramecc-:xnack-",
        total_memory=24 << 30,
        multi_processor_count=76,
    )
    patch.setattr(torch.version, "hip", hip)
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch.cuda, "init", init)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    patch.setattr(torch.cuda, "mem_get_info", lambda index: (1000 + index, 5000))
    patch.setattr(platform, "driver_version", lambda vendor: f"{vendor} driver")


def test_a_gpu_is_described(monkeypatch: Patch) -> None:
    machine(monkeypatch)
    gpu = find_gpu(1)
    assert gpu == Gpu(
        "Test\\x1b Card", "cuda", "sm_89", 1, 24 << 30, 76, "cuda driver", torch.__version__, "13.0",
        ("sm_80", "sm_90"),
    )  # fmt: skip
    assert gpu.device == torch.device("cuda", 1)
    assert free_memory(gpu) == 1001
    machine(monkeypatch, hip="7.1.2", cuda=None)
    amd = find_gpu()
    assert amd is not None
    assert (amd.vendor, amd.arch, amd.runtime) == ("hip", "gfx1100", "7.1.2")


def test_a_gpu_of_another_number_is_refused(monkeypatch: Patch) -> None:
    machine(monkeypatch)
    for index in (2, -1):
        with pytest.raises(ValidationError, match=f"GPU {index} is not there; this machine has 2"):
            find_gpu(index)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("No CUDA GPUs are available"),
        RuntimeError("No HIP GPUs are available"),
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have one"),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_a_machine_without_gpus_has_none(monkeypatch: Patch, error: Exception) -> None:
    machine(monkeypatch, error=error)
    assert find_gpu() is None


def test_a_torch_for_cpus_has_no_gpu(monkeypatch: Patch) -> None:
    machine(monkeypatch, cuda=None, error=AssertionError("must not be asked"))
    assert find_gpu() is None


def test_a_driver_that_is_too_old_is_one_line_with_both_versions(monkeypatch: Patch) -> None:
    text = (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
        "downloading it\nfrom the address: example.org. Alternatively, build from source."
    )
    machine(monkeypatch, error=RuntimeError(text))
    with pytest.raises(UnsupportedError) as caught:
        find_gpu()
    assert caught.value.line() == (
        "the GPU cannot be used (driver cuda driver): The NVIDIA driver on your system is too old (found "
        "version 11040); CUDA 13.0 needs driver 580.65.06 or later, or run the model on the CPU"
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"arch": "sm_75"}, "hipfire needs compute capability 8.0 (sm_80) or later; use another GPU"),
        (
            {"vendor": "hip", "arch": "gfx1030"},
            "needs one of the generations gfx11 and gfx12; use another GPU",
        ),
        (
            {"vendor": "hip", "arch": "gfx906"},
            "needs one of the generations gfx11 and gfx12; use another GPU",
        ),
        (
            {"arch": "sm_80", "built_for": ("sm_86", "compute_90", "sm_90a")},
            "has code for sm_86, compute_90, sm_90a",
        ),
        ({"arch": "sm_120"}, "this torch has code for sm_80, sm_90 only; install a torch build for this GPU"),
        (
            {"vendor": "hip", "arch": "gfx1201", "built_for": ("gfx1100",)},
            "this torch has code for gfx1100 only",
        ),
    ],
)
def test_a_gpu_that_cannot_work_is_refused_with_what_is_needed(changes: dict[str, Any], fault: str) -> None:
    gpu = dataclasses.replace(CARD, **changes)
    with pytest.raises(UnsupportedError) as caught:
        check_supported(gpu, works)
    line = caught.value.line()
    assert line.startswith(f"Test Card ({gpu.arch}, driver 580.10) cannot be used: ")
    assert fault in line
    assert line.endswith(", or run the model on the CPU")


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "sm_80"},
        # code for 8.0 runs on 8.6, code for any later card is made from compute_80, and a list may be unknown
        {"arch": "sm_86"},
        {"arch": "sm_120", "built_for": ("sm_80", "compute_80")},
        {"arch": "sm_90", "built_for": ("sm_90a",)},
        {"arch": "sm_100", "built_for": ()},
        {"vendor": "hip", "arch": "gfx1151", "built_for": ("gfx1100", "gfx1151:xnack-")},
        {"vendor": "hip", "arch": "gfx1201", "built_for": ()},
    ],
)
def test_gpus_that_work_pass(changes: dict[str, Any]) -> None:
    probed: list[Gpu] = []
    gpu = dataclasses.replace(CARD, **changes)
    check_supported(gpu, probed.append)
    assert probed == [gpu]


def test_a_driver_older_than_the_toolchain_is_told_at_the_start() -> None:
    def fails(gpu: Gpu) -> None:
        raise RuntimeError("CUDA error: device kernel image is invalid\nCompile with `TORCH_USE_CUDA_DSA`")

    with pytest.raises(UnsupportedError) as caught:
        check_supported(CARD, fails)
    assert caught.value.line() == (
        "Test Card (sm_90, driver 580.10) cannot be used: a first test on it failed: CUDA error: device "
        "kernel image is invalid; CUDA 13.0 needs driver 580.65.06 or later, or run the model on the CPU"
    )


def test_the_driver_is_read_from_the_system(tmp_path: Path) -> None:
    assert driver_version("cuda", tmp_path, tmp_path) == "unknown"
    proc = tmp_path / "driver" / "nvidia" / "version"
    proc.parent.mkdir(parents=True)
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue\nGCC version: 13.2.0\n")
    assert driver_version("cuda", tmp_path, tmp_path) == "580.159.04"
    sys_file = tmp_path / "module" / "amdgpu" / "version"
    sys_file.parent.mkdir(parents=True)
    sys_file.write_text("6.12.12\n")
    assert driver_version("hip", tmp_path, tmp_path) == "6.12.12"


def test_asking_for_a_gpu_imports_no_compiler() -> None:
    program = (
        "import sys, hipfire.device.platform as p\np.find_gpu()\n"
        "print('triton' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture
def home(monkeypatch: Patch, tmp_path: Path) -> dict[str, str]:
    """The variables of a user whose home and temporary files are in a folder of the test."""
    for name in ("home", "temp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    return {"HOME": str(tmp_path / "home")}


def test_kernels_are_kept_in_the_users_own_folder_by_default(home: dict[str, str]) -> None:
    found = keep_kernels(home)
    assert found.problem is None
    assert found.path is not None
    assert found.path.parent == Path(home["HOME"], ".cache", "hipfire", "kernels")
    assert found.path.name.startswith("triton-")
    assert home["TRITON_CACHE_DIR"] == str(found.path)
    # a child process, which finds the variable set, goes on with the same folder
    assert keep_kernels(home) == found


def test_a_folder_that_the_user_chose_for_the_compiler_comes_first(
    home: dict[str, str], tmp_path: Path
) -> None:
    home["HIPFIRE_KERNEL_CACHE"] = str(tmp_path / "other")
    home["TRITON_CACHE_DIR"] = str(tmp_path / "mine")
    found = keep_kernels(home)
    assert found.path is not None
    assert found.path.parent == tmp_path / "mine"


@pytest.mark.skipif(os.name != "posix", reason="needs the owners and rights of POSIX")
def test_a_folder_of_someone_else_is_passed_over_and_told(
    home: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    chosen = tmp_path / "theirs"
    chosen.mkdir()
    home["TRITON_CACHE_DIR"] = str(chosen)
    keep_kernels(dict(home))
    real, theirs = os.geteuid(), os.lstat
    monkeypatch.setattr(
        Path, "lstat", lambda path: _owned(theirs(path), real + 1 if chosen in path.parents else real)
    )
    with caplog.at_level(logging.WARNING):
        found = keep_kernels(home)
    assert found.path is not None
    assert chosen not in found.path.parents
    assert home["TRITON_CACHE_DIR"] == str(found.path)
    assert "belongs to another user" in caplog.text
    assert str(chosen) in caplog.text


def _owned(info: os.stat_result, owner: int) -> os.stat_result:
    values = list(info)
    values[4] = owner
    return os.stat_result(values)


@pytest.mark.skipif(os.name != "posix", reason="needs the rights of POSIX")
def test_without_any_folder_the_compiler_cannot_work_and_that_is_told(
    home: dict[str, str], tmp_path: Path, monkeypatch: Patch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    home["HOME"] = str(blocked)
    monkeypatch.setenv("HOME", str(blocked))
    with pytest.raises(UnsupportedError, match="no folder for compiled GPU kernels"):
        keep_kernels(home)
    assert "TRITON_CACHE_DIR" not in home
