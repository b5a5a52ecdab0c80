"""What a compiled kernel needs of its machine, read from assembly and binaries, and what is wrong with it.

It knows how compilers for AMD and NVIDIA write down registers, spills and instructions, and no kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import InternalError

TOOL_LIMIT_S: Final = 60
_DISASSEMBLY: Final[Mapping[str, Mapping[str, re.Pattern[str]]]] = {
    "hip": {
        "dot4": re.compile(r"^\s*v_dot4_i32_iu8\b", re.MULTILINE),
        "matrix": re.compile(r"^\s*v_(?:wmma|swmmac|mfma)_", re.MULTILINE),
    },
    "cuda": {
        "dot4": re.compile(r"\bIDP\.4A\b"),
        "matrix": re.compile(r"\b(?:HMMA|IMMA|QMMA|[HIQ]GMMA)\."),
    },
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses on one machine.

    `registers` are those of a thread (vector registers on AMD), `spills` how many of them are kept in memory,
    `scratch` the bytes of private memory of a thread, `shared` those of shared memory of a program.
    `instructions` counts the native ones by the names that an entry's needs have. `scalar_spills` are scalar
    registers of AMD that are kept in lanes of vector registers, not in memory.
    """

    registers: int
    spills: int
    scratch: int
    shared: int
    instructions: Mapping[str, int]
    scalar_spills: int = 0


def read_resources(
    backend: str, assembly: Mapping[str, Any], shared: int, needs: Collection[str], cuobjdump: str
) -> Resources:
    """Return what a kernel uses; `assembly` is what Triton keeps of it.

    Raises InternalError if it cannot be read.
    """
    if backend == "hip":
        return _read_amd(str(assembly["amdgcn"]), shared, needs)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])
        file.flush()
        usage = _output([cuobjdump, "--dump-resource-usage", file.name])
        # the disassembler takes longer than most kernels take to compile
        machine = _output([cuobjdump, "-sass", file.name]) if needs else ""
    return _read_nvidia(usage, machine, shared, needs)


def resource_faults(resources: Resources, limit: int, needs: Collection[str]) -> list[str]:
    """Return what is wrong, in words; `limit` is the shared memory that a program may use, in bytes."""
    faults = []
    if resources.spills:
        faults.append(f"spills {resources.spills} registers")
    if resources.scratch:
        faults.append(f"uses {resources.scratch} bytes of private memory a thread")
    if resources.shared > limit:
        faults.append(f"uses {resources.shared} bytes of shared memory of {limit}")
    names = {"dot4": "product of four bytes", "matrix": "matrix instruction"}
    return faults + [
        f"has no native {names[need]}" for need in sorted(needs) if not resources.instructions[need]
    ]


def _read_amd(text: str, shared: int, needs: Collection[str]) -> Resources:
    told = text.partition(".amdgpu_metadata")[2].partition(".end_amdgpu_metadata")[0]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", told)
        if not found:
            raise InternalError(f"the assembly does not state {name}")
        return int(found[1])

    code = text.partition(".amdgpu_metadata")[0]
    return Resources(
        number("vgpr_count"),
        number("vgpr_spill_count"),
        number("private_segment_fixed_size"),
        shared,
        _count("hip", code, needs),
        number("sgpr_spill_count"),
    )


def _read_nvidia(usage: str, machine: str, shared: int, needs: Collection[str]) -> Resources:
    found = re.search(r"\bREG:(\d+) STACK:(\d+)\b.*?\bLOCAL:(\d+)", usage)
    if not found:
        raise InternalError("cuobjdump does not state the registers of a kernel")
    registers, stack, local = (int(number) for number in found.groups())
    # what is spilled lies on the stack, which a kernel has no other use for
    return Resources(registers, stack // 4, stack + local, shared, _count("cuda", machine, needs))


def _count(backend: str, code: str, needs: Collection[str]) -> dict[str, int]:
    return {need: len(_DISASSEMBLY[backend][need].findall(code)) for need in sorted(needs)}


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TOOL_LIMIT_S)
    if done.returncode:
        raise InternalError(f"{Path(command[0]).name} failed: {done.stderr[-200:]}")
    return done.stdout
