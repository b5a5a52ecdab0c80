"""`hipfire chat`: what is sent in each turn, slash commands, Ctrl-C in a terminal, and drawn Markdown."""

from __future__ import annotations

import io
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_kit import one_line
from scripted_service import Script, fault, reply, role, serving, text
from terminal import CTRL_C, CTRL_D, Terminal

from hipfire.base.errors import ValidationError
from hipfire.cli import chat as chat_module
from hipfire.cli.chat_session import Session
from hipfire.cli.chat_view import PlainView
from hipfire.cli.main import main
from hipfire.cli.remote import Health, Remote
from hipfire.cli.remote_wire import Address

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def server(home: Path, tiny: bytes, monkeypatch: Patch) -> Iterator[Script]:
    (home / "models").mkdir(parents=True)
    (home / "models" / "Tiny.gguf").write_bytes(tiny)
    with serving(Script()) as script:
        monkeypatch.setenv("HIPFIRE_PORT", str(script.port))
        yield script


def talk(monkeypatch: Patch, lines: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *words])


def turns(script: Script) -> list[list[tuple[str, str]]]:
    """Return the messages of each request as (role, content)."""
    return [[(each["role"], each["content"]) for each in body["messages"]] for body in script.bodies]


def test_a_conversation_grows_by_what_was_said(server: Script, monkeypatch: Patch, capsys: Output) -> None:
    server.replies = [reply("Hi ", "there", thoughts=["greet"]), reply("Bye")]
    assert talk(monkeypatch, "hello\n\nsee  you \n", "tiny", "--system", "Be kind.", "-t", "0") == 0
    shown = capsys.readouterr()
    assert shown.out == "Hi there\nBye\n"
    assert "greet" not in shown.err
    assert turns(server) == [
        [("system", "Be kind."), ("user", "hello")],
        [("system", "Be kind."), ("user", "hello"), ("assistant", "Hi there"), ("user", "see  you")],
    ]
    assert server.bodies[1]["messages"][2]["reasoning_content"] == "greet"
    assert [(body["model"], body["temperature"]) for body in server.bodies] == [("tiny:1m", 0.0)] * 2


def test_a_backslash_continues_a_message(server: Script, monkeypatch: Patch) -> None:
    assert talk(monkeypatch, "one\\\ntwo\\\n", "tiny") == 0
    assert turns(server) == [[("user", "one\ntwo")]]


def test_clear_keeps_the_system_message(server: Script, monkeypatch: Patch, capsys: Output) -> None:
    lines = "a\n/clear\nb\n/system New rules.\n/system\nc\n/exit\nnever sent\n"
    assert talk(monkeypatch, lines, "tiny", "--system", "Old rules.") == 0
    assert turns(server)[1:] == [
        [("system", "Old rules."), ("user", "b")],
        [("system", "New rules."), ("user", "b"), ("assistant", "Hello world"), ("user", "c")],
    ]
    assert "New rules.\n" in capsys.readouterr().out


def test_stats_count_all_turns(server: Script, monkeypatch: Patch, capsys: Output) -> None:
    assert talk(monkeypatch, "a\nb\n/stats\n", "tiny") == 0
    shown = capsys.readouterr().out
    assert f"tiny:1m at 127.0.0.1:{server.port}\n" in shown
    assert "2 turns, 6 tokens drawn, 8 read from the cache\n" in shown
    assert "13 tokens in the context after the last turn [3 tok, 12.5 tok/s" in shown


def test_save_writes_the_conversation_and_overwrites_nothing(
    server: Script, monkeypatch: Patch, tmp_path: Path, capsys: Output
) -> None:
    assert talk(monkeypatch, f"a\n/save {tmp_path}/t.json\n/save {tmp_path}/t.md\n", "tiny") == 0
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hello world"}]
    assert json.loads((tmp_path / "t.json").read_text()) == {"model": "tiny:1m", "messages": messages}
    assert (tmp_path / "t.md").read_text() == "## user\n\na\n\n## assistant\n\nHello world\n"
    capsys.readouterr()
    assert talk(monkeypatch, f"/save {tmp_path}/t.md\n", "tiny") == 1
    one_line(capsys.readouterr(), "t.md exists already")
    assert (tmp_path / "t.md").read_text().startswith("## user")


