"""The report: what makes it whole, how its verdict follows, and what its proofs are worth."""

from __future__ import annotations

import copy
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from hipfire.base.errors import ValidationError
from hipfire.validate import identity
from hipfire.validate.harness_check import good_reply, report_of, row_of
from hipfire.validate.harness_client import Reply
from hipfire.validate.harness_proofs import Proof, facts, reuse_proof, transcript_proof
from hipfire.validate.harness_report import (
    EXIT_CODES,
    identity_faults,
    judge,
    read_report,
    totals,
    write_report,
)
from hipfire.validate.prompts import Turn


def without(report: dict[str, Any], *path: str | int) -> dict[str, Any]:
    """A copy of a report that lacks one field."""
    lacking = copy.deepcopy(report)
    place: Any = lacking
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return lacking


@pytest.mark.parametrize(
    "path",
    [
        ("schema",),
        ("version",),
        ("source", "tree_sha256"),
        ("runtime", "python"),
        ("runtime", "torch"),
        ("artifacts", 0),
        ("artifacts", 0, "sha256"),
        ("command",),
        ("server_command",),
        ("rows", 0, "prompt_md5"),
        ("rows", 0, "request_md5"),
    ],
)
def test_a_report_without_identity_is_incomplete(path: tuple[str | int, ...]) -> None:
    report = report_of(row_of(good_reply()))
    assert (judge(report), identity_faults(report)) == (("pass", []), [])
    verdict, reasons = judge(without(report, *path))
    assert verdict == "incomplete"
    assert reasons[0].startswith("identity: ")


def test_incomplete_comes_before_fail_and_fail_before_pass() -> None:
    parts = {"pass": good_reply(), "fail": good_reply(content=""), "incomplete": Reply(fault="gone")}
    for chosen in itertools.product(parts, repeat=3):
        verdict, reasons = judge(report_of(*(row_of(parts[name]) for name in chosen)))
        assert verdict == next(name for name in ("incomplete", "fail", "pass") if name in chosen)
        # every reason is told, also those that did not decide
        assert len(reasons) == sum(name != "pass" for name in chosen)
    assert EXIT_CODES == {"pass": 0, "fail": 1, "incomplete": 3}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"planned_turns": 2}, "incomplete"),
        ({"rows": [], "planned_turns": 0}, "incomplete"),
        ({"aborted": "no server"}, "incomplete"),
        ({"fail_on": []}, "pass"),
        ({"fail_on": ["empty"]}, "fail"),
    ],
)
def test_what_else_decides(changes: dict[str, Any], verdict: str) -> None:
    assert judge(report_of(row_of(good_reply(content="")), **changes))[0] == verdict


def test_totals_count_every_flag_once() -> None:
    rows = [
        row_of(good_reply()),
        row_of(good_reply(finish="length")),
        row_of(good_reply(content="")),
        row_of(good_reply(content="no " * 50)),
        row_of(good_reply(content="<think>"), Turn("x", "?", ("a", "b"))),
        row_of(Reply(fault="gone")),
    ]
    counts = totals([row | {"turn": number} for number, row in enumerate(rows)])
    expected = {"requests": 6, "turns": 6, "completed": 4, "faults": 1, "runaway": 1, "empty": 1}
    expected |= {"attractor": 1, "retrieval_miss": 1, "markup_leak": 1, "tool_faults": 0}
    assert {name: counts[name] for name in expected} == expected
    assert (counts["ctx"], counts["gen"], counts["avg_decode_tok_s"]) == (100, 60, None)


