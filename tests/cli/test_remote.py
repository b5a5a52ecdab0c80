"""The client of a server: streams however they are cut, errors in one line, and nothing through a proxy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_service import Script, fault, finish, reply, role, serving, text, thought, usage

from hipfire.cli.remote import Remote, Reply
from hipfire.cli.remote_wire import Address, FailedError, RefusedError, sse_events

BODY = {"model": "tiny:1m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = (
    ': keepalive\r\n\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata:three\n\ndata: cut'
)


def remote_of(script: Script, **options: Any) -> Remote:
    return Remote(Address("127.0.0.1", script.port), **options)


def read(script: Script) -> tuple[list[tuple[str, str]], Reply]:
    with serving(script), remote_of(script).chat(BODY) as got:
        return [tuple(piece) for piece in got], got


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=8))
def test_events_are_the_same_however_the_stream_is_cut(places: list[int]) -> None:
    data, cuts = STREAM.encode(), sorted(places)
    chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert list(sse_events(chunks)) == ['{"a": "é"}', "one\ntwo", "three"]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_reply_keeps_reasoning_and_answer_apart(chunked: bool) -> None:
    events = [
        role(),
        ": keepalive",
        thought("hm"),
        thought("m"),
        text("Yes"),
        text("é."),
        finish(),
        usage(),
        "[DONE]",
    ]
    pieces, got = read(Script(replies=[events], chunked=chunked))
    assert pieces == [("reasoning", "hm"), ("reasoning", "m"), ("answer", "Yes"), ("answer", "é.")]
    assert (got.answer, got.reasoning, got.finish) == ("Yesé.", "hmm", "stop")
    assert got.usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert got.timings["decode_tok_s"] == 12.5
    assert got.extra["seed"] == 7


def test_a_chunk_with_figures_only_is_not_the_end() -> None:
    pieces, got = read(Script(replies=[[usage(), role(), text("a"), usage(), text("b"), finish(), "[DONE]"]]))
    assert [piece[1] for piece in pieces] == ["a", "b"]
    assert got.finish == "stop"


@pytest.mark.parametrize(
    "events", [[role(), text("half")], [role(), text("half"), "DROP"], [text("half"), finish()]]
)
@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_that_ends_before_it_is_done_is_an_error(events: list[str], chunked: bool) -> None:
    script = Script(replies=[events], chunked=chunked)
    with serving(script), remote_of(script).chat(BODY) as got:
        pieces = iter(got)
        assert next(pieces).text == "half"
        with pytest.raises(FailedError, match=f"127.0.0.1:{script.port}") as caught:
            next(pieces)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "error"), [("server_error", FailedError), ("invalid_request_error", RefusedError)]
)
def test_an_error_in_the_stream_is_raised_as_such(kind: str, error: type[Exception]) -> None:
    script = Script(replies=[[role(), text("x"), fault("the engine\nis gone", kind), "[DONE]"]])
    with (
        serving(script),
        remote_of(script).chat(BODY) as got,
        pytest.raises(error, match="the engine is gone"),
    ):
        list(got)


@pytest.mark.parametrize(
    ("status", "error", "parts"),
    [
        (400, RefusedError, ["top_p is 7"]),
        (401, RefusedError, ["top_p is 7", "serve.token_file"]),
        (404, RefusedError, ["top_p is 7"]),
        (413, RefusedError, ["top_p is 7"]),
        (500, FailedError, ["top_p is 7", "failed"]),
        (503, FailedError, ["top_p is 7", "try again in 9 s"]),
    ],
)
def test_a_status_becomes_an_error_with_the_servers_words(
    status: int, error: type[Exception], parts: list[str]
) -> None:
    body = {
        "error": {
            "message": "top_p is 7",
            "type": "server_error" if status >= 500 else "invalid_request_error",
        }
    }
    script = Script(replies=[(status, {"Retry-After": "9"}, body)])
    with serving(script), pytest.raises(error) as caught:
        remote_of(script).chat(BODY)
    line = str(caught.value)
    assert all(part in line for part in parts), line
    assert "\n" not in line


@pytest.mark.parametrize(
    "answer",
    [(502, {"Content-Type": "text/html"}, "<html>\n<b>bad gateway</b>"), (200, {}, "{}"), (302, {}, "x")],
)
def test_an_answer_that_is_no_stream_is_one_line(answer: Any) -> None:
    script = Script(replies=[answer])
    with serving(script), pytest.raises(FailedError) as caught:
        remote_of(script).chat(BODY)
    assert "\n" not in caught.value.line()
    assert str(script.port) in caught.value.line()


@pytest.mark.parametrize("health", ["<html>", [1], {"ok": True}, {"status": 3, "pid": 1}])
def test_another_program_is_not_taken_for_a_server(health: Any) -> None:
    script = Script(health=health)
    with serving(script):
        assert remote_of(script).health() is None


def test_nobody_there_is_no_server_and_an_error_for_a_request() -> None:
    script = Script()
    with serving(script):
        pass
    assert remote_of(script).health() is None
    with pytest.raises(FailedError, match=r"connection refused.*hipfire ps"):
        remote_of(script).models()


def test_proxies_and_stored_passwords_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    script = Script()
    with serving(script):
        remote = remote_of(script)
        assert remote.health() is not None
        assert remote.models() == ["tiny:1m"]
        with remote.chat(BODY) as got:
            assert "".join(piece.text for piece in got) == "Hello world"
    assert not any("Authorization" in headers for headers in script.headers)


def test_the_token_is_shown_with_every_request_but_that_for_health() -> None:
    script = Script()
    with serving(script):
        remote = remote_of(script, token="a-secret")
        assert remote.health() is not None
        remote.models()
        with remote.complete({"model": "x", "prompt": "y"}) as got:
            list(got)
    assert [headers.get("Authorization") for headers in script.headers] == [None, *["Bearer a-secret"] * 2]


def test_leaving_early_closes_the_connection() -> None:
    script = Script(replies=[[role(), text("one"), "HANG"]])
    with serving(script):
        with remote_of(script).chat(BODY) as got:
            assert next(iter(got)).text == "one"
        assert script.left.wait(5)


def test_a_complete_reply_is_read_to_the_end_of_its_body() -> None:
    script = Script(replies=[[*reply("x"), "LINGER"]])
    pieces, _ = read(script)
    assert pieces == [("answer", "x")]
    assert not script.left.is_set()


def test_requests_ask_for_a_stream_with_its_usage() -> None:
    script = Script(replies=[reply("x")])
    read(script)
    assert script.bodies == [{**BODY, "stream": True, "stream_options": {"include_usage": True}}]


def test_text_completions_have_their_text_elsewhere() -> None:
    chunk = {"choices": [{"index": 0, "text": "tail", "finish_reason": None}]}
    script = Script(replies=[[json.dumps(chunk), finish("length"), "[DONE]"]])
    with serving(script), remote_of(script).complete({"model": "x", "prompt": "y"}) as got:
        assert [piece.text for piece in got] == ["tail"]
    assert got.finish == "length"
    assert script.asked[0][0] == "/v1/completions"


@pytest.mark.parametrize(
    ("host", "base"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box.lan", "http://box.lan:80"),
    ],
)
def test_an_address_for_all_is_reached_on_this_machine(host: str, base: str) -> None:
    assert Address(host, 80).base == base
