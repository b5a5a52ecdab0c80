"""The one door: choice of implementation, and the record of what ran."""

from __future__ import annotations

import pytest
import torch

from hipfire.base.errors import InternalError
from hipfire.kernels.kv_cache import KV_WRITE
from hipfire.kernels.launch import Launcher, LaunchRecord, Op


def double(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


def fast_double(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor + 1000


BOTH = Op("double", double, {"numba": fast_double})


def test_the_fastest_implementation_for_the_device_runs_unless_pinned() -> None:
    x = torch.ones(2)
    assert Launcher().run(BOTH, x)[0] == 1002
    assert Launcher(only="reference").run(BOTH, x)[0] == 2
    assert Launcher().run(Op("double", double), x)[0] == 2
    # a kernel for another kind of device does not apply
    assert Launcher().run(Op("double", double, {"triton": fast_double}), x)[0] == 2


def test_a_pinned_implementation_that_is_missing_is_an_error_not_a_fallback() -> None:
    with pytest.raises(InternalError, match="no implementation named triton"):
        Launcher(only="triton").run(BOTH, torch.ones(1))


def test_the_tape_names_what_ran_and_its_buffers() -> None:
    tape: list[LaunchRecord] = []
    launcher = Launcher(tape=tape)
    x = torch.ones(3)
    y = launcher.run(BOTH, x, factor=3.0)
    cache = torch.zeros(4, 1, 2)
    launcher.run(KV_WRITE, cache, 1, torch.ones(2, 1, 2))
    first, second = tape
    assert (first.op, first.implementation) == ("double", "numba")
    assert first.reads["x"].address == x.data_ptr()
    assert first.writes["result0"].address == y.data_ptr()
    assert first.scalars == {"factor": "3.0"}
    assert second.writes["cache"].address == cache.data_ptr()
    assert set(second.reads) == {"x"}
    assert second.scalars["start"] == "1"


def test_an_operation_cannot_declare_writes_to_arguments_it_lacks() -> None:
    with pytest.raises(InternalError, match="unknown"):
        Op("broken", double, writes=("y",))