def test_a_rate_that_the_server_does_not_tell_is_estimated_and_marked() -> None:
    told = row_of(good_reply(timings={"decode_tok_s": 40.0}, ttft_s=0.5, wall_s=1.5))
    assert (told["decode_tok_s"], told["decode_estimated"]) == (40.0, False)
    estimated = row_of(good_reply(ttft_s=0.5, wall_s=1.5))
    assert (estimated["decode_tok_s"], estimated["decode_estimated"]) == (11.0, True)
    assert row_of(good_reply())["decode_tok_s"] is None


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report = report_of(row_of(good_reply(content="é\u2028\U0001f600")))
    path = tmp_path / "new" / "r.json"
    write_report(report, path)
    assert read_report(path) == json.loads(json.dumps(report))
    with pytest.raises(ValidationError, match="--out"):
        write_report(report, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["new"]
    assert [each.name for each in path.parent.iterdir()] == ["r.json"]


def test_half_of_a_character_does_not_lose_the_report(tmp_path: Path) -> None:
    report = report_of(row_of(good_reply()), command=["x", "\udcff"])
    write_report(report, tmp_path / "r.json")
    assert read_report(tmp_path / "r.json")["command"] == ["x", "\udcff"]


def test_a_full_disk_leaves_no_part_of_a_report(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, usual[1]))
    try:
        with pytest.raises(ValidationError, match="--out"):
            write_report(report_of(row_of(good_reply())), tmp_path / "r.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "hipfire-serve-harness", "rows": [1]}',
        '{"schema": "hipfire-serve-harness", "rows": []}',
        "[" * 10**5,
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValidationError):
        read_report(path)


def test_transcripts_are_compared_byte_for_byte() -> None:
    row = row_of(good_reply(content="one two"))
    assert transcript_proof([row], [copy.deepcopy(row)]).state == "ok"
    for change, evidence in (
        ({"content": "one too"}, "request 1: content differs at character 5: 'wo' against 'oo'"),
        ({"content": "one"}, "request 1: content differs at character 3: ' two' against ''"),
        ({"finish": "length"}, "request 1: finish 'stop' against 'length'"),
        ({"reasoning_content": "x"}, "request 1: reasoning_content differs at character 0: '' against 'x'"),
        ({"tool_calls": [1]}, "request 1: tool_calls [] against [1]"),
    ):
        assert transcript_proof([row], [row | change]) == Proof("transcript", "failed", evidence)
    assert transcript_proof([row], [row, row]).evidence == "1 requests against 2"


@pytest.mark.parametrize(
    ("counts", "cold", "fresh", "state"),
    [
        ([0, 5, 9], False, True, "ok"),
        ([3, 5, 9], False, False, "ok"),
        ([3, 5, 9], False, True, "failed"),
        ([0, 5, 5], False, True, "failed"),
        ([0, 5, 30], False, True, "failed"),
        ([0, None, 9], False, True, "unproven"),
        ([], False, True, "unproven"),
        ([0, 0], True, True, "ok"),
        ([0, 1], True, True, "failed"),
    ],
)
def test_reuse_must_grow_or_be_nothing(counts: list[int], cold: bool, fresh: bool, state: str) -> None:
    rows = [row_of(good_reply()) | {"cached": count, "ctx": 30} for count in counts]
    assert reuse_proof(rows, cold=cold, fresh=fresh).state == state


def test_what_a_server_tells_is_found_wherever_it_stands() -> None:
    document = [{"a": {"kv_mode": "q8", "b": [{"kv_cache": "q8/q8"}, {"kv_mode": None}]}}, None]
    assert facts(document, ("kv_mode", "kv_cache")) == ["q8", "q8/q8"]


def test_the_hash_of_a_tree_is_about_names_and_contents(tmp_path: Path) -> None:
    def tree(files: dict[str, str]) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return identity.tree_sha256(root)

    base = {"a.py": "1", "b/c.json": "2"}
    assert tree(base) == tree(dict(reversed(base.items())))
    assert tree(base) == tree(base | {"__pycache__/a.pyc": "x", ".cache/y": "z", "b/.d": "e"})
    others = [{"a.py": "1", "b/c.json": "3"}, {"a.py": "1", "b/d.json": "2"}, {"a.py": "1"}]
    others += [{"a.py": "12", "b/c.json": ""}, base | {"d.txt": ""}]
    assert len({tree(files) for files in [base, *others]}) == 6
    with pytest.raises(ValidationError, match="no files to identify"):
        identity.tree_sha256(tmp_path / "none")


def test_identity_says_commit_and_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    assert identity.source_identity(tmp_path)["commit"] is None
    assert identity.source_identity(tmp_path)["dirty"] is None
    own = identity.source_identity(identity.PACKAGE)
    assert len(own["tree_sha256"]) == 64
    assert identity.runtime_identity()["torch"] is not None
    with pytest.raises(ValidationError, match="cannot be read"):
        identity.artifact("model", tmp_path / "none")
