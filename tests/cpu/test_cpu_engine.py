"""Programs of the engine: barriers where rows depend on each other, merged rows, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_kit import kernel_modules, padded, poisoned_memory, random_rows, raw_bytes

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu import ops
from hipfire.kernels.cpu.engine import CpuEngine, Launch, Program, aligned_bytes, encode, merge_quantization
from hipfire.kernels.cpu.jit import Compiled
from hipfire.kernels.cpu.pool import FIRST_ARGUMENT, ROW_LENGTH, Pool
from hipfire.kernels.cpu.products import quantized
from hipfire.kernels.cpu.rows import add, quantize, rms_norm

Step = tuple[str, str, str | None]
NAMED = {name: torch.zeros(4, 8) for name in "abcdefg"}
# parts of tensors, which may overlap
NAMED |= {"c01": NAMED["c"][:2], "c12": NAMED["c"][1:3], "c23": NAMED["c"][2:], "none": torch.zeros(0, 8)}


def flags(*steps: Step) -> list[int]:
    """Which rows wait for all threads, of steps that are (names read, names written, units)."""
    launches = [
        Launch(
            add,
            (),
            tuple(NAMED[name] for name in reads.split()),
            tuple(NAMED[name] for name in writes.split()),
            None if units is None else ("units", units),
        )
        for reads, writes, units in steps
    ]
    program = Program(Pool(1), launches, torch.empty(0))
    assert program.barriers == sum(program._rows[: program.length, 0])
    return program._rows[: program.length, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([("a b", "c", None), ("c", "d", None)], [0, 1], id="read after write"),
        pytest.param([("a b", "c", None), ("d", "a", None)], [0, 1], id="write after read"),
        pytest.param([("a", "c", None), ("b", "c", None)], [0, 1], id="write after write"),
        pytest.param([("a b", "c", None), ("d", "e", None)], [0, 0], id="nothing in common"),
        pytest.param([("a b", "c", None), ("a b", "d", None)], [0, 0], id="both read"),
        pytest.param([("a", "c", None), ("b", "d", None), ("c", "e", None)], [0, 0, 1], id="further back"),
        pytest.param([("a", "c", None), ("c", "d", None), ("c", "e", None)], [0, 1, 0], id="already waited"),
        pytest.param([("a", "c", None), ("c", "d", None), ("d", "e", None)], [0, 1, 1], id="a chain"),
        pytest.param([("a", "c", "x"), ("c", "d", "x")], [0, 0], id="equal units"),
        pytest.param([("a", "c", "x"), ("c", "d", "y")], [0, 1], id="other units"),
        pytest.param([("a", "c", "x"), ("c", "d", None)], [0, 1], id="no units"),
        pytest.param([("a", "c", "x"), ("a", "b", "y"), ("c", "d", "x")], [0, 0, 0], id="units further back"),
        pytest.param([("a", "c", "y"), ("a", "b", "x"), ("c b", "d", "x")], [0, 0, 1], id="units of one"),
        pytest.param([("a", "c01", None), ("c23", "d", None)], [0, 0], id="other parts"),
        pytest.param([("a", "c01", None), ("c12", "d", None)], [0, 1], id="overlapping parts"),
        pytest.param([("a", "c12", None), ("b", "c", None)], [0, 1], id="a part and the whole"),
        pytest.param([("a", "none", None), ("none", "d", None)], [0, 0], id="empty tensors"),
        pytest.param([("a", "b c", None), ("d c", "e", None)], [0, 1], id="the second of several"),
    ],
)
def test_threads_wait_where_and_only_where_rows_depend_on_each_other(
    steps: list[Step], expected: list[int]
) -> None:
    assert flags(*steps) == expected


def _norm_and_quantize(engine: CpuEngine, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = ops.rms_norm(engine, x, random_rows(x.shape[1], seed=2), 1e-6, 1.0)
    return (y, *quantized(engine, y))


@pytest.mark.parametrize("columns", [7, 32, 40, 576])
def test_a_norm_that_quantizes_writes_the_same_bytes(columns: int) -> None:
    for rows in (1, 5, 17):
        x = padded(random_rows(rows, columns, seed=rows), 3)
        for threads in (1, 2, 3):
            engine = CpuEngine(threads)
            with poisoned_memory():
                engine.record()
                results = _norm_and_quantize(engine, x)
                program = engine.finish()
            assert program is not None
            assert program.kernels == ("rms-norm",)
            eager = [raw_bytes(part) for part in results]
            for part in results:
                part.view(torch.uint8).fill_(0xAA)
            program.run()
            assert [raw_bytes(part) for part in results] == eager


def test_only_the_quantization_of_what_a_norm_just_wrote_is_merged() -> None:
    x, y, z = (torch.zeros(2, 64) for _ in range(3))
    codes, numbers = torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 2, 4)

    def norm(out: torch.Tensor) -> Launch:
        return Launch(rms_norm, (x, 2, 1, 64, 256, z, 1e-6, 0.0, out, 0, 0), (x,), (out,), ("rows", 2))

    def codes_of(source: torch.Tensor, rows: int = 2) -> Launch:
        return Launch(quantize, (source, rows, 64, 256, codes, numbers), (source,), (codes, numbers), None)

    other = Launch(add, (), (x,), (z,), None)
    assert [launch.kernel.name for launch in merge_quantization([norm(y), codes_of(y)])] == ["rms-norm"]
    for apart in (
        [norm(y), codes_of(x)],
        [norm(y), other, codes_of(y)],
        [norm(y), codes_of(y, rows=1)],
        [codes_of(y), norm(y)],
    ):
        assert [id(launch) for launch in merge_quantization(apart)] == [id(launch) for launch in apart]
    merged = merge_quantization([norm(y), codes_of(y), codes_of(y)])
    assert [len(launch.writes) for launch in merged] == [3, 2]
    assert merged[0].writes[1] is codes


def test_arguments_are_written_as_addresses_numbers_and_floats() -> None:
    x, row = torch.zeros(3), np.zeros(ROW_LENGTH, np.int64)
    encode(Launch(add, (x, -7, 1.5, True), (), (), None), row)
    assert row[0] == 0
    assert row[1] == add.address
    assert row[FIRST_ARGUMENT : FIRST_ARGUMENT + 2].tolist() == [x.data_ptr(), -7]
    assert row[FIRST_ARGUMENT + 2 : FIRST_ARGUMENT + 3].view(np.float32)[0] == np.float32(1.5)
    with pytest.raises(InternalError, match="kernel add has 23 arguments"):
        encode(Launch(add, (0,) * 23, (), (), None), row)


def test_scratch_is_aligned_and_apart_for_every_thread() -> None:
    engine = CpuEngine(3)
    first, each = engine.scratch(100)
    assert each >= 100
    assert each % 64 == first.data_ptr() % 64 == 0
    assert first.numel() >= 3 * each
    again, still = engine.scratch(50)
    assert again is first
    assert still == each
    larger, more = engine.scratch(100_000)
    assert more >= 100_000
    assert larger.numel() >= 3 * more
    assert [aligned_bytes(n).data_ptr() % 64 for n in (1, 63, 64, 65)] == [0] * 4


def test_a_rehearsal_names_the_kernels_and_runs_none() -> None:
    engine, x = CpuEngine(2), torch.full((2, 64), 3.0)
    with poisoned_memory(), engine.rehearse() as found:
        y, codes, _ = _norm_and_quantize(engine, x)
    assert list(found) == ["rms-norm", "quantize"]
    assert torch.isnan(y).all()
    assert (codes == -1).all()
    assert engine.remembered(y) is None


def test_activations_are_quantized_once_while_they_are_remembered() -> None:
    engine, x = CpuEngine(1), random_rows(2, 64, seed=1)

    def codes(source: torch.Tensor) -> torch.Tensor:
        return quantized(engine, source)[0]

    first = codes(x)
    assert codes(x) is first
    engine.forget()
    second = codes(x)
    assert second is not first
    engine.record()
    assert codes(x) is not second
    assert codes(x.clone()) is not codes(x)
    program = engine.finish()
    assert program is not None
    assert program.kernels == ("quantize",) * 3
    assert engine.remembered(x) is None


def test_recordings_must_be_begun_and_may_be_spoiled() -> None:
    engine = CpuEngine(1)
    with pytest.raises(InternalError, match="no recording was begun"):
        engine.finish()
    engine.spoil("linear")
    engine.record()
    ops.add(engine, torch.ones(1, 4), torch.ones(1, 4))
    engine.spoil("linear")
    assert engine.finish() is None
    engine.record()
    ops.add(engine, torch.ones(1, 4), torch.ones(1, 4))
    program = engine.finish()
    assert program is not None
    assert program.kernels == ("add",)


def test_compiled_functions_have_names_of_their_own() -> None:
    """Their files and symbols are named by them."""
    found: dict[int, Compiled] = {}
    for module in kernel_modules():
        stack = list(vars(module).values())
        while stack:
            value = stack.pop()
            if isinstance(value, Compiled):
                found[id(value)] = value
            elif isinstance(value, (tuple, list)):
                stack += value
            elif isinstance(value, dict):
                stack += value.values()
    names = [value.name for value in found.values()]
    assert len(names) > 50
    assert len(set(names)) == len(names)
