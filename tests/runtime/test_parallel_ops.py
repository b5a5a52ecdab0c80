"""Sums and columns of a group through the GPU engine: in place, into a result of their own, rehearsed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hipfire.kernels.collective import ALL_REDUCE, GATHER_COLUMNS
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.tape import describe
from hipfire.kernels.gpu.target import INTERPRETED
from hipfire.kernels.launch import Launcher

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZE = 3


class Poisoned:
    """Gives results memory that holds no number."""

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=DEVICE)

    def settle(self, kept: Sequence[torch.Tensor]) -> None:
        """Nothing is taken twice."""


class Multiples:
    """A group whose process r has r + 1 times what this one, the first, has."""

    size = SIZE

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct
        self.calls: list[str] = []

    def direct(self, x: torch.Tensor) -> bool:
        return self._direct

    def sum(self, x: torch.Tensor) -> None:
        self.calls.append("sum")
        x.mul_(6.0)

    def sum_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.calls.append("sum_into")
        torch.mul(x, 6.0, out=out)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.calls.append("gather")
        for rank in range(SIZE):
            out[rank] = x * (rank + 1)


def engine() -> GpuEngine:
    target = "plain" if INTERPRETED else "hip" if torch.version.hip else "cuda"
    return GpuEngine(DEVICE, target, scratch=Poisoned())


@pytest.mark.parametrize("direct", [False, True])
def test_a_sum_is_made_in_place_or_into_a_result_and_can_be_captured(direct: bool) -> None:
    running, group = engine(), Multiples(direct=direct)
    x = torch.randn(2, 8, device=DEVICE)
    before = x.clone()
    running.record()
    total = Launcher(engines={"triton": running}, only="triton").run(ALL_REDUCE, x, group)
    tape = running.finish()
    torch.testing.assert_close(total, before * 6.0, rtol=0.0, atol=0.0)
    assert (total is x) != direct
    assert torch.equal(x, before) == direct
    assert group.calls == ["sum_into" if direct else "sum"]
    facts = describe(tape)
    assert facts.faults == ()
    assert facts.libraries == ("all_reduce",)
    (launch,) = tape.launches
    assert launch.reads[0] is x
    assert launch.writes[0] is total


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("only", ["triton", "reference"])
def test_columns_lie_side_by_side_in_the_order_of_processes(tokens: int, only: str) -> None:
    x = torch.randn(tokens, 5, device=DEVICE)
    launcher = Launcher(engines={"triton": engine()}, only=only)
    whole = launcher.run(GATHER_COLUMNS, x, Multiples(direct=False))
    torch.testing.assert_close(whole, torch.cat((x, 2 * x, 3 * x), dim=1), rtol=0.0, atol=0.0)


def test_a_rehearsal_asks_nothing_of_other_processes() -> None:
    running, group = engine(), Multiples(direct=True)
    launcher = Launcher(engines={"triton": running}, only="triton")
    with running.rehearse(Poisoned()):
        total = launcher.run(ALL_REDUCE, torch.empty(4, 8, device="meta"), group)
        whole = launcher.run(GATHER_COLUMNS, torch.empty(4, 8, device="meta"), group)
    assert total.shape == (4, 8)
    assert whole.shape == (4, 24)
    assert group.calls == []
