"""The number of threads to take, on machines and in containers made of files; and the processor's name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.base.cpu import CpuLimits, cpu_limits, cpu_name


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files below `root`, with their folders."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")


def cpu(root: Path, number: int, **facts: object) -> None:
    """Write files of one CPU in sysfs; a fact's `__` stands for a folder."""
    folder = f"sys/devices/system/cpu/cpu{number}"
    write(root, {f"{folder}/{name.replace('__', '/')}": f"{text}\n" for name, text in facts.items()})


def limits(root: Path, cpus: Iterable[int]) -> CpuLimits:
    """Return the limits on the machine below `root` for a process that may run on these CPUs."""
    return cpu_limits(root / "sys", root / "proc", root / "cgroup", frozenset(cpus))


def smt(root: Path, cores: int, file: str = "thread_siblings_list") -> None:
    """Make cores of two threads, numbered as Linux does: all first threads, then all second ones."""
    for number in range(2 * cores):
        first = number % cores
        cpu(root, number, **{f"topology__{file}": f"{first},{first + cores}"})


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_two_threads_of_a_core_count_once(tmp_path: Path, file: str) -> None:
    smt(tmp_path, 4, file)
    found = limits(tmp_path, range(8))
    assert (found.affinity, found.physical, found.usable, found.quota) == (8, 4, 4, None)
    assert found.reason == "the number of cores among 8 CPUs"
    assert [limits(tmp_path, cpus).usable for cpus in ({0, 4}, {0, 4, 5}, {1, 2, 3})] == [1, 2, 3]


