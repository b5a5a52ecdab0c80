"""Every path that this processor can run, and plain SSE2: each against float64, and all with equal bytes."""

from __future__ import annotations

import functools
import json
import platform
from typing import Any

import pytest
from cpu_kit import PATHS_FOLDER, run_python
from path_child import digests

from hipfire.base.errors import ValidationError
from hipfire.kernels.cpu import target
from hipfire.kernels.cpu.target import PATH_VARIABLE, PATHS, cpu_path, host_features, supported_paths

IS_X86 = platform.machine() in ("x86_64", "AMD64")
HERE = supported_paths(host_features())
# what the first x86 processors of 64 bits had
PLAIN = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", PATH_VARIABLE: "generic"}


@functools.cache
def report(path: str, **environment: str) -> dict[str, Any]:
    """Check all cases on a path, in a process of its own unless it is the path in use."""
    if path == cpu_path() and not environment:
        return {"path": path, "digests": digests()}
    printed = run_python(str(PATHS_FOLDER / "path_child.py"), **{PATH_VARIABLE: path, **environment})
    result: dict[str, Any] = json.loads(printed)
    return result


def differing(some: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name, found in some["digests"].items() if other["digests"][name] != found]


@pytest.mark.parametrize("path", HERE)
def test_every_path_gives_the_results_of_float64_and_the_same_bytes(path: str) -> None:
    found = report(path)
    assert found["path"] == path
    assert differing(found, report("generic")) == []


@pytest.mark.skipif(not IS_X86, reason="names features of x86")
def test_a_processor_without_avx_gives_the_same_bytes() -> None:
    found = report(**{"path": "generic", **PLAIN})
    assert (found["path"], found["features"]) == ("generic", [])
    assert differing(found, report("generic")) == []


@pytest.mark.parametrize(
    ("features", "paths"),
    [
        ("", ("generic",)),
        ("avx2", ("generic",)),
        ("avx2 fma", ("avx2", "generic")),
        ("avx2 fma f16c avxvnni", ("vnni256", "avx2", "generic")),
        ("avx2 fma avx512f avx512bw avx512vnni", ("vnni512", "avx2", "generic")),
        ("avx2 fma avx512f avx512bw avx512vnni avxvnni", PATHS),
        ("neon fp-armv8", ("generic",)),
    ],
)
def test_a_path_needs_all_its_features(features: str, paths: tuple[str, ...]) -> None:
    assert supported_paths(frozenset(features.split())) == paths


def test_the_fastest_path_is_taken_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = cpu_path.__wrapped__
    monkeypatch.setattr(target, "host_features", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    assert choose() == "avx2"
    monkeypatch.setenv(PATH_VARIABLE, "generic")
    assert choose() == "generic"
    for wrong in ("vnni512", "avx3"):
        monkeypatch.setenv(PATH_VARIABLE, wrong)
        with pytest.raises(ValidationError, match=f"HIPFIRE_CPU_PATH is '{wrong}', which this") as caught:
            choose()
        assert caught.value.hint == "use one of avx2, generic"


def test_an_impossible_path_is_one_error_where_threads_are_made() -> None:
    code = """
from hipfire.base.errors import ValidationError
from hipfire.kernels.cpu.pool import Pool
try:
    Pool(3)
except ValidationError as error:
    print(error.line())
import threading
print(threading.active_count())
"""
    printed = run_python("-c", code, **{PATH_VARIABLE: "avx9"})
    refusal = f"{PATH_VARIABLE} is 'avx9', which this processor cannot run; use one of {', '.join(HERE)}"
    assert printed.splitlines() == [refusal, "1"]


@pytest.mark.parametrize(
    ("told", "features"), [("+avx2,-fma,+sse2", {"avx2", "sse2"}), ("", set()), ("-avx2", set())]
)
def test_features_that_numba_was_told_replace_those_of_the_processor(
    told: str, features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.config, "CPU_FEATURES", told)
    assert host_features.__wrapped__() == features


def test_the_machine_has_more_features_than_none() -> None:
    if IS_X86:
        assert "sse2" in host_features()
    assert cpu_path() in HERE