def test_what_cannot_be_saved_whole_leaves_no_file(server: Script, tmp_path: Path) -> None:
    session = session_with(server)
    session.messages = [{"role": "user", "content": "x" * 4096}]
    path = tmp_path / "t.md"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, usual[1]))
    try:
        with pytest.raises(ValidationError, match="cannot be written"):
            session.command(f"/save {path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not path.exists()
    session.command(f"/save {path}")
    assert path.stat().st_size > 4096


def test_help_lists_every_command(server: Script, monkeypatch: Patch, capsys: Output) -> None:
    assert talk(monkeypatch, "/help\n/quit\n", "tiny") == 0
    shown = capsys.readouterr().out
    assert all(f"/{name}" in shown for name in ("clear", "system", "stats", "save", "help", "exit", "quit"))


@pytest.mark.parametrize(
    ("lines", "plan", "part"),
    [
        ("/nonsense\n", None, "no command /nonsense"),
        ("/save\n", None, "/save needs"),
        ("a\n", [role(), fault("the engine is gone")], "the engine is gone"),
        ("a\n", (400, {}, {"error": {"message": "too long"}}), "too long"),
    ],
)
def test_an_error_ends_a_script(
    server: Script, monkeypatch: Patch, capsys: Output, lines: str, plan: Any, part: str
) -> None:
    server.replies = [plan]
    assert talk(monkeypatch, lines, "tiny") == 1
    one_line(capsys.readouterr(), part)


def session_with(script: Script) -> Session:
    remote = Remote(Address("127.0.0.1", script.port))
    return Session(remote, "tiny:1m", {}, lambda: PlainView(reasoning=False))


def test_a_failed_turn_leaves_no_trace(server: Script, capsys: Output) -> None:
    server.replies = [[role(), text("half an ans"), "DROP"], reply("Fine")]
    session = session_with(server)
    assert session.carry_out("first")
    assert capsys.readouterr().out == "half an ans\n"
    assert session.carry_out("second")
    assert turns(server) == [[("user", "first")], [("user", "second")]]


@pytest.mark.parametrize(
    ("models", "loaded", "setting", "chosen"),
    [
        (["one", "two"], "two", "one", "two"),
        (["one", "two"], None, "one", "one"),
        (["only"], None, None, "only"),
    ],
)
def test_the_usual_model_is_found(
    server: Script,
    monkeypatch: Patch,
    models: list[str],
    loaded: str | None,
    setting: str | None,
    chosen: str,
) -> None:
    server.models, server.health["model"] = models, loaded
    if setting is not None:
        monkeypatch.setenv("HIPFIRE_MODEL", setting)
    assert talk(monkeypatch, "a\n") == 0
    assert server.bodies[0]["model"] == chosen


def test_a_model_that_is_being_loaded_is_the_usual_one(server: Script, monkeypatch: Patch) -> None:
    server.models = ["one", "two"]
    server.health["loading_model"] = "two"
    assert talk(monkeypatch, "a\n") == 0
    assert server.bodies[0]["model"] == "two"


def test_without_a_usual_model_the_choice_is_shown(
    server: Script, monkeypatch: Patch, capsys: Output
) -> None:
    server.models = ["one", "two"]
    assert talk(monkeypatch, "a\n") == 1
    one_line(capsys.readouterr(), "say which model", "one, two")


def test_a_server_is_started_if_none_is_up(server: Script, monkeypatch: Patch, capsys: Output) -> None:
    started = []
    remote, port = Remote(Address("127.0.0.1", server.port)), server.port
    assert main(["chat", "tiny", "--device", "cpu"]) == 1
    assert "hipfire restart --device cpu" in capsys.readouterr().err
    monkeypatch.setenv("HIPFIRE_PORT", "1")

    def start(target: Any, flags: Any) -> Health | None:
        started.append((target.model, flags.words()))
        monkeypatch.setenv("HIPFIRE_PORT", str(port))
        return remote.health()

    monkeypatch.setattr(chat_module, "start_detached", start)
    monkeypatch.setattr(chat_module, "connect", lambda *_: remote)
    assert talk(monkeypatch, "a\n", "--device", "gpu:1") == 0
    assert started == [("tiny:1m", ["--device=gpu:1"])]
    assert capsys.readouterr().out == "Hello world\n"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(server: Script) -> None:
    server.replies = [[role(), text("one two"), "HANG"], reply("done")]
    with Terminal("chat", "tiny") as terminal:
        terminal.expect("you> ")
        terminal.type("count\n")
        terminal.expect("one two")
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        assert server.left.wait(5)
        terminal.expect("you> ")
        terminal.type("more\n")
        terminal.expect("done")
        terminal.expect("you> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert turns(server)[1] == [("user", "count"), ("assistant", "one two"), ("user", "more")]


def test_ctrl_c_before_an_answer_takes_the_turn_back(server: Script) -> None:
    server.replies = [[role(), "HANG"], reply("done")]
    with Terminal("chat", "tiny") as terminal:
        terminal.expect("you> ")
        terminal.type("first\n")
        while not server.bodies:
            time.sleep(0.01)
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        terminal.type("second\n")
        terminal.expect("done")
    assert turns(server)[1] == [("user", "second")]


def test_ctrl_c_before_a_turn_is_sent_is_no_end_of_the_chat(server: Script, capsys: Output) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    session = session_with(server)
    session.make_view = interrupted
    assert session.carry_out("hello")
    assert (session.messages, server.bodies) == ([], [])
    assert capsys.readouterr().err == "hipfire: stopped\n"
    session.keeps_going = False
    with pytest.raises(KeyboardInterrupt):
        session.carry_out("hello")


def test_ctrl_c_at_the_prompt_hints_and_a_second_one_leaves(server: Script) -> None:
    with Terminal("chat", "tiny") as terminal:
        terminal.expect("you> ")
        terminal.press_ctrl_c()
        terminal.expect("press Ctrl-C again to leave")
        terminal.expect("you> ")
        # a message in between starts the count again
        terminal.type("hello\n")
        terminal.expect("Hello world")
        terminal.expect("you> ")
        terminal.press_ctrl_c()
        terminal.expect("press Ctrl-C again to leave")
        terminal.expect("you> ")
        terminal.press_ctrl_c()
        assert terminal.end() == 130
    assert "Traceback" not in terminal.shown


def test_a_terminal_shows_markdown_drawn_and_reasoning_dimmed(server: Script) -> None:
    server.replies = [reply("# Ti", "tle\n\nSome **bo", "ld** text\x07.\n", thoughts=["let me see"])]
    with Terminal("chat", "tiny") as terminal:
        terminal.expect("you> ")
        terminal.type("x\n")
        terminal.expect("\x1b[2mlet me see\x1b[0m")
        terminal.expect("Title")
        terminal.expect("you> ")
    answer = terminal.shown.partition("let me see")[2]
    assert "**bold**" not in answer
    assert "\x1b[1mbold\x1b[0m" in answer
    assert "\x07" not in answer


def test_plain_text_on_request(server: Script) -> None:
    server.replies = [reply("**bold**")]
    with Terminal("chat", "tiny", "--no-color") as terminal:
        terminal.expect("you> ")
        terminal.type("x\n")
        terminal.expect("**bold**")