@pytest.mark.parametrize("group", ["physical_package_id", "die_id", "cluster_id"])
def test_without_lists_the_numbers_of_a_core_and_what_holds_it_decide(tmp_path: Path, group: str) -> None:
    for number in range(8):
        # core 0 of one group is another than core 0 of the next
        cpu(tmp_path, number, topology__core_id=number % 2, **{f"topology__{group}": number // 2 % 2})
    assert limits(tmp_path, range(8)).physical == 4


@pytest.mark.parametrize(
    "siblings", ["", "x", "7", "0-", "-3", "3-0", "0,,1", "0-99999999999", "9" * 6000, "0-3;", "٠-٣"]
)
def test_a_damaged_list_of_siblings_makes_each_cpu_a_core(tmp_path: Path, siblings: str) -> None:
    for number in (0, 1):
        cpu(tmp_path, number, topology__thread_siblings_list=siblings, topology__core_id="not known")
    assert limits(tmp_path, {0, 1, 2}).physical == 3


def test_no_sysfs_makes_each_cpu_a_core(tmp_path: Path) -> None:
    assert limits(tmp_path, {3, 5, 9}) == CpuLimits(3, None, 3, 3, "the number of cores among 3 CPUs")
    assert limits(tmp_path, ()).usable == 1


@pytest.mark.parametrize(("counted", "threads"), [(6, 6), (None, 1)])
def test_a_system_without_affinity_is_asked_for_its_number_of_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: int | None, threads: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert cpu_limits(tmp_path, tmp_path, tmp_path).usable == threads


def hybrid(root: Path, named: str | None) -> None:
    """Make 2 performance cores of two threads (CPUs 0 to 3) and 4 efficiency cores (CPUs 4 to 7)."""
    for number in range(8):
        siblings = f"{number // 2 * 2}-{number // 2 * 2 + 1}" if number < 4 else number
        speed = 5000000 if number < 4 else 3900000
        cpu(root, number, topology__core_cpus_list=siblings, cpufreq__cpuinfo_max_freq=speed)
    if named is not None:
        write(root / "sys", {"devices/cpu_core/cpus": named, "devices/cpu_atom/cpus": "4-7\n"})


@pytest.mark.parametrize("named", ["0-3\n", None, "damaged"], ids=["named", "by frequency", "damaged"])
def test_efficiency_cores_are_left_out(tmp_path: Path, named: str | None) -> None:
    hybrid(tmp_path, named)
    found = limits(tmp_path, range(8))
    assert (found.affinity, found.physical, found.usable) == (8, 2, 2)
    assert found.reason == "the number of fast cores among 8 CPUs"


def test_a_process_kept_on_efficiency_cores_uses_them(tmp_path: Path) -> None:
    hybrid(tmp_path, "0-3\n")
    assert limits(tmp_path, {4, 5, 6}).usable == 3
    assert limits(tmp_path, {0, 1, 4, 5}).usable == 1


def test_frequencies_a_little_apart_are_one_kind_of_core(tmp_path: Path) -> None:
    for number, speed in enumerate([5700000, 5700000, 5250000, 4600000]):
        cpu(tmp_path, number, cpufreq__cpuinfo_max_freq=speed)
    assert limits(tmp_path, range(4)).physical == 4


@pytest.mark.parametrize(
    ("capacities", "fast"),
    [
        ([446] * 4 + [1024] * 4, 4),
        # one fastest core
        ([325] * 4 + [871] * 3 + [1024], 4),
        ([523] * 4 + [1024] * 4, 4),
        ([1024] * 4, 4),
    ],
)
def test_little_cores_are_left_out(tmp_path: Path, capacities: list[int], fast: int) -> None:
    for number, capacity in enumerate(capacities):
        cpu(tmp_path, number, cpu_capacity=capacity)
    assert limits(tmp_path, range(len(capacities))).usable == fast
    # among little cores alone none is little
    assert limits(tmp_path, {0, 1, 2}).usable == 3


def test_a_cpu_of_unknown_speed_is_not_left_out(tmp_path: Path) -> None:
    for number, capacity in enumerate([1024, "damaged", 300]):
        cpu(tmp_path, number, cpu_capacity=capacity)
    assert limits(tmp_path, range(4)).usable == 3


OWN_V2 = {"proc/self/cgroup": "0::/a/b\n"}
OWN_V1 = {"proc/self/cgroup": "9:name=systemd:/x\n4:cpu,cpuacct:/a/b\n3:cpuset:/a\n"}
OWN_BOTH = {"proc/self/cgroup": "1:cpu:/a\n0::/b\n"}


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    """Return the files of a quota, in microseconds, in one group of version 1."""
    name = f"cgroup/{folder}/cpu.cfs"
    return {f"{name}_quota_us": f"{quota}\n", f"{name}_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({}, None, 8),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "max 100000\n"}, None, 8),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "400000 100000\n"}, 4.0, 4),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "399999 100000\n"}, 3.99999, 3),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "10000 100000\n"}, 0.1, 1),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "3200000 100000\n"}, 32.0, 8),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "max 100000", "cgroup/a/cpu.max": "200000 100000"}, 2.0, 2),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "600000 100000", "cgroup/a/cpu.max": "150000 50000"}, 3.0, 3),
        ({**OWN_V2, "cgroup/a/b/cpu.max": "100000 100000", "cgroup/a/cpu.max": "300000 100000"}, 1.0, 1),
        ({**OWN_V2, "cgroup/cpu.max": "200000 100000"}, 2.0, 2),
        ({**OWN_V2, "cgroup/unified/a/cpu.max": "200000 100000"}, 2.0, 2),
        ({**OWN_V2, "cgroup/other/cpu.max": "200000 100000"}, None, 8),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "200000 100000"}, 2.0, 2),
        ({"proc/self/cgroup": "0::/../other\n", "cgroup/cpu.max": "2 1", "other/cpu.max": "1 1"}, 2.0, 2),
        ({"cgroup/cpu.max": "200000 100000"}, 2.0, 2),
        ({"proc/self/cgroup": "0::/a\0b\n", "cgroup/cpu.max": "200000 100000"}, 2.0, 2),
        ({**OWN_V1, **v1("cpu,cpuacct/a/b", 250000)}, 2.5, 2),
        ({**OWN_V1, **v1("cpu/a/b", 250000)}, 2.5, 2),
        ({**OWN_V1, **v1("cpu/a/b", -1)}, None, 8),
        ({**OWN_V1, **v1("cpu/a/b", -1), **v1("cpu/a", 100000, 50000)}, 2.0, 2),
        ({**OWN_V1, **v1("cpu", 300000)}, 3.0, 3),
        ({**v1("cpu,cpuacct", 300000)}, 3.0, 3),
        ({**OWN_V1, **v1("cpu/x", 100000)}, None, 8),
        # a group of version 1 and one of version 2 at once: the smaller counts
        ({**OWN_BOTH, **v1("cpu/a", 500000), "cgroup/unified/b/cpu.max": "3 1"}, 3.0, 3),
        ({**OWN_BOTH, **v1("cpu/a", 200000), "cgroup/unified/b/cpu.max": "3 1"}, 2.0, 2),
    ],
)  # fmt: skip
def test_a_quota_bounds_the_threads(
    tmp_path: Path, files: dict[str, str], quota: float | None, threads: int
) -> None:
    write(tmp_path, files)
    found = limits(tmp_path, range(8))
    assert (found.quota, found.usable, found.physical) == (quota, threads, 8)
    by_quota = quota is not None and threads < 8
    assert found.reason == (f"a quota of {quota:g} CPUs" if by_quota else "the number of cores among 8 CPUs")


def test_a_quota_and_cores_bound_together(tmp_path: Path) -> None:
    smt(tmp_path, 4)
    write(tmp_path, {**OWN_V2, "cgroup/a/cpu.max": "600000 100000"})
    assert limits(tmp_path, range(8)).usable == 4
    write(tmp_path, {"cgroup/a/cpu.max": "300000 100000"})
    assert limits(tmp_path, range(8)).usable == 3
    assert limits(tmp_path, {0, 4}).usable == 1


