"""`hipfire ps`: what runs, with or without an answer, for people and for programs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from scripted_service import PID, Script, serving
from stand_in_kit import free_port, other_program, stand_in

from hipfire.cli.main import main
from hipfire.engine.lock import ProcessRecord, start_time, write_pid_file
from tiny_models import tiny_model, write_folder

Output = pytest.CaptureFixture[str]


def shown_json(capsys: Output) -> dict[str, object]:
    assert main(["ps", "-j"]) == 0
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


def test_nothing_runs(home: Path, capsys: Output) -> None:
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no server is running\n"
    assert shown_json(capsys) == {"server": None, "daemon": None}


def test_a_server_that_answers(home: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.health |= {"model": "tiny:1m"}
    with serving(script):
        monkeypatch.setenv("HIPFIRE_PORT", str(script.port))
        assert main(["ps"]) == 0
        assert capsys.readouterr().out.splitlines()[:4] == [
            f"server: 127.0.0.1:{script.port}, process {PID}, ok (not started from this home)",
            "model: tiny:1m",
            "requests: 5 served, 1 running, 0 waiting",
            "up for: 1 h 2 min",
        ]
        script.health |= {"model": None, "loading_model": "tiny:1m", "status": "restarting"}
        assert main(["ps"]) == 0
        assert "restarting" in (lines := capsys.readouterr().out.splitlines())[0]
        assert lines[1] == "model: loading tiny:1m"


def test_a_server_at_another_port_is_found_by_its_record(home: Path, capsys: Output) -> None:
    home.mkdir()
    port = free_port()
    with stand_in("polite", port) as process:
        server = shown_json(capsys)["server"]
    assert isinstance(server, dict)
    assert (server["pid"], server["address"], server["tracked"]) == (process.pid, f"127.0.0.1:{port}", True)
    assert server["memory_bytes"] > 2**20
    # the stand-in has no figures
    assert server["stats"] is None


def test_a_server_that_does_not_answer_is_told_apart(home: Path, capsys: Output) -> None:
    home.mkdir()
    with stand_in("polite", free_port()) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert main(["ps"]) == 0
        assert f"process {process.pid}, no answer" in capsys.readouterr().out


def test_a_record_of_another_program_is_not_shown(home: Path, capsys: Output) -> None:
    home.mkdir()
    with other_program() as other:
        fields = (other.pid, (start_time(other.pid) or 0) - 1, free_port(), "t")
        write_pid_file(home / "serve.pid", ProcessRecord(*fields))
        write_pid_file(home / "daemon.pid", ProcessRecord(*fields))
        assert shown_json(capsys) == {"server": None, "daemon": None}


def test_the_engine_is_shown(home: Path, capsys: Output) -> None:
    home.mkdir()
    with other_program("hipfire.engine.daemon") as engine:
        record = ProcessRecord(engine.pid, start_time(engine.pid), None, None)
        write_pid_file(home / "daemon.pid", record)
        assert main(["ps"]) == 0
        assert capsys.readouterr().out.startswith(f"engine: process {engine.pid}\nmemory: ")
    assert shown_json(capsys)["daemon"] is None


def test_diag_names_the_server(home: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    # asking torch for GPUs takes seconds
    monkeypatch.setattr("hipfire.cli.host.gpu_facts", list)
    assert main(["diag"]) == 0
    assert "\nserver: none\n" in capsys.readouterr().out
    with serving(Script()) as script:
        monkeypatch.setenv("HIPFIRE_PORT", str(script.port))
        assert main(["diag", "-j"]) == 0
        server = json.loads(capsys.readouterr().out)["server"]
    expected = {"address": f"127.0.0.1:{script.port}", "pid": PID, "status": "ok", "model": None}
    assert server == expected


def test_bench_warns_of_a_server(
    home: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "Tiny", tiny_model("llama"))
    few = ["--pp", "4", "--tg", "1", "--runs", "1", "--warmups", "0", "-n", "2", "-j"]
    with serving(Script()) as script:
        monkeypatch.setenv("HIPFIRE_PORT", str(script.port))
        assert main(["bench", str(folder), "x", *few]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [line for line in warnings if f"127.0.0.1:{script.port}" in line]
