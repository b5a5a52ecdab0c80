"""The compile gate finds each planted fault, in that entry alone, and passes what is sound.

The processes that compile know nothing of `TRITON_INTERPRET`, with which the tests themselves run.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compile_kit import faults_of, planted, row_of

from hipfire.validate.compile_gate import GateReport, main, table
from hipfire.validate.compile_gate_pool import Compilers
from hipfire.validate.compile_gate_snapshot import Snapshot

ALL = ("gfx1100", "gfx1151", "gfx1201", "sm_90")
MODULE = "planted_kernels"
PRODUCT = f"{MODULE}.product_kernel"
ABSENT = f"{MODULE}.absent_kernel"
BYTES = f"{MODULE}.bytes_kernel"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> GateReport:
    """A run over all planted kernels, in one process at a time."""
    return planted(MODULE, tmp_path_factory.mktemp("gate") / "registers.json")


@pytest.mark.parametrize("target", ALL)
def test_sound_kernels_pass_and_their_instructions_are_native(report: GateReport, target: str) -> None:
    for key, need in ((f"{PRODUCT}[sound]", "matrix"), (f"{BYTES}[sound]", "dot4")):
        row = row_of(report.rows, key, target)
        assert row["faults"] == []
        assert row["registers"] > 0
        assert row["spills"] == row["scratch"] == 0
        assert row["instructions"][need] > 0


def test_shared_memory_of_a_tile_is_counted(report: GateReport) -> None:
    # two tiles of 32 x 32 halves on AMD, which holds one step at a time
    assert row_of(report.rows, f"{PRODUCT}[sound]", "gfx1201")["shared"] == 2048


@pytest.mark.parametrize("target", ["gfx1201", "sm_90"])
def test_a_spilling_kernel_is_refused(report: GateReport, target: str) -> None:
    row = row_of(report.rows, f"{PRODUCT}[spills]", target)
    assert row["faults"] == [
        f"spills {row['spills']} registers",
        f"uses {row['scratch']} bytes of private memory a thread",
    ]
    assert min(row["spills"], row["scratch"]) > 0


@pytest.mark.parametrize("target", ["gfx1201", "sm_90"])
@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (f"{BYTES}[no dot4]", "has no native product of four bytes"),
        (f"{MODULE}.summed_kernel[no matrix]", "has no native matrix instruction"),
    ],
)
def test_a_missing_instruction_is_refused(report: GateReport, key: str, target: str, fault: str) -> None:
    assert faults_of(report, key, target) == [fault]


def test_shared_memory_is_held_against_each_machine_s_own_limit(report: GateReport) -> None:
    key = f"{PRODUCT}[too much shared memory]"
    shared = row_of(report.rows, key, "gfx1201")["shared"]
    assert faults_of(report, key, "gfx1201") == [f"uses {shared} bytes of shared memory of 65536"]
    assert shared > 65536
    assert faults_of(report, key, "sm_90") == []


def test_an_absent_tensor_is_compiled_as_one(report: GateReport) -> None:
    assert faults_of(report, ABSENT, "gfx1201") == faults_of(report, ABSENT, "sm_90") == []


def test_a_kernel_that_does_not_compile_says_why(report: GateReport) -> None:
    for target in ("gfx1201", "sm_90"):
        (fault,) = faults_of(report, f"{MODULE}.broken_kernel", target)
        assert fault.startswith("does not compile: CompilationError")
        assert "undefined_name is not defined" in fault


def test_the_end_of_a_compiler_is_the_fault_of_its_entry_alone(report: GateReport) -> None:
    (fault,) = faults_of(report, f"{ABSENT}[aborts]", "gfx1201")
    assert fault == "does not compile: the compiler's process ended with -6: LLVM ERROR: planted fault"
    # what the same process would have compiled next
    assert len(report.rows) == len({(row["key"], row["target"]) for row in report.rows}) == 21


def test_faults_name_their_machines_once(report: GateReport) -> None:
    assert f"{BYTES}[no dot4] on gfx1201, sm_90: has no native product of four bytes" in report.faults
    assert len(report.faults) == len(set(report.faults)) == 9


def test_the_table_and_the_json_hold_the_verdict(report: GateReport) -> None:
    lines = list(table(report))
    assert sum(line.endswith("FAULT") for line in lines) == 10
    assert lines[-1].endswith("9 faults")
    assert [line for line in lines if line.startswith("fault: ")] == [
        f"fault: {each}" for each in report.faults
    ]
    assert json.loads(json.dumps(report.to_json()))["verdict"] == "fail"


def test_a_time_limit_ends_what_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("HIPFIRE_TEST_PIDS", str(pids))
    report = planted("planted_endless", tmp_path / "registers.json", limit_s=8.0)
    key = "planted_endless.copy_kernel"
    assert faults_of(report, f"{key}[a]", "gfx1100") == ["does not compile: it takes more than 8 s"]
    assert faults_of(report, f"{key}[b]", "gfx1100") == []
    assert "planted_endless.copy_kernel[b]: two entries have this name" in report.faults
    # the program that it had started is gone as well
    for pid in map(int, pids.read_text().split()):
        _await_end(pid)


def _await_end(pid: int) -> None:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_processes_that_start_cold_share_one_cache(tmp_path: Path) -> None:
    compilers = Compilers(MODULE, tmp_path / "cache")
    job = (f"{PRODUCT}[sound]", "sm_90")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: compilers.run([job], 1, lambda done: None)[job], range(4)))
    figures = [{name: value for name, value in answer.items() if name != "seconds"} for answer in answers]
    assert figures[0]["faults"] == []
    assert figures == [figures[0]] * 4


def test_the_command_writes_a_snapshot_and_compares_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "registers.json"
    words = ["--package", MODULE, "--kernel", "bytes_kernel[sound]", "--cache", str(tmp_path / "cache")]
    # nothing to compare with is no fault, but it is said
    assert main(words, snapshot=snapshot) == 0
    out = capsys.readouterr().out
    assert "nothing to compare with" in out
    assert "1 entries, 4 compiled" in out
    assert not snapshot.exists()

    assert main([*words, "--update"], snapshot=snapshot) == 0
    (version,) = json.loads(snapshot.read_text())
    assert set(json.loads(snapshot.read_text())[version]) == set(ALL)

    # a kernel that once took far fewer registers
    known = Snapshot(snapshot)
    known.update(version, {(f"{BYTES}[sound]", "sm_90"): 1}, complete=False)
    report_file = tmp_path / "report.json"
    assert main([*words, "--target", "sm_90", "--json", str(report_file)], snapshot=snapshot) == 1
    assert "registers, and 1 in the snapshot; run this with --update" in capsys.readouterr().out
    assert json.loads(report_file.read_text())["verdict"] == "fail"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "gfx9"], "--target: no kernel is compiled for gfx9"),
        (["--kernel", "no such kernel"], "no entry of any OFFLINE tuple has such a name"),
    ],
)
def test_a_choice_of_nothing_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["--package", MODULE, *words], snapshot=tmp_path / "registers.json") == 1
    assert said in capsys.readouterr().err


def test_a_package_that_cannot_be_imported_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--package", "no_such_package"], snapshot=tmp_path / "registers.json") == 1
    said = capsys.readouterr().err
    assert said.startswith("compile_kernels: no process could list the kernels")
    assert "No module named 'no_such_package'" in said
