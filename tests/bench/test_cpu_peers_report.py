"""What benchmarks/cpu_peers.py makes of its times: tables, JSON, the block of a page, the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import cpu_peers
from hipfire.base.errors import ValidationError
from peers import plot
from peers.contest import Arm, Case, Rounds, Sample, Series, Way
from peers.files import ModelFile
from peers.matches import Match, Profile
from peers.page import BEGIN, END, check_page, replace_block
from peers.report import Run, all_tables, as_markdown, as_text, warnings

PP, TG, BATCH = Case("pp", 12), Case("tg", 6), Case("tg", 6, 4)
SLOW, QUICK = Way("call", "slow setting"), Way("call", "quick setting")
PEER = Arm("peer Q4_1", "Q4_1", peer=True, ways=(SLOW, QUICK), batches=False)
OWN = Arm("hipfire Q4_1", "Q4_1")


def series(arm: Arm, case: Case, seconds: Sequence[float], way: Way = QUICK, others: float = 0.0) -> Series:
    return Series(arm, way, case, tuple(Sample(each, 2 * each, others * each, 0.0) for each in seconds))


def finished(others: float = 0.0) -> Run:
    """Return a run in which hipfire took half of the peer's time, and a batch no more than one sequence."""
    found = [
        series(PEER, PP, [2.0, 4.0, 3.0], SLOW, others),
        series(PEER, PP, [2.0, 3.0, 2.4], QUICK, others),
        series(OWN, PP, [1.0, 1.5, 1.2], Way(), others),
        series(PEER, TG, [6.0, 3.0, 2.0], QUICK, others),
        series(OWN, TG, [3.0, 1.5, 1.0], Way(), others),
        series(OWN, BATCH, [3.0, 1.5, 1.0], Way(), others),
    ]
    rounds = Rounds((PEER, OWN), (PP, TG, BATCH), tuple(found), (4e9, 8e9, 12e9))
    files = {
        PEER.name: ModelFile("some.gguf", 1100, 1600, 1000, 1_000_000_000),
        OWN.name: ModelFile("some.gguf", 1100, 1600, 1000, 1_000_000_000, memory_bytes=900),
    }
    step = Profile((("linear", 7, 0.004), ("add", 2, 0.001)), 5, 0.006, 0.008)
    return Run({"Processor": "none"}, (Match("tiny, same file", files, rounds, {OWN.name: step}),))


def test_tables_say_what_was_measured() -> None:
    tables = {table.title.split(",")[0]: table for table in all_tables(finished())}
    # medians: 12 tokens in 1.2 s against 2.4 s by the quicker way; 6 in 1.5 s against 3 s
    ends = ("2.00", "2.00", "call, quick setting")
    assert tables["Speed in tokens per second"].rows == (
        ("tiny, same file", "pp12", "Q4_1", "5.0 [4.0-6.0]", "Q4_1", "10.0 [8.0-12.0]", *ends),
        ("tiny, same file", "tg6", "Q4_1", "2.0 [1.0-3.0]", "Q4_1", "4.0 [2.0-6.0]", *ends),
    )
    assert tables["Files"].rows == (
        ("tiny, same file", PEER.name, "some.gguf", "0.0", "5.500", "5.000", "-"),
        ("tiny, same file", OWN.name, "some.gguf", "0.0", "5.500", "5.000", "4.500"),
    )
    (batch,) = tables["Decoding several sequences at once with hipfire"].rows
    assert batch == ("tiny, same file", "Q4_1", "4.0 [2.0-6.0]", "4", "16.0 [8.0-24.0]", "4.00", "4.00")
    assert tables["Decode step of tiny"].rows == (
        ("linear", "4.000 (7)"),
        ("add", "1.000 (2)"),
        ("sum of these", "5.000"),
        ("the program in one call", "6.000 (5 barriers)"),
        ("the step through the runner", "8.000"),
        ("share of the step that is no program", "25.0%"),
    )
    # a gigabyte a token: 2, 4, 6 GB/s against 4, 8, 12, round by round
    own = next(row for row in tables["Memory traffic of decoding"].rows if row[2] == OWN.name)
    assert own == ("tiny, same file", "tg6", OWN.name, "1000.0", "4.0", "8.0", "50%")


def test_a_step_that_was_not_recorded_leaves_gaps() -> None:
    run = finished()
    match = run.matches[0]
    empty = Match(match.title, match.files, match.rounds, {OWN.name: Profile((), 0, 0.0, 0.0)})
    table = next(table for table in all_tables(Run({}, (empty,))) if table.title.startswith("Decode step"))
    assert {row[1:] for row in table.rows} == {("-",)}


def test_text_is_aligned_and_markdown_is_a_table() -> None:
    run = finished(others=0.25)
    text = as_text(run)
    assert text.startswith(
        "Processor: none\n\nSpeed in tokens per second\nModel            Test  Peer's file"
    )
    assert "Medians with minimum and maximum of 3 rounds." in text
    assert "the waiting one used 0.0% of a core and all other programs 12.5%." in text
    page = as_markdown(run, "x.svg")
    assert "- Processor: none\n\n![Tokens per second of llama.cpp and hipfire](x.svg)\n\n### Speed" in page
    assert "\n| tiny, same file | pp12 | Q4_1 | 5.0 [4.0-6.0] |" in page
    lines = [line for line in page.splitlines() if line.startswith("| linear")]
    assert lines == ["| linear | 4.000 (7) |"]


def test_a_run_that_should_not_be_quoted_warns() -> None:
    assert warnings(finished(), least_rounds=3, most_disturbance=0.05) == []
    few, busy = warnings(finished(others=0.5), least_rounds=4, most_disturbance=0.05)
    assert "fewer than 4 rounds" in few
    assert "others used 25% of a core" in busy


def test_json_holds_every_sample() -> None:
    (match,) = json.loads(json.dumps(finished().to_json()))["matches"]
    assert match["series"][0]["seconds"] == [2.0, 4.0, 3.0]
    assert match["series"][0]["tok_s"]["samples"] == [6.0, 3.0, 4.0]
    assert match["memory_bytes_per_second"] == [4e9, 8e9, 12e9]
    assert match["files"][OWN.name]["memory_bytes"] == 900
    assert match["decode_step"][OWN.name]["kernels"] == [["linear", 7, 0.004], ["add", 2, 0.001]]


def test_only_the_block_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(f"# Title\r\n{BEGIN}\nold\n{END}\nafter {{}} \\1\n".encode())
    for text in ("first", "second \\1"):
        replace_block(page, f"\n{text}\n\n")
        assert page.read_bytes().decode() == f"# Title\r\n{BEGIN}\n\n{text}\n\n{END}\nafter {{}} \\1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize(
    "text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}", f"{END}{BEGIN}{END}"]
)
def test_a_page_without_its_markers_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValidationError, match="once each"):
        replace_block(page, "new")
    assert page.read_text() == text


def test_the_page_of_the_documentation_has_its_block() -> None:
    check_page(cpu_peers.PAGE)
    with pytest.raises(ValidationError, match="cannot be read"):
        check_page(cpu_peers.PAGE.with_name("none.md"))


def test_the_picture_shows_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = plot.longest(finished(), "tg")
    assert [(label, case, own.arm, other.arm) for label, case, own, other in shown] == [
        ("tiny\nQ4_1 against Q4_1", TG, OWN, PEER)
    ]
    plot.draw(finished(), tmp_path / "a.svg")
    plot.draw(finished(), tmp_path / "b.svg")
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert drawn.count(plot.PEER_COLOR.encode()) >= 2
    assert drawn.count(plot.OWN_COLOR.encode()) >= 2
