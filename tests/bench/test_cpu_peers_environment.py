"""The environment that benchmarks/cpu_peers.py makes for the peer: where it lies, and builds that fail."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from hipfire.base.errors import UnsupportedError, ValidationError
from peers import environment
from peers.environment import cache_folder, environment_python, find_compiler, peer_python

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and scripts")


def script(path: Path, body: str) -> Path:
    """Write a Python program that can be started by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_environment_lies_in_the_users_cache(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "hipfire" / "peers"
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "hipfire" / "peers"


def test_a_chosen_environment_must_be_one_and_have_the_package(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="is not a Python environment"):
        peer_python(tmp_path, tmp_path, print)
    script(tmp_path / "bin" / "python", "import sys; sys.exit('ModuleNotFoundError: none')")
    with pytest.raises(UnsupportedError) as caught:
        peer_python(tmp_path, tmp_path, print)
    line = caught.value.line()
    assert line.startswith("llama-cpp-python cannot be used: ModuleNotFoundError: none; install it there: ")
    assert line.endswith("python -m pip install llama-cpp-python==0.3.36")


@posix
def test_a_compiler_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(UnsupportedError, match=r"has no C\+\+ compiler; install g\+\+ or clang\+\+"):
        peer_python(tmp_path / "cache", None, print)
    script(tmp_path / "clang++", "")
    assert find_compiler() == "clang++"
    script(tmp_path / "mine", "")
    assert find_compiler({"CXX": "mine -O2", "PATH": str(tmp_path)}) == "mine"
    assert find_compiler({"CXX": "none", "PATH": str(tmp_path)}) is None


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program in Python's place that notes its arguments, and "makes" environments out of itself."""
    program = script(
        tmp_path / "python",
        "import pathlib, shutil, sys\n"
        "log = pathlib.Path(__file__).parents[0] / 'calls'\n"
        "log.open('a').write(' '.join(sys.argv[1:3]) + '\\n')\n"
        "if sys.argv[1:3] == ['-m', 'venv']:\n"
        "    target = pathlib.Path(sys.argv[-1]) / 'bin' / 'python'\n"
        "    target.parent.mkdir(parents=True, exist_ok=True)\n"
        "    shutil.copy(__file__, target)\n"
        "if sys.argv[1:3] == ['-m', 'pip'] and not pathlib.Path(sys.argv[0]).with_name('good').exists():\n"
        "    print('  CMake Error: no such luck\\nERROR: failed')\n"
        "    sys.exit(1)\n",
    )
    monkeypatch.setattr(environment.sys, "executable", str(program))
    monkeypatch.setattr(environment, "find_compiler", lambda: "g++")
    return program


@posix
def test_a_build_that_fails_says_why_and_is_tried_again(tmp_path: Path, maker: Path) -> None:
    folder = tmp_path / "cache" / "llama-cpp-python-0.3.36"
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(UnsupportedError) as caught:
            peer_python(tmp_path / "cache", None, said.append)
        line = caught.value.line()
        assert line.startswith(
            "pip could not build llama-cpp-python==0.3.36: CMake Error: no such luck; see "
        )
        assert "C++ compiler" in line
    assert len(said) == 2
    assert said[0].startswith(f"building llama-cpp-python 0.3.36 in {folder}")
    assert (tmp_path / "calls").read_text().splitlines() == ["-m venv", "-m venv"]


@posix
def test_an_environment_is_built_once(tmp_path: Path, maker: Path) -> None:
    folder = tmp_path / "cache" / "llama-cpp-python-0.3.36"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "good").touch()
    said: list[str] = []
    for _ in range(2):
        assert peer_python(tmp_path / "cache", None, said.append) == folder / "bin" / "python"
    assert len(said) == 1
    assert (folder / "bin" / "calls").read_text().splitlines()[0] == "-m pip"
    assert environment_python(folder) == folder / "bin" / "python"


def ends(pid: int, seconds: float = 20.0) -> bool:
    """Wait until a process that is nobody's child has died: a kill is carried out when it next runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


@posix
def test_an_interrupted_build_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    program = script(
        tmp_path / "python",
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "os.kill(os.getppid(), 10)\n"
        "time.sleep(600)\n",
    )
    monkeypatch.setattr(environment.sys, "executable", str(program))
    monkeypatch.setattr(environment, "find_compiler", lambda: "g++")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            peer_python(tmp_path / "cache", None, lambda _: None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    builder, compiler = map(int, note.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(builder, 0)
    assert ends(compiler), "the compiler outlived the build"
