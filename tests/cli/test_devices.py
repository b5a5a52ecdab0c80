"""Choosing a device: flags and settings reach the load and the server, and what is told about GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_kit import one_line

from hipfire.base import log
from hipfire.base.errors import UnsupportedError
from hipfire.checkpoint.library import open_library
from hipfire.cli import host
from hipfire.cli.loading import ReadNote
from hipfire.cli.main import main
from hipfire.cli.progress import PlainProgress
from hipfire.cli.remote_wire import Address
from hipfire.cli.serve_options import ServeFlags, build_options
from hipfire.cli.settings import load_settings
from hipfire.engine.wire_messages import LoadParams
from hipfire.runtime import devices
from hipfire.runtime.load import LoadOptions
from hipfire.server.backend import BackendState
from hipfire.server.options import ServeOptions
from hipfire.server.service import Service
from tiny_models import tiny_model, write_folder

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
CARD = {
    "name": "A card", "vendor": "cuda", "arch": "sm_90", "driver": "580.1", "runtime": "13.0",
    "memory_bytes": 80 << 30, "free_bytes": 79 << 30, "problem": None,
}  # fmt: skip


class StoppedError(Exception):
    """Ends a command where a model would be loaded."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("cli") / "tiny", tiny_model("llama"))


@pytest.fixture
def asked(home: Path, monkeypatch: Patch) -> list[LoadOptions]:
    """Note the options of every load instead of loading."""
    found: list[LoadOptions] = []

    def load(path: Path, options: LoadOptions, **_: Any) -> None:
        found.append(options)
        raise StoppedError

    monkeypatch.setattr("hipfire.engine.llm.load_model", load)
    return found


def made_options(*flags: str, **given: str) -> ServeOptions:
    address = Address("127.0.0.1", 1)
    return build_options(load_settings(), ServeFlags(**given), model=None, address=address, prewarm=False)


@pytest.mark.parametrize("command", ["run", "bench"])
def test_flags_and_settings_reach_the_load(
    folder: Path, home: Path, asked: list[LoadOptions], monkeypatch: Patch, command: str
) -> None:
    assert main([command, str(folder), "hi"]) == 1
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        "[hardware]\ndevice = 'cpu'\nactivations = 'float'\n[memory]\nkv_backend = 'legacy'\n"
    )
    assert main([command, str(folder), "hi"]) == 1
    monkeypatch.setenv("HIPFIRE_DEVICE", "gpu:3")
    monkeypatch.setenv("HIPFIRE_ACTIVATIONS", "int8")
    assert main([command, str(folder), "hi"]) == 1
    assert main([command, str(folder), "hi", "--device", "GPU", "--kv-backend", "vmm"]) == 1
    assert [(each.device, each.kv_backend, each.activations) for each in asked] == [
        ("auto", "auto", "int8"),
        ("cpu", "legacy", "float"),
        ("gpu:3", "legacy", "int8"),
        ("gpu", "vmm", "int8"),
    ]
    # the length of a step is the device's own
    assert {each.prefill_chunk for each in asked} == {None}


class Backend:
    """Notes what it is told to load."""

    def __init__(self) -> None:
        self.params: list[dict[str, Any]] = []

    def state(self) -> BackendState:
        return "ok"


def test_the_engine_of_a_server_is_told_the_device(home: Path, monkeypatch: Patch) -> None:
    home.mkdir(exist_ok=True)
    (home / "models").mkdir()
    (home / "models" / "Tiny.gguf").write_bytes(b"GGUF")
    (home / "models.toml").write_text("[models.Tiny]\nmemory = {kv_backend = 'legacy'}\n")
    monkeypatch.setenv("HIPFIRE_ACTIVATIONS", "float")
    backend: Any = Backend()
    found = []
    for given in ({}, {"device": "gpu:1", "kv_backend": "vmm"}):
        options = made_options(**given)
        library = open_library(load_settings())
        service = Service(options, backend, library)
        found.append(LoadParams(**service._load_params(library.require("Tiny"))))
    first, second = found
    # a setting of one model, then a flag, which holds for all of them
    assert (first.device, first.kv_backend, first.activations) == ("auto", "legacy", "float")
    assert (second.device, second.kv_backend, second.activations) == ("gpu:1", "vmm", "float")
    assert (first.prefill_chunk, made_options(prefill_chunk=64).prefill_chunk) == (None, 64)


