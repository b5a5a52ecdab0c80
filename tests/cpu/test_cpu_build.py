"""Compiling kernels: the trial in another process, files of compiled kernels, and damage to them."""

from __future__ import annotations

import ctypes
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from cpu_kit import run_python

from hipfire.base.cpu_cache import VARIABLE
from hipfire.base.errors import UnsupportedError
from hipfire.kernels.cpu import build, cache, trial
from hipfire.kernels.cpu.build import compile_kernels, try_out
from hipfire.kernels.cpu.jit import Compiled, Kernel, argument
from hipfire.kernels.cpu.native import export, link
from hipfire.kernels.cpu.simd import load_float, store_float
from hipfire.kernels.cpu.target import cpu_path

SOURCE = Path(build.__file__).parents[2]
# run kernels by name on 0, 1, 2, .. and 3, and tell what that made and which of them had to be compiled
PROGRAM = """
import json, sys
import numpy as np
from hipfire.kernels.cpu import cache, jit, rows
compiled = []
real = jit.Compiled._compiled
jit.Compiled._compiled = lambda self: (compiled.append(self.name), real(self))[1]
kernels = [getattr(rows, name) for name in sys.argv[1:]]
found = {"ready": [kernel.ready for kernel in kernels], "compiled": compiled, "results": []}
for kernel in kernels:
    x, y, spare = np.arange(32, dtype=np.float32), np.zeros(32, np.float32), np.full(32, 3.0, np.float32)
    other = spare.ctypes.data if kernel is rows.add else int(np.float32(3.0).view(np.int32))
    places = np.array([x.ctypes.data, other, 1, 32, 128, 128, y.ctypes.data, spare.ctypes.data, 0])
    kernel(places.ctypes.data, 0, 1)
    found["results"].append(y.tolist()[:3])
print(json.dumps({**found, "folder": str(cache.cache_folder())}))
"""


