"""Offsets that can wrap around in 32 bits are found in what Triton really makes of kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compile_kit import faults_of, planted

from hipfire.base.errors import InternalError
from hipfire.validate.compile_gate import GateReport
from hipfire.validate.compile_gate_addresses import wide_faults

MODULE = "planted_addresses"
SOURCE = Path(__file__).with_name(f"{MODULE}.py").read_text()
TARGET = "gfx1201"

# the line of each kernel that wraps around
WRAPPING = {
    "row_kernel": "tl.load(x_ptr + row * row_stride + at)",
    "rows_kernel": "tl.load(x_ptr + row * WIDTH, mask=inside)",
    "gathered_kernel": "tl.load(x_ptr + token * WIDTH + at)",
    "carried_kernel": "place += row_stride",
    "while_kernel": "place = begin * row_stride",
    "narrowed_kernel": "place = place.to(tl.int32)",
    "summed_kernel": "tl.sum(lengths, axis=0)",
    "picked_kernel": "tl.load(x_ptr + best * row_stride + at)",
    "blocks_kernel": "place += (position - block) * 8192",
    "bits_kernel": "place = place << 10",
    "tiles_kernel": "tile = tl.program_id(0) + later * programs",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> GateReport:
    """A run over kernels that wrap around and their twins that do not."""
    return planted(MODULE, tmp_path_factory.mktemp("gate") / "registers.json")


def test_every_planted_kernel_is_known_here(report: GateReport) -> None:
    assert {row["key"] for row in report.rows} == {
        f"{MODULE}.{kernel}[{name}]" for kernel in WRAPPING for name in ("wide", "wraps")
    }


@pytest.mark.parametrize("kernel", WRAPPING)
def test_an_offset_that_can_wrap_around_is_found_at_its_line(report: GateReport, kernel: str) -> None:
    (fault,) = faults_of(report, f"{MODULE}.{kernel}[wraps]", TARGET)
    found = re.fullmatch(
        rf"{MODULE}\.py:(\d+): \S+ with 32 bits on the way to an address may reach 2\^(\d+)", fault
    )
    assert found is not None
    assert WRAPPING[kernel] in SOURCE.splitlines()[int(found[1]) - 1]
    assert int(found[2]) >= 31


@pytest.mark.parametrize("kernel", WRAPPING)
def test_its_twin_passes(report: GateReport, kernel: str) -> None:
    assert faults_of(report, f"{MODULE}.{kernel}[wide]", TARGET) == []


def ttir(*lines: str) -> str:
    """Return the text of a kernel with one pointer, a stride and a count."""
    body = "\n".join(f"    {line} loc(#loc1)" for line in lines)
    return (
        '#loc = loc("kernel.py":3:0)\nmodule {\n'
        "  tt.func public @k(%x_ptr: !tt.ptr<f32> loc(#loc), %row_stride: i32 loc(#loc), "
        "%n: i32 loc(#loc)) {\n"
        f'{body}\n    tt.return loc(#loc)\n  }} loc(#loc)\n}} loc(#loc)\n#loc1 = loc("kernel.py":7:2)\n'
    )


ADD = "%p = tt.addptr %x_ptr, %o : !tt.ptr<f32>, i32"


@pytest.mark.parametrize(
    ("lines", "reach"),
    [
        # 2^31 - 1 at most, and one more
        (["%c = arith.constant 0 : i32", "%o = arith.addi %row_stride, %c : i32"], None),
        (["%c = arith.constant 1 : i32", "%o = arith.addi %row_stride, %c : i32"], 31),
        (["%c = arith.constant -1 : i32", "%o = arith.muli %row_stride, %c : i32"], None),
        (["%c = arith.constant -2 : i32", "%o = arith.muli %c, %row_stride : i32"], 32),
        (["%c = arith.constant 127 : i32", "%o = arith.muli %n, %c : i32"], None),
        (["%c = arith.constant 129 : i32", "%o = arith.muli %n, %c : i32"], 31),
        (["%y = tt.get_program_id y : i32", "%o = arith.muli %y, %row_stride : i32"], 45),
        (["%c = arith.constant 7 : i32", "%o = arith.shli %n, %c : i32"], 31),
        (["%c = arith.constant 6 : i32", "%o = arith.shli %n, %c : i32"], None),
        (
            [
                "%c = arith.constant 64 : i32",
                "%q = arith.divsi %row_stride, %c : i32",
                "%o = arith.muli %q, %c : i32",
            ],
            None,
        ),
        (
            [
                "%y = tt.get_program_id y : i32",
                "%q = arith.divsi %row_stride, %y : i32",
                "%m = arith.minsi %q, %row_stride : i32",
                "%o = arith.muli %m, %y : i32",
            ],
            None,
        ),
        (
            [
                "%y = tt.get_program_id y : i32",
                "%q = arith.divsi %row_stride, %n : i32",
                "%m = arith.minsi %q, %row_stride : i32",
                "%o = arith.muli %m, %y : i32",
            ],
            45,
        ),
    ],
)
def test_the_bounds_are_exact(lines: list[str], reach: int | None) -> None:
    faults = wide_faults(ttir(*lines, ADD))
    if reach is None:
        assert faults == []
    else:
        op = lines[-1].split()[2]
        assert faults == [f"kernel.py:7: {op} with 32 bits on the way to an address may reach 2^{reach}"]


def test_arithmetic_that_reaches_no_address_is_free() -> None:
    lines = ["%w = arith.muli %row_stride, %row_stride : i32", "%o = arith.constant 3 : i32"]
    assert wide_faults(ttir(*lines, ADD)) == []


def test_an_unknown_operation_on_the_way_to_an_address_is_a_fault() -> None:
    (fault,) = wide_faults(ttir("%o = tt.made_up %n : i32", ADD))
    assert fault == "kernel.py:7: nothing is known of the range of tt.made_up on the way to an address"


def test_an_unknown_body_is_refused() -> None:
    with pytest.raises(InternalError, match=r"scf\.parallel has a body"):
        wide_faults(ttir("%o = scf.parallel %n {").replace("{ loc(#loc1)", "{"))
