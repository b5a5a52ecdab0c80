"""Text from files cannot steer a terminal, on whichever way it gets there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipfire.base import log
from hipfire.base.printable import one_line, printable
from hipfire.cli.output import write_fields, write_json, write_table

HOSTILE = "a\x1b[31m\x07\x9b\x7f\u202e\nb"
SHOWN = "a\\x1b[31m\\x07\\x9b\\x7f\\u202e\\nb"


def test_escapes_and_what_stays() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("\ud800") == "\\ud800"
    assert printable("two  spaces модель é 漢字 🎉 \\x") == "two  spaces модель é 漢字 🎉 \\x"
    assert one_line(" two \n lines\x1b ") == "two lines\\x1b"


@given(st.text())
def test_everything_becomes_printable(text: str) -> None:
    assert printable(text).isprintable()
    assert one_line(text).isprintable()


def test_tables_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("NAME", "N"), [(HOSTILE, "1"), ("b", "2")])
    lines = capsys.readouterr().out.split("\n")
    assert lines == [f"{'NAME':<{len(SHOWN)}}  N", f"{SHOWN}  1", f"{'b':<{len(SHOWN)}}  2", ""]
    write_fields({HOSTILE: HOSTILE, "list": [HOSTILE], f"{HOSTILE}2": []})
    assert capsys.readouterr().out.split("\n") == [
        f"{SHOWN}: {SHOWN}", "list:", f"  {SHOWN}", f"{SHOWN}2: none", "",
    ]  # fmt: skip


def test_json_keeps_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: [HOSTILE, "漢字", "\ud800", "\U000e0001"]}
    write_json(value)
    text = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "漢字" in text
    assert json.loads(text) == value


def test_notices(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    log.logger().warning(f"x {HOSTILE}")
    assert capsys.readouterr().err == f"hipfire: warning: x {SHOWN.replace(chr(92) + 'n', ' ')}\n"


def test_a_notice_of_an_unforeseen_error_shows_where_it_arose(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError as error:
        log.logger().error("turn 7 failed", exc_info=error)
    first, *trace = capsys.readouterr().err.splitlines()
    assert first == "hipfire: error: turn 7 failed"
    assert any(Path(__file__).name in line for line in trace)
    assert "RuntimeError" in trace[-2] + trace[-1]
    assert all(line.isprintable() for line in trace)
