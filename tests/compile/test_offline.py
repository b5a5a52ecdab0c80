"""An `OFFLINE` entry that does not fit its kernel is refused where it is written."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl

from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.kernels.gpu.offline import TARGETS, Offline
from hipfire.kernels.gpu.target import INTERPRETED


@triton.jit
def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr, TARGET: tl.constexpr, STEPS: tl.constexpr = 2):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at), mask=at < count)


ARGUMENTS = {"x_ptr": "*bf16", "out_ptr": "*fp32", "count": "i32"}


def entry(**changes: Any) -> Offline:
    fields = {"kernel": kernel, "arguments": ARGUMENTS, "constants": {"BLOCK": 64}, **changes}
    return Offline(**fields)


def test_entries_are_named_after_their_kernels() -> None:
    assert entry().label == "kernel"
    assert entry(name="one row").label == "kernel[one row]"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"constants": {}}, "nothing is said about BLOCK"),
        ({"constants": {"BLOCK": 64, "WARPS": 1}}, "the kernel has no parameter WARPS"),
        ({"constants": {"BLOCK": 64, "count": 1}}, "count is argument and constant"),
        ({"constants": {"BLOCK": 64, "TARGET": "hip"}}, "TARGET is set by the machine"),
        ({"arguments": {"x_ptr": "*bf16", "count": "i32"}}, "nothing is said about out_ptr"),
        ({"arguments": {**ARGUMENTS, "count": "int32"}}, "count cannot have the type 'int32'"),
        ({"aligned": frozenset({"rows"})}, "rows is no argument"),
        ({"unaligned": frozenset({"BLOCK"})}, "BLOCK is no argument"),
        ({"needs": frozenset({"dot8"})}, "nothing is known of the need 'dot8'"),
        ({"on": frozenset({"sm_80"})}, "'sm_80' is no machine"),
        ({"on": frozenset()}, "it is for no machine"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InternalError, match=said) as caught:
        entry(**changes)
    assert "OFFLINE entry kernel" in str(caught.value)


@pytest.mark.parametrize(
    ("on", "names"),
    [
        ({"cuda", "hip"}, ["gfx1100", "gfx1151", "gfx1201", "sm_90"]),
        ({"hip"}, ["gfx1100", "gfx1151", "gfx1201"]),
        ({"gfx1201", "cuda"}, ["gfx1201", "sm_90"]),
    ],
)
def test_an_entry_is_compiled_where_it_is_used(on: set[str], names: list[str]) -> None:
    chosen = entry(on=frozenset(on))
    assert [target.name for target in TARGETS.values() if chosen.runs_on(target)] == names


@pytest.mark.skipif(not INTERPRETED, reason="this process compiles kernels")
def test_an_interpreting_process_says_that_it_cannot_compile() -> None:
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"):
        entry().compile(TARGETS["sm_90"])