@pytest.mark.parametrize(
    "text",
    ["", "200000", "x y", "200000 0", "0 100000", "-5 100000", "200000 100000 1", "1e3 1", f"{'9' * 6000} 1",
     "200000 -1", "\0", "²  1"],
)  # fmt: skip
def test_a_damaged_quota_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, {**OWN_V2, "cgroup/a/b/cpu.max": text})
    assert limits(tmp_path, range(8)) == CpuLimits(8, None, 8, 8, "the number of cores among 8 CPUs")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({**OWN_V2, "cgroup/a/b/cpuset.cpus.effective": "1-3\n"}, 3),
        ({**OWN_V2, "cgroup/a/cpuset.cpus.effective": "0,2\n"}, 2),
        ({**OWN_V2, "cgroup/cpuset.cpus.effective": "0-7\n", "cgroup/a/b/cpuset.cpus": "4-5\n"}, 2),
        ({**OWN_V2, "cgroup/a/b/cpuset.cpus": "\n"}, 8),
        ({**OWN_V2, "cgroup/a/b/cpuset.cpus.effective": "damaged"}, 8),
        # out of date: no CPU of it is ours
        ({**OWN_V2, "cgroup/a/b/cpuset.cpus.effective": "100-103\n"}, 8),
        ({**OWN_V1, "cgroup/cpuset/a/cpuset.cpus": "0-4\n"}, 5),
        ({**OWN_V1, "cgroup/cpuset/a/cpuset.effective_cpus": "3-4\n"}, 2),
        ({**OWN_V1, "cgroup/cpuset/b/cpuset.cpus": "0-4\n"}, 8),
    ],
)  # fmt: skip
def test_a_cpu_set_bounds_the_threads(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    write(tmp_path, files)
    found = limits(tmp_path, range(8))
    assert (found.affinity, found.usable) == (cpus, cpus)


def test_a_cpu_set_narrows_the_affinity_and_never_widens_it(tmp_path: Path) -> None:
    write(tmp_path, {**OWN_V2, "cgroup/a/b/cpuset.cpus.effective": "0-5\n"})
    assert [limits(tmp_path, cpus).affinity for cpus in ({4, 5, 6, 7}, {1})] == [2, 1]


SYSFS = "sys/devices/system/cpu/cpu0"
FILES = ("proc/self/cgroup", "cgroup/cpu.max", "cgroup/a/cpu.max", "cgroup/cpuset.cpus.effective",
    "cgroup/cpu/cpu.cfs_quota_us", "cgroup/cpu/cpu.cfs_period_us", "sys/devices/cpu_core/cpus",
    f"{SYSFS}/topology/core_cpus_list", f"{SYSFS}/topology/core_id", f"{SYSFS}/cpu_capacity",
    f"{SYSFS}/cpufreq/cpuinfo_max_freq")  # fmt: skip
LIKELY = st.sampled_from(["0", "0-1", "max 1", "3 2", "-1", "0::/a\0", "1:cpu,cpuset:/../a", "9" * 30])
CONTENTS = st.one_of(LIKELY.map(str.encode), st.binary(max_size=60))


@settings(max_examples=150, deadline=None)
@given(
    contents=st.dictionaries(st.sampled_from(FILES), CONTENTS, min_size=1),
    cpus=st.frozensets(st.integers(0, 3), min_size=1),
)
def test_no_content_of_files_breaks_the_bounds(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes], cpus: frozenset[int]
) -> None:
    root = tmp_path_factory.mktemp("machine")
    for name, content in contents.items():
        write(root, {name: ""})
        (root / name).write_bytes(content)
    found = limits(root, cpus)
    assert 1 <= found.usable <= found.physical <= found.affinity <= len(cpus)
    assert found.quota is None or found.usable <= max(1.0, found.quota)


def test_a_folder_in_place_of_a_file_tells_nothing(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).mkdir(parents=True)
    assert limits(tmp_path, range(4)).usable == 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its CPUs")
def test_a_process_kept_on_one_cpu_takes_one_thread() -> None:
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from hipfire.base import cpu; print(cpu.cpu_limits().affinity, cpu.usable_threads())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"cpuinfo": "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Some  CPU @ 3GHz\nmodel name\t: Other\n"},
         "Some CPU @ 3GHz"),
        ({"cpuinfo": "processor : 0\nHardware : Board 7\nModel : Small Computer 5\n"}, "Small Computer 5"),
        ({"cpuinfo": "model name :\nHardware : Board: 7\n"}, "Board: 7"),
        ({"cpuinfo": "flags : \udcff\nmodel name : known\n"}, "known"),
        ({"cpuinfo": "cpu : POWER9\n"}, "POWER9"),
        ({"cpuinfo": "CPU part : 0xd0b\n", "device-tree/model": "Computer 5\0"}, "Computer 5"),
        ({"cpuinfo": "model name : a\x1b[31mb\n"}, "a\\x1b[31mb"),
    ],
)  # fmt: skip
def test_the_processor_has_a_name(tmp_path: Path, files: dict[str, str], name: str) -> None:
    write(tmp_path, files)
    assert cpu_name(tmp_path) == name


def test_without_files_python_names_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for processor, machine, name in (("chip", "x", "chip"), ("", "y", "y"), ("", "", "unknown processor")):
        monkeypatch.setattr(platform, "processor", lambda found=processor: found)
        monkeypatch.setattr(platform, "machine", lambda found=machine: found)
        assert cpu_name(tmp_path) == name