def run_program(base: Path, *kernels: str, package: Path = SOURCE) -> dict[str, object]:
    """Run PROGRAM with the package at `package` and kernels kept below `base`."""
    program = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{PROGRAM}"
    found: dict[str, object] = json.loads(run_python("-c", program, *kernels, **{VARIABLE: str(base)}))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep compiled kernels in a folder of the test's own."""
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all functions that are compiled, in order."""
    names: list[str] = []
    real = Compiled._compiled

    def counting(self: Compiled) -> cache.MachineCode:
        names.append(self.name)
        return real(self)

    monkeypatch.setattr(Compiled, "_compiled", counting)
    return names


def tripled(times: float = 3.0) -> Kernel:
    """A kernel of its own, new each time, that multiplies one float32 at its only argument."""
    factor = np.float32(times)

    def run(arguments: int, thread: int, threads: int) -> None:
        place = argument(arguments, 0)
        store_float(place, load_float(place) * factor)

    return Kernel("of-a-test", run)


def works(kernel: Kernel) -> bool:
    number = np.array([7.0], np.float32)
    arguments = np.array([number.ctypes.data])
    kernel(arguments.ctypes.data, 0, 1)
    return bool(number[0] == 21.0)


def test_a_later_process_compiles_nothing_and_does_not_mix_up_what_others_compiled(tmp_path: Path) -> None:
    """Numba numbers functions from one in each process: the first ones of two processes share a name."""
    base = tmp_path / "kept"
    first, second = run_program(base, "scale"), run_program(base, "add")
    assert (first["compiled"], first["ready"], first["results"]) == (["scale"], [False], [[0.0, 3.0, 6.0]])
    assert (second["compiled"], second["ready"], second["results"]) == (["add"], [False], [[3.0, 4.0, 5.0]])
    third = run_program(base, "add", "scale")
    assert (third["compiled"], third["ready"]) == ([], [True, True])
    assert third["results"] == [[3.0, 4.0, 5.0], [0.0, 3.0, 6.0]]
    assert Path(str(third["folder"])).parent == base
    heads = [file.read_bytes().partition(b"\n")[0] for file in base.glob("*/*.kernel")]
    assert len({json.loads(head)["symbol"] for head in heads}) == len(heads) == 2
    # one helper changes in another file than the kernel's
    copy = tmp_path / "copy" / "hipfire"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    helper = copy / "kernels" / "cpu" / "simd.py"
    text = helper.read_text(encoding="utf-8")
    assert text.count("lambda b, x, y: b.fmul(x, y)") == 1
    helper.write_text(text.replace("b.fmul(x, y)", "b.fsub(x, y)"), encoding="utf-8")
    changed = run_program(base, "scale", package=copy)
    assert (changed["compiled"], changed["results"]) == (["scale"], [[-3.0, -2.0, -1.0]])
    assert changed["folder"] != first["folder"]


def test_object_files_keep_their_inner_functions_to_themselves() -> None:
    """Helpers that stand in several object files under one name are those of each file."""
    found = []
    for number in (1, 2):
        text = f"""
            define linkonce_odr i64 @helper() noinline {{ ret i64 {number} }}
            define i64 @entry() {{ %result = call i64 @helper() ret i64 %result }}
        """
        machine = llvm.Target.from_default_triple().create_target_machine()
        symbol = f"hipfire-of-a-test-{number}"
        place = link(symbol, export(text, "entry", symbol, machine))
        found.append(ctypes.CFUNCTYPE(ctypes.c_int64)(place)())
    assert found == [1, 2]
    assert link("hipfire-of-no-test", export(text, "entry", "hipfire-of-a-test-3", machine)) == 0


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "a changed bit": lambda data: data[:-300] + bytes([data[-300] ^ 4]) + data[-299:],
    "no JSON": lambda data: b"\x80\x04" + data,
    "other JSON": lambda data: b"[1]\n" + data.partition(b"\n")[2],
    "no symbol": lambda data: data.replace(b'"symbol"', b'"simbol"'),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_compiled_again(kind: str, folder: Path, compiled: list[str]) -> None:
    assert works(tripled())
    file = folder / "of-a-test.kernel"
    whole = file.read_bytes()
    assert works(tripled())
    assert compiled == ["of-a-test"]
    file.write_bytes(DAMAGES[kind](whole))
    assert file.read_bytes() != whole
    assert works(tripled())
    assert compiled == ["of-a-test"] * 2
    # and kept again
    assert works(tripled())
    assert compiled == ["of-a-test"] * 2
    assert [path.name for path in folder.iterdir()] == ["of-a-test.kernel"]


def test_a_function_that_the_file_does_not_hold_is_compiled_again(folder: Path, compiled: list[str]) -> None:
    assert works(tripled())
    kept = cache.kept_code("of-a-test")
    assert kept is not None
    cache.keep_code("of-a-test", cache.MachineCode("hipfire-of-another-test", kept.code))
    assert works(tripled())
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiled: list[str]
) -> None:
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "missing")
    with caplog.at_level(logging.WARNING):
        assert works(tripled())
        assert works(tripled())
    assert len(compiled) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"compiled kernels are not kept in {tmp_path / 'missing'}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_by_a_folder_costs_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, compiled: list[str]
) -> None:
    (folder / "of-a-test.kernel").mkdir()
    with caplog.at_level(logging.WARNING):
        assert works(tripled())
    assert len(compiled) == len(caplog.records) == 1
    assert [path.name for path in folder.iterdir()] == ["of-a-test.kernel"]


def test_without_a_folder_kernels_live_in_memory(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    kernel = tripled()
    assert not kernel.ready
    assert works(kernel)
    assert works(kernel)
    assert kernel.ready
    assert compiled == ["of-a-test"]


def test_missing_kernels_are_counted(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    kernel = tripled()
    kernels = [kernel, kernel]
    compile_kernels([], lambda done, count: told.append((done, count)))
    assert told == []
    compile_kernels(kernels, lambda done, count: told.append((done, count)))
    assert told == [(0, 2), (1, 2), (2, 2)]
    compile_kernels([tripled()], lambda done, count: told.append((done, count)))
    assert len(told) == 3


def test_a_new_processor_is_tried_out_before_the_engine_runs_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    functions = [Compiled(f"of-a-test-{i}", lambda x: x, 1, result=True) for i in range(3)]
    for name, function in zip(("run_published", "publish", "serve"), functions, strict=True):
        monkeypatch.setattr(build, name, function)
    monkeypatch.setattr(build, "try_out", lambda: events.append("trial"))
    monkeypatch.setattr(build, "CpuEngine", lambda threads: events.append(f"engine of {threads}"))
    build.start_engine(3)
    assert events == ["trial", "engine of 3"]
    # what is kept was compiled after a trial; a part of it is not enough
    for function in functions[:2]:
        function.compile()
    build.start_engine(2)
    functions[2].compile()
    build.start_engine(1)
    assert events[2:] == ["trial", "engine of 2", "engine of 1"]


def test_the_trial_passes_here_and_notices_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    try_out()
    assert trial.product_is_exact()
    monkeypatch.setattr(trial, "LINEAR_KERNELS", [lambda *_: None] * 16)
    assert not trial.product_is_exact()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "signal 4"),
        ("import sys; sys.exit('the product is wrong')", "the product is wrong"),
        ("import sys; sys.exit(9)", "status 9"),
    ],
)
def test_a_processor_that_fails_the_trial_is_refused_with_a_way_out(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a path that this processor has no slower one for but the last
    monkeypatch.setattr(build, "supported_paths", lambda _: ("vnni512", "avx2", "generic"))
    for path, way_out in (
        ("vnni512", "set HIPFIRE_CPU_PATH=avx2"),
        ("avx2", "set HIPFIRE_CPU_PATH=generic"),
        ("generic", "set memory.weights=packed"),
    ):
        monkeypatch.setattr(build, "cpu_path", lambda path=path: path)
        with pytest.raises(UnsupportedError) as caught:
            try_out((sys.executable, "-c", code))
        assert caught.value.message == f"the {path} kernels fail on this processor ({reason})"
        assert caught.value.hint == way_out


def test_a_trial_that_cannot_be_started_says_nothing_about_the_processor(tmp_path: Path) -> None:
    try_out((str(tmp_path / "no-such-program"),))
    assert cpu_path()
