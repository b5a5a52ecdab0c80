"""`hipfire run` while a server is up: who answers, what is sent, and where reasoning goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from run_kit import one_line
from scripted_service import Script, fault, reply, role, serving, text, thought

from hipfire.cli import run as run_module
from hipfire.cli.main import main

Output = pytest.CaptureFixture[str]
PROGRAM = [sys.executable, "-c", "import sys; from hipfire.cli.main import main; sys.exit(main())"]


class LoadedHereError(Exception):
    """The command began to load the model in its own process."""


@pytest.fixture
def server(home: Path, tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """A server at the configured port, and an installed model that must not be loaded here."""

    def load(*_: object, **__: object) -> NoReturn:
        raise LoadedHereError

    monkeypatch.setattr(run_module, "load_llm", load)
    (home / "models").mkdir(parents=True)
    (home / "models" / "Tiny.gguf").write_bytes(tiny)
    with serving(Script()) as script:
        monkeypatch.setenv("HIPFIRE_PORT", str(script.port))
        yield script


def sent(script: Script) -> dict[str, Any]:
    """Return the only request's fields without those that ask for a stream."""
    (body,) = script.bodies
    return {name: value for name, value in body.items() if not name.startswith("stream")}


def test_the_server_answers_and_nothing_is_loaded_here(server: Script, capsys: Output) -> None:
    server.replies = [reply("Hel", "lo", thoughts=["secret plan"])]
    assert main(["run", "tiny", "say", "hello"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello\n"
    assert "secret plan" not in shown.err
    assert shown.err.splitlines()[-1] == (
        f"hipfire: [3 tok, 12.5 tok/s; prompt 10 tok, 4 cached; stop; via 127.0.0.1:{server.port}]"
    )
    # the card recommends a temperature; built-in defaults are left to the server
    assert sent(server) == {
        "model": "tiny:1m",
        "messages": [{"role": "user", "content": "say hello"}],
        "temperature": 0.5,
    }


def test_reasoning_goes_to_stderr_on_request_and_never_to_stdout(server: Script, capsys: Output) -> None:
    server.replies = [reply("42", thoughts=["6 ", "times 7"])]
    assert main(["run", "tiny", "x", "--reasoning"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "42\n"
    assert shown.err.startswith("6 times 7\n")
    assert "\x1b" not in shown.err


def test_json_keeps_both_channels_and_the_figures(server: Script, capsys: Output) -> None:
    server.replies = [reply("4", "2", thoughts=["hm"], reason="length")]
    assert main(["run", "tiny", "x", "-j"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "content": "42",
        "reasoning": "hm",
        "tokens": 3,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "tok_s": 12.5,
        "prefill_s": 0.25,
        "finish_reason": "length",
        "seed": 7,
        "server": f"127.0.0.1:{server.port}",
    }


def test_no_stream_prints_the_same_text(server: Script, capsys: Output) -> None:
    assert main(["run", "tiny", "x", "--no-stream"]) == 0
    assert capsys.readouterr().out == "Hello world\n"


def test_what_was_chosen_is_sent(server: Script, home: Path, capsys: Output) -> None:
    (home / "config.toml").write_text("[generation]\ntop_p = 0.5\n[prompt]\nsystem = 'Be brief.'\n")
    (home / "models.toml").write_text('[models."tiny:1m".generation]\ntop_k = 9\n')
    words = ["-t", "0", "-n", "17", "--seed", "5", "--stop", "END", "--stop", "###", "a  b\r\n"]
    assert main(["run", "tiny", *words]) == 0
    assert sent(server) == {
        "model": "tiny:1m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a  b\n"}],
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 9,
        "max_tokens": 17,
        "seed": 5,
        "stop": ["END", "###"],
    }


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--thinking", "on"], {"chat_template_kwargs": {"enable_thinking": True}}),
        (["--thinking", "off"], {"chat_template_kwargs": {"enable_thinking": False}}),
        (["--reasoning-effort", "none"], {"chat_template_kwargs": {"enable_thinking": False}}),
        (["--reasoning-effort", "high"], {"reasoning_effort": "high"}),
        (["--max-think-tokens", "0"], {"max_think_tokens": 0}),
        # off wins and drops the other two
        (
            ["--thinking", "off", "--reasoning-effort", "high", "--max-think-tokens", "9"],
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        (["--thinking", "auto"], {}),
    ],
)
def test_the_three_axes_of_thinking_are_sent(
    server: Script, words: list[str], fields: dict[str, Any]
) -> None:
    assert main(["run", "tiny", "x", *words]) == 0
    plain = {"model", "messages", "temperature"}
    assert {name: value for name, value in sent(server).items() if name not in plain} == fields


@pytest.mark.parametrize(
    ("budget", "number", "cap"),
    [("low", None, 512), ("med", None, 2048), ("max", None, 32768), ("uncapped", None, 0), ("low", 7, 7)],
)
def test_a_named_budget_stands_for_tokens_and_a_number_wins(
    server: Script, monkeypatch: pytest.MonkeyPatch, budget: str, number: int | None, cap: int
) -> None:
    monkeypatch.setenv("HIPFIRE_THINKING_BUDGET", budget)
    if number is not None:
        monkeypatch.setenv("HIPFIRE_MAX_THINK_TOKENS", str(number))
    assert main(["run", "tiny", "x"]) == 0
    assert sent(server)["max_think_tokens"] == cap


def test_raw_text_is_continued_without_messages(server: Script, capsys: Output) -> None:
    assert main(["run", "tiny", "Once  upon ", "--raw", "--thinking", "on"]) == 0
    assert server.asked[-1][0] == "/v1/completions"
    assert sent(server) == {"model": "tiny:1m", "prompt": "Once  upon ", "temperature": 0.5}


@pytest.mark.parametrize(
    "words",
    [
        ["--local"],
        ["--kv-mode", "q8"],
        ["--max-seq", "1024"],
        ["--threads", "1"],
        ["--device", "cpu"],
        ["--kv-backend", "vmm"],
    ],
)
def test_flags_about_loading_keep_the_work_here(server: Script, words: list[str], capsys: Output) -> None:
    assert main(["run", "tiny", "x", *words]) == 1
    assert "LoadedHereError" in capsys.readouterr().err
    assert server.asked == []


def test_the_setting_keeps_the_work_here(
    server: Script, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("HIPFIRE_LOCAL", "1")
    assert main(["run", "tiny", "x"]) == 1
    assert "LoadedHereError" in capsys.readouterr().err
    assert server.asked == []


def test_thinking_cannot_be_chosen_for_a_model_loaded_here(server: Script, capsys: Output) -> None:
    assert main(["run", "tiny", "x", "--local", "--thinking", "off"]) == 1
    one_line(capsys.readouterr(), "thinking", "hipfire serve")


def test_a_file_that_the_server_does_not_offer_is_loaded_here(
    server: Script, tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "Other.gguf"
    path.write_bytes(b"GGUF")
    assert main(["run", str(path), "x"]) == 1
    shown = capsys.readouterr().err
    assert f"the server at 127.0.0.1:{server.port} does not offer {path}" in shown
    assert "LoadedHereError" in shown
    assert server.bodies == []


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ((503, {"Retry-After": "2"}, {"error": {"message": "the queue is full"}}), ["queue is full", "2 s"]),
        ((400, {}, {"error": {"message": "top_k is 0"}}), ["top_k is 0"]),
        ([role(), fault("the engine is gone")], ["the engine is gone"]),
    ],
)
def test_a_failing_server_ends_the_command_and_no_second_copy_is_loaded(
    server: Script, plan: Any, parts: list[str], capsys: Output
) -> None:
    server.replies = [plan]
    assert main(["run", "tiny", "x"]) == 1
    one_line(capsys.readouterr(), *parts)


def test_a_broken_stream_shows_what_came_and_fails(server: Script, capsys: Output) -> None:
    server.replies = [[role(), text("The answ"), "DROP"]]
    assert main(["run", "tiny", "x"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "The answ\n"
    assert shown.err.startswith("hipfire: ")
    assert shown.err.count("\n") == 1


def test_an_error_in_the_stream_ends_reasoning_and_answer_on_their_own_lines(
    server: Script, capsys: Output
) -> None:
    server.replies = [[role(), thought("hm"), fault("no", "invalid_request_error")]]
    assert main(["run", "tiny", "x", "--reasoning"]) == 1
    assert capsys.readouterr().err == "hm\nhipfire: no\n"
    server.replies = [[role(), text("The answ"), fault("no", "invalid_request_error")]]
    assert main(["run", "tiny", "x"]) == 1
    assert capsys.readouterr().out == "The answ\n"


def test_a_prompt_that_is_no_text_is_refused_before_it_is_sent(server: Script, capsys: Output) -> None:
    assert main(["run", "tiny", "x", "\udcff"]) == 1
    one_line(capsys.readouterr(), "the prompt is not valid UTF-8 text")
    assert server.bodies == []


def test_warnings_of_the_server_are_shown(server: Script, capsys: Output) -> None:
    server.replies = [reply("x", config_warnings=["effort is not for this model"])]
    assert main(["run", "tiny", "x"]) == 0
    assert "hipfire: warning: effort is not for this model\n" in capsys.readouterr().err


def test_a_token_file_opens_a_locked_server(
    server: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    monkeypatch.setenv("HIPFIRE_SERVE_TOKEN_FILE", str(tmp_path / "token"))
    assert main(["run", "tiny", "x"]) == 0
    assert server.headers[-1]["Authorization"] == "Bearer 0123456789abcdef"


def test_ctrl_c_stops_the_server_too(server: Script) -> None:
    server.replies = [[role(), text("endless"), "HANG"]]
    process = subprocess.Popen(
        [*PROGRAM, "run", "tiny", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(7) == b"endless"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == b"\n"
    assert err == b"hipfire: interrupted\n"
    assert server.left.wait(5)
