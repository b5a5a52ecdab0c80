"""Prompt files: taken byte for byte, refused where they are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hipfire.base.errors import ValidationError
from hipfire.validate.identity import md5
from hipfire.validate.prompts import (
    BATTERY,
    Script,
    read_needles,
    read_prompt,
    read_prompts,
    read_session,
)

ROOT = Path(__file__).parents[2]
OWN = ROOT / "benchmarks" / "prompts"
Reader = Callable[[Path], Script]


def test_a_prompt_is_the_bytes_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    data = "\ufeff  a\r\nb\u00a0é\n\n".encode()
    path.write_bytes(data)
    (turn,) = read_prompt(path).turns
    assert turn.content.encode() == data
    assert turn.genre == "prose"


def test_needles_become_prompts_with_expectations(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    one = {"filler_text": "hay ", "question": "q?", "expected_answer_substring": "n"}
    many = {"filler_text": "h", "question": "r?", "expected_answer_substrings": ["a", "b"], "genre": "g"}
    path.write_text(json.dumps([one, many]))
    turns = read_needles(path).turns
    assert [(turn.genre, turn.content, turn.expect) for turn in turns] == [
        ("niah", "hay \n\nq?", ("n",)),
        ("g", "h\n\nr?", ("a", "b")),
    ]
    path.write_text(json.dumps(one))
    assert read_needles(path).turns == turns[:1]


@pytest.mark.parametrize(
    ("reader", "document", "text"),
    [
        (read_prompts, [], "at least one entry"),
        (read_prompts, [{"genre": "x"}], "[0].prompt must be text"),
        (read_prompts, [{"prompt": ""}], "[0].prompt must be text"),
        (read_prompts, [{"prompt": "a", "expects": []}], "unknown field 'expects'"),
        (read_prompts, [{"prompt": "a", "expect": "b"}], "[0].expect must be a list"),
        (read_prompts, [{"prompt": "a \ud800"}], "half of a surrogate pair"),
        (read_prompts, ["a"], "[0] must be an object"),
        (read_needles, {"filler_text": "a", "question": "b"}, "needs expected_answer_substring"),
        (
            read_needles,
            {"filler_text": "a", "question": "b", "expected_answer_substrings": []},
            "expects nothing",
        ),
        (
            read_needles,
            {"filler_text": "a", "question": "b", "expected_answer_substring": ""},
            "must be text that is not empty",
        ),
        (
            read_needles,
            {"question": "b", "expected_answer_substring": "c"},
            "filler_text must be text",
        ),
        (read_session, {"turns": []}, "at least one turn"),
        (read_session, {"turns": [{"content": "a"}], "schema": 1}, "unknown field 'schema'"),
        (read_session, [{"content": "a", "tool_results": {"f": "1"}}], "the session has no tools"),
        (read_session, {"turns": [{"content": "a"}], "tools": ["f"]}, "tools must be a list of objects"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, reader: Reader, document: Any, text: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValidationError) as caught:
        reader(path)
    assert text in caught.value.message
    assert caught.value.message.startswith("f.json: ")


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"", "is empty"), (b"\xff{", "is not UTF-8"), (b"{", "is not JSON"), (b"[" * 10**5, "is not JSON")],
)
def test_files_that_are_no_json_are_refused(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(data)
    with pytest.raises(ValidationError, match=text):
        read_session(path)
    with pytest.raises(ValidationError, match="cannot be read"):
        read_session(tmp_path / "none.json")


def test_our_own_files_can_be_read_and_expect_what_was_said() -> None:
    recall = read_session(OWN / "session_recall_8turn.json")
    assert len(recall.turns) == 8
    said = " ".join(turn.content for turn in recall.turns[:6])
    assert [len(turn.expect) for turn in recall.turns] == [0] * 6 + [2, 1]
    assert all(text in said for turn in recall.turns for text in turn.expect)
    assert all(text not in turn.content for turn in recall.turns for text in turn.expect)
    for turn in read_needles(OWN / "needles_small.json").turns:
        assert all(turn.content.count(text) == 1 for text in turn.expect)
    tools = read_session(OWN / "session_tool_roundtrip.json")
    assert {tool["function"]["name"] for tool in tools.tools} == set(tools.turns[0].tool_results)
    assert read_prompt(OWN / "bare_factual.txt").turns[0].content.endswith("\n")


def test_the_documentation_lists_the_battery_by_its_hashes() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    for turn in BATTERY:
        assert f"| {turn.genre} | `{md5(turn.content.encode())}` |" in page
    assert len({turn.genre for turn in BATTERY}) == len(BATTERY) == 5
