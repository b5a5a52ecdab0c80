"""What is read of a kernel's resources from the texts that compilers for AMD and NVIDIA write."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipfire.base.errors import InternalError
from hipfire.validate.compile_gate_results import Resources, read_resources, resource_faults

AMD = """
kernel:
    v_dot4_i32_iu8 v1, v2, v3, v1 neg_lo:[1,1,0]
    v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
    v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
; v_dot4_i32_iu8 in a comment is no instruction
.amdgpu_metadata
---
    .private_segment_fixed_size: 32
    .sgpr_spill_count: 5
    .vgpr_count:     96
    .vgpr_spill_count: 7
.end_amdgpu_metadata
"""
BOTH = frozenset({"dot4", "matrix"})


def tool(folder: Path, usage: str, code: str) -> str:
    """Write a program that answers as `cuobjdump` does, and return its path."""
    path = folder / "cuobjdump"
    path.write_text(
        f"#!/bin/sh\ncase $1 in\n-sass) cat <<'E'\n{code}\nE\n;;\n*) cat <<'E'\n{usage}\nE\n;;\nesac\n"
    )
    path.chmod(0o700)
    return str(path)


def test_amd_assembly_is_read() -> None:
    found = read_resources("hip", {"amdgcn": AMD}, 512, BOTH, "no tool")
    assert found == Resources(96, 7, 32, 512, {"dot4": 1, "matrix": 2}, scalar_spills=5)


def test_nvidia_binaries_are_read(tmp_path: Path) -> None:
    usage = "Resource usage:\n Function k:\n  REG:40 STACK:16 SHARED:1024 LOCAL:8 TEXTURE:0"
    code = "IDP.4A.S8.S8 R1, R2, R3, R1 ;\n HGMMA.64x64x16.F32 R24 ;\n IMAD R1, R2, R3 ;\n HFMA2 R1 ;"
    found = read_resources("cuda", {"cubin": b"elf"}, 2048, BOTH, tool(tmp_path, usage, code))
    assert found == Resources(40, 4, 24, 2048, {"dot4": 1, "matrix": 1})


def test_texts_without_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="does not state vgpr_count"):
        read_resources("hip", {"amdgcn": "s_endpgm"}, 0, BOTH, "no tool")
    with pytest.raises(InternalError, match="cuobjdump does not state"):
        read_resources("cuda", {"cubin": b"elf"}, 0, BOTH, tool(tmp_path, "nothing", ""))


@pytest.mark.parametrize(
    ("resources", "faults"),
    [
        (Resources(255, 0, 0, 65536, {"dot4": 1}), []),
        # what lies in lanes of vector registers is in no memory
        (Resources(255, 0, 0, 65536, {"dot4": 1}, scalar_spills=9), []),
        (Resources(256, 3, 0, 0, {"dot4": 1}), ["spills 3 registers"]),
        (Resources(20, 0, 16, 0, {"dot4": 1}), ["uses 16 bytes of private memory a thread"]),
        (Resources(20, 0, 0, 65537, {"dot4": 1}), ["uses 65537 bytes of shared memory of 65536"]),
        (Resources(20, 0, 0, 0, {"dot4": 0}), ["has no native product of four bytes"]),
    ],
)
def test_each_figure_has_its_own_fault(resources: Resources, faults: list[str]) -> None:
    assert resource_faults(resources, 65536, {"dot4"}) == faults
