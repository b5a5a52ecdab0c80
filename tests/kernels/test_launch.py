"""The one door: choice of implementation, and the record of what ran."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from hipfire.base.errors import InternalError
from hipfire.base.qtypes import QType
from hipfire.kernels.kv_cache import KV_WRITE
from hipfire.kernels.launch import Launcher, LaunchRecord, Op
from hipfire.kernels.linear import DEQUANTIZE
from hipfire.quant.registry import format_of


def double(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


class Engine:
    """Notes what it could not run."""

    def __init__(self) -> None:
        self.spoiled: list[str] = []
        self.kept: list[tuple[torch.Tensor, ...]] = []

    def spoil(self, name: str) -> None:
        self.spoiled.append(name)

    def settle(self, *kept: torch.Tensor) -> None:
        self.kept.append(kept)


def fast_double(engine: Engine, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    assert isinstance(engine, Engine)
    return x * factor + 1000


def double_by_engine(engine: Engine, x: torch.Tensor, factor: float = 2.0) -> Engine:
    return engine


def apply(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return function(x)


FAST = f"{__name__}.fast_double"
BOTH = Op("double", double, {"numba": FAST})


def test_the_fastest_implementation_for_the_device_runs_unless_pinned() -> None:
    x = torch.ones(2)
    engines = {"numba": Engine(), "triton": Engine()}
    assert Launcher(engines=engines).run(BOTH, x)[0] == 1002
    assert Launcher(engines=engines, only="reference").run(BOTH, x)[0] == 2
    assert Launcher(engines=engines).run(Op("double", double), x)[0] == 2
    # a kernel for another kind of device does not apply, nor one that nothing runs
    assert Launcher(engines=engines).run(Op("double", double, {"triton": FAST}), x)[0] == 2
    assert Launcher().run(BOTH, x)[0] == 2


def test_tensors_without_memory_are_for_the_engine_of_a_gpu() -> None:
    engines = {"numba": Engine(), "triton": Engine()}
    both = Op("double", double, {"numba": FAST, "triton": f"{__name__}.double_by_engine"})
    assert Launcher(engines=engines).run(both, torch.ones(2, device="meta")) is engines["triton"]
    assert Launcher(engines={"numba": Engine()}).run(both, torch.ones(2, device="meta")).is_meta


def test_engines_are_told_which_results_are_still_needed() -> None:
    engines = {"numba": Engine(), "triton": Engine()}
    x, y = torch.ones(1), torch.ones(2)
    Launcher(engines=engines).settle(x, y)
    for engine in engines.values():
        assert [list(map(id, kept)) for kept in engine.kept] == [[id(x), id(y)]]


def test_an_engine_is_told_of_what_ran_without_it() -> None:
    engine = Engine()
    launcher = Launcher(engines={"numba": engine})
    launcher.run(BOTH, torch.ones(1))
    assert not engine.spoiled
    launcher.run(Op("plain", double), torch.ones(1))
    assert engine.spoiled == ["plain"]
    with pytest.raises(InternalError, match="no engine for numba"):
        Launcher(only="numba").run(BOTH, torch.ones(1))


def test_a_pinned_implementation_that_is_missing_is_an_error_not_a_fallback() -> None:
    with pytest.raises(InternalError, match="no implementation named triton"):
        Launcher(only="triton").run(BOTH, torch.ones(1))


def test_the_tape_names_what_ran_and_its_buffers() -> None:
    tape: list[LaunchRecord] = []
    launcher = Launcher(tape=tape, engines={"numba": Engine()})
    x = torch.ones(3)
    y = launcher.run(BOTH, x, factor=3.0)
    cache = torch.zeros(4, 1, 2)
    rows = torch.tensor([[0, 1], [0, 2]])
    Launcher(tape=tape).run(KV_WRITE, cache[None], rows, torch.ones(2, 1, 2))
    first, second = tape
    assert (first.op, first.implementation) == ("double", "numba")
    assert first.reads["x"].address == x.data_ptr()
    assert first.writes["result0"].address == y.data_ptr()
    assert first.scalars == {"factor": "3.0"}
    assert second.writes["cache"].address == cache.data_ptr()
    assert second.implementation == "reference"
    assert set(second.reads) == {"rows", "x"}


def test_an_operation_cannot_declare_writes_to_arguments_it_lacks() -> None:
    with pytest.raises(InternalError, match="unknown"):
        Op("broken", double, writes=("y",))


def test_a_view_is_recorded_with_its_own_extent() -> None:
    tape: list[LaunchRecord] = []
    cache = torch.zeros(3, 4, 1, 2)
    rows = torch.tensor([[0, 1], [0, 2]])
    Launcher(tape=tape).run(KV_WRITE, cache[2:], rows, torch.ones(2, 1, 2))
    written = tape[0].writes["cache"]
    assert written.address == cache.data_ptr() + 2 * 4 * 2 * 4
    assert written.nbytes == 4 * 2 * 4
    # a strided view ends with its last element
    Launcher(tape=tape).run(BOTH, torch.zeros(4, 6)[:, 2:4])
    assert tape[1].reads["x"].nbytes == (3 * 6 + 2) * 4
    Launcher(tape=tape).run(BOTH, torch.zeros(0, 6))
    assert tape[2].reads["x"].nbytes == 0


def test_functions_are_recorded_by_name_so_that_tapes_of_two_processes_agree() -> None:
    tape: list[LaunchRecord] = []
    decode = functools.partial(double, factor=3.0)
    Launcher(tape=tape).run(DEQUANTIZE, torch.ones(1), 1, 1, lambda *_: torch.ones(1))
    Launcher(tape=tape).run(Op("apply", apply), torch.ones(1), decode)
    assert "0x" not in str(tape[0].scalars)
    assert tape[1].scalars["function"] == f"{__name__}.double(factor=3.0)"
    formats = [format_of(qtype) for qtype in (QType.HFQ4G128, QType.GGUF_Q4_K, QType.F16)]
    for fmt in formats:
        packed = torch.zeros(fmt.nbytes(1, 256), dtype=torch.uint8)
        Launcher(tape=tape).run(DEQUANTIZE, packed, 1, 256, fmt.decode)
    names = [record.scalars["decode"] for record in tape[2:]]
    assert all("0x" not in name for name in names)
    assert len(set(names)) == len(formats)