def test_a_detached_server_gets_the_same_flags() -> None:
    assert ServeFlags(device="gpu:1", kv_backend="vmm").words() == ["--device=gpu:1", "--kv-backend=vmm"]


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_gpu_that_is_not_there_is_one_line(
    folder: Path, home: Path, monkeypatch: Patch, capsys: Output, command: str
) -> None:
    monkeypatch.setattr(devices, "find_gpu", lambda *_: None)
    assert main([command, str(folder), "hi", "--device", "gpu"]) == 1
    one_line(capsys.readouterr(), "there is no GPU for device gpu", "hardware.device=cpu")


def test_a_driver_that_is_too_old_is_one_line(
    folder: Path, home: Path, monkeypatch: Patch, capsys: Output
) -> None:
    def fail(*_: object) -> None:
        raise UnsupportedError("the GPU cannot be used (driver 470.1): too old", hint="install a newer one")

    monkeypatch.setattr(devices, "find_gpu", fail)
    assert main(["run", str(folder), "hi", "--device", "gpu:0"]) == 1
    one_line(capsys.readouterr(), "driver 470.1", "install a newer one")


@pytest.mark.parametrize("word", ["cuda", "gpu:", "gpu:x", "gpu: 1", "0", ""])
def test_words_that_name_no_device_are_refused(home: Path, capsys: Output, word: str) -> None:
    assert main(["config", "set", "device", word]) == 1
    one_line(capsys.readouterr(), "hardware.device", "auto, cpu, gpu, or a number as in gpu:1")
    assert main(["config", "set", "device", "gpu:12"]) == 0
    assert load_settings().resolve("hardware.device").value == "gpu:12"


def test_reading_weights_is_told_in_a_few_lines(
    monkeypatch: Patch, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = [0.0]
    monkeypatch.setattr("hipfire.cli.loading.make_progress", lambda: PlainProgress(clock=lambda: seconds[0]))
    log.configure()
    note, total = ReadNote(), 8 << 30
    for done in range(0, total + 1, 1 << 30):
        seconds[0] += 2.0
        note(done, total)
    note.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line.removeprefix("hipfire: reading weights to the GPU: ") for line in shown.err.splitlines()]
    assert (lines[0], lines[-1]) == ("starting (8.00 GiB)", "100% of 8.00 GiB")
    # one in five seconds, not one for each piece
    assert len(lines) == 4
    # on the CPU nothing is sent anywhere, and nothing is said
    ReadNote().close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_diag_shows_gpus(home: Path, monkeypatch: Patch, capsys: Output, as_json: bool) -> None:
    old = {
        **CARD,
        "name": "An old card",
        "free_bytes": None,
        "problem": "An old card cannot be used: too old",
    }
    monkeypatch.setattr(host, "gpu_facts", lambda: [CARD, old])
    assert main(["diag", *(["-j"] if as_json else [])]) == 0
    shown = capsys.readouterr().out
    if as_json:
        facts = json.loads(shown)
        assert facts["gpus"] == [CARD, old]
        assert old["problem"] in facts["advice"]
        return
    assert "A card (sm_90), 80.00 GiB, 79.00 GiB free, driver 580.1, 13.0" in shown
    assert "An old card (sm_90), 80.00 GiB, unusable, driver" in shown
    assert "too old" in shown


def test_diag_without_a_gpu_says_none(home: Path, monkeypatch: Patch, capsys: Output) -> None:
    monkeypatch.setattr(host, "gpu_facts", list)
    assert main(["diag"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("gpus")]
    assert line.split() == ["gpus:", "none"]
    assert "hipfire runs on the CPU" in shown


def test_the_compiler_of_gpu_kernels_is_not_imported_without_a_gpu_model(home: Path) -> None:
    code = """
import sys
from hipfire.cli.main import main
import hipfire.cli.serve, hipfire.cli.chat, hipfire.cli.run, hipfire.cli.bench, hipfire.engine.daemon_model
from hipfire.device.facts import gpu_facts
gpu_facts()
assert main(["--help"]) == 0
assert "torch" in sys.modules
sys.exit("triton" in sys.modules or "hipfire.runtime.gpu_load" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
