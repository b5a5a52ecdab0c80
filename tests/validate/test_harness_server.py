"""The harness's server: only ours, only with our model, only this attempt's log, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness_kit import SERVER, is_over

from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import Library, LocalModel
from hipfire.checkpoint.registry import load_registry
from hipfire.validate.harness_client import Address
from hipfire.validate.harness_home import Home, isolated_home, server_words
from hipfire.validate.harness_server import (
    LogSlice,
    NotWarmError,
    ServerPlan,
    end_group,
    health_fault,
    join,
    start,
)


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Iterator[Home]:
    with isolated_home(None, LocalModel("tiny", model, "gguf"), load_registry()) as made:
        yield made


@pytest.fixture
def plan(home: Home, model: Path, port: int, tmp_path: Path) -> ServerPlan:
    command = (sys.executable, str(SERVER))
    return ServerPlan(
        words=server_words(command, home, port=port, kv="auto", max_seq=None, threads=None),
        environment=home.environment(None) | {"SCRIPT_FILE": str(tmp_path / "script.json")},
        folder=home.folder,
        log=tmp_path / "logs" / "serve.log",
        address=Address("127.0.0.1", port),
        model=model,
        library=home.library,
        warm_timeout_s=20.0,
        pause_s=0.05,
        poll_s=0.05,
    )


def write_script(tmp_path: Path, **fields: Any) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"replies": [{"content": "x"}], **fields}))


def changed(plan: ServerPlan, **changes: Any) -> ServerPlan:
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return ServerPlan(**(fields | changes))


def test_attempts_go_on_until_one_is_warm_and_only_its_log_counts(plan: ServerPlan, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("2")
    write_script(tmp_path, deaths=str(deaths), first_loads=3)
    said: list[str] = []
    server = start(plan, said.append)
    try:
        assert (server.attempts, len(said)) == (3, 2)
        assert all("a scripted death" in line or "Traceback" in line for line in said)
        assert plan.log.read_text().count("a scripted death") >= 2
        assert server.log is not None
        assert server.log.text() == "starting\n"
        assert server.log.fatal_line() is None
    finally:
        assert server.stop()


def test_four_deaths_are_enough_and_the_end_of_the_log_is_kept(plan: ServerPlan, tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text("9")
    write_script(tmp_path, deaths=str(tmp_path / "deaths"))
    with pytest.raises(
        NotWarmError, match=r"attempt 4: the (server ended with code 1|log says: Traceback)"
    ) as caught:
        start(plan, lambda line: None)
    assert (tmp_path / "deaths").read_text() == "5"
    assert caught.value.tail.count("Traceback") == 1


def test_a_command_line_that_is_refused_is_not_tried_again(plan: ServerPlan) -> None:
    said: list[str] = []
    words = [sys.executable, "-c", "import sys; print('no such flag'); sys.exit(2)"]
    with pytest.raises(NotWarmError, match="code 2: no such flag"):
        start(changed(plan, words=words), said.append)
    assert len(said) == 1
    with pytest.raises(NotWarmError, match="cannot be started"):
        start(changed(plan, words=["/no/such/program"]), said.append)


@pytest.mark.parametrize(
    ("health", "text"),
    [
        ({"pid": 1}, "process 1 answers, which was not started here"),
        ({"pid": None}, "process None answers"),
        ({"model": "other"}, "the model is 'other', not tiny.gguf"),
    ],
)
def test_a_server_that_cannot_be_proven_right_is_no_server(
    plan: ServerPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: Mapping[str, Any], text: str
) -> None:
    monkeypatch.setattr("hipfire.validate.harness_server.ATTEMPTS", 1)
    write_script(tmp_path, health=health)
    said: list[str] = []
    with pytest.raises(NotWarmError, match="not warm after 1 s"):
        start(changed(plan, warm_timeout_s=1), said.append)
    assert text in said[-1]


def test_a_taken_port_is_never_used(plan: ServerPlan) -> None:
    with socket.create_server((plan.address.host, plan.address.port)):
        with pytest.raises(NotWarmError, match=f"port {plan.address.port} cannot be used"):
            start(plan, lambda line: None)
        assert not plan.log.exists()


def test_an_interrupted_start_leaves_no_process(
    plan: ServerPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path, child=str(tmp_path / "child"), health={"model": None})
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        return started[-1]

    def stop_waiting(seconds: float) -> None:
        if (tmp_path / "child").exists() and seconds == plan.poll_s:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(time, "sleep", stop_waiting)
    with pytest.raises(KeyboardInterrupt):
        start(plan, lambda line: None)
    assert started[0].poll() is not None
    assert is_over(int((tmp_path / "child").read_text()))


def test_a_second_ctrl_c_kills_what_the_first_one_was_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    words = [sys.executable, "-c", f"{code}; time.sleep(300)"]

    def interrupted(seconds: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        monkeypatch.setattr(time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            end_group(stubborn)
        assert stubborn.wait(10) == -signal.SIGKILL


def test_a_group_that_ignores_the_gentle_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hipfire.validate.harness_server.END_TIMEOUT_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    words = [sys.executable, "-c", f"{code}; time.sleep(300)"]
    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        assert end_group(stubborn)
        assert stubborn.returncode == -signal.SIGKILL


def test_a_running_server_must_have_the_model_too(plan: ServerPlan) -> None:
    with pytest.raises(NotWarmError, match="/health does not answer"):
        join(plan)


def test_health_is_judged_by_the_file_that_a_name_means(plan: ServerPlan, home: Home, model: Path) -> None:
    good: dict[str, Any] = {"status": "ok", "loading_model": None}
    for name in ("tiny", "tiny.gguf", str(model), str(home.folder / "models" / "tiny.gguf")):
        assert health_fault(good | {"model": name}, plan) is None, name
    other = model.with_name("other.gguf")
    other.write_bytes(b"")
    for name in (str(other), "tin", "smollm2:135m", "../tiny.gguf", "\0"):
        assert health_fault(good | {"model": name}, plan) is not None, name
    good["model"] = "tiny"
    assert health_fault(None, plan) == "/health does not answer"
    assert health_fault(good | {"loading_model": "tiny"}, plan) == "no model is loaded yet"
    assert health_fault(good | {"model": None}, plan) == "no model is loaded yet"
    assert health_fault(good | {"status": "restarting"}, plan) == "/health says 'restarting'"


def test_log_slices_begin_where_they_should(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert LogSlice(path, 0).text() == ""
    path.write_bytes(b"MemoryError\n" + b"fine \xff\n" * 50)
    assert LogSlice(path, 0).fatal_line() == "MemoryError"
    assert LogSlice(path, 12).fatal_line() is None
    assert LogSlice(path, 12).tail() == "\n".join(["fine \ufffd"] * 40)


def test_the_isolated_home_holds_the_model_and_no_variable_of_the_user(
    home: Home, model: Path, tmp_path: Path
) -> None:
    outer = {
        **{"HIPFIRE_KV_MODE": "f32", "HIPFIRE_MODELS_DIR": "/m", "HIPFIRE_KERNEL_CACHE": "/k"},
        **{"PATH": "/bin", "PYTHONPATH": "/p"},
    }
    seen = home.environment(tmp_path / "r.json", outer)
    assert {name for name in seen if name.startswith("HIPFIRE_")} == {
        *("HIPFIRE_HOME", "HIPFIRE_KERNEL_CACHE", "HIPFIRE_REGISTRY_FILE")
    }
    assert (seen["HIPFIRE_HOME"], seen["PATH"]) == (str(home.folder), "/bin")
    assert seen["PYTHONPATH"].endswith(os.pathsep + "/p")
    assert home.model.path.resolve() == model.resolve()
    assert home.model.path.parent == home.folder / "models"
    assert [found.name for found in home.library.scan()] == ["tiny"]


def test_a_temporary_home_goes_and_a_split_model_is_linked_whole(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"x")
    library = Library(tmp_path, load_registry())
    with isolated_home(None, library.require("m-00002-of-00002.gguf"), load_registry()) as made:
        assert len(list((made.folder / "models").iterdir())) == 2
        assert made.model.path.name == "m-00001-of-00002.gguf"
        folder = made.folder
    assert not folder.exists()


def test_a_chosen_home_of_somebody_else_is_refused(tmp_path: Path, model: Path) -> None:
    local = LocalModel("tiny", model, "gguf")
    with (
        pytest.raises(ValidationError, match="files that the harness did not make"),
        isolated_home(tmp_path, local, load_registry()),
    ):
        pass
    assert model.exists()
    with isolated_home(tmp_path / "own", local, load_registry()):
        pass
    (tmp_path / "own" / "models" / "mine").write_text("")
    with (
        pytest.raises(ValidationError, match="is no link that the harness made"),
        isolated_home(tmp_path / "own", local, load_registry()),
    ):
        pass
