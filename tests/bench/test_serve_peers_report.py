"""What benchmarks/serve_peers.py makes of its figures: tables, goals, warnings, JSON, its block of a page."""

from __future__ import annotations

import json
from pathlib import Path

from hipfire.validate.harness_client import Address
from peers.page import BEGIN, END, SERVE_PEERS, check_page, markers, replace_block
from peers.report import OWN, PEER
from peers.serve_measure import Contest, Figures, Plan, Use
from peers.serve_report import ServeRun, as_markdown, as_text, goals_of, tables, warnings
from peers.serve_servers import Side

PLAN = Plan(rounds=3, warmups=1, chats=8, tokens=96, long=3000, chunk=300, probes=2)


def figures(name: str, times: float, together: float, beside: float) -> Figures:
    """Return made-up figures; `times` as slow as a server that needs 4 s for eight chats one by one."""
    side = Side(name, Address("127.0.0.1", 1), "some", 1, f"settings of {name}")
    return Figures(
        side,
        {
            "serial_s": [4.0 * times, 5.0 * times, 4.5 * times],
            "serial_tok_s": [200 / times, 160 / times, 180 / times],
            "together_s": [2.0, 2.5, 2.2],
            "together_tok_s": [together, together, together],
            "together_ttft_ms": [50.0, 60.0, 55.0],
            "ttft_ms": [20.0 * times, 40.0 * times, 30.0 * times],
            "decode_tok_s": [220.0, 210.0, 215.0],
            "long_s": [5.0 * times] * 3,
            "chunk_ms": [400.0, 420.0, 380.0],
            "chunk_wall_ms": [410.0, 430.0, 390.0],
            "beside_ms": [beside, beside + 100, beside - 100, beside],
        },
    )


def finished(together: float = 540.0, beside: float = 500.0, others: float | None = 0.0) -> Contest:
    uses = tuple(Use(2.0, others, 0.01, 0.2) for _ in range(4))
    return Contest(PLAN, figures(OWN, 1.0, together, beside), figures(PEER, 2.0, 90.0, 9000.0), uses)


def test_tables_say_what_was_measured() -> None:
    chats, waits, goals = tables(finished())
    rows = {row[0]: row[1:] for row in chats.rows}
    assert rows["8 chats one by one: seconds"] == ("9.00 [8.00-10.00]", "4.50 [4.00-5.00]", "2.00", "2.00")
    assert rows["8 chats one by one: tokens/s"][2:] == ("2.00", "2.00")
    assert rows["8 chats at once: tokens/s"][:3] == ("90.0 [90.0-90.0]", "540.0 [540.0-540.0]", "6.00")
    # by rounds: 540 / 200, / 160 and / 180; the peer's 90 / 100, / 80 and / 90
    gained = rows["8 chats at once, against one by one: tokens/s"]
    assert gained == ("1.00 [0.90-1.12]", "3.00 [2.70-3.38]", "-", "-")
    assert rows["a prompt of 3,000 tokens alone: seconds to the first token"][1] == "5.00 [5.00-5.00]"
    # 500 ms against 400 of a chunk alone, and 500 of the long prompt's mean one, a tenth of 5 s
    assert waits.rows == (
        (PEER, "60 [40-80]", "9000 [8900-9100]", "400 [380-420]", "410 [390-430]", "22.50", "9.00"),
        (OWN, "30 [20-40]", "500 [400-600]", "400 [380-420]", "410 [390-430]", "1.25", "1.00"),
    )
    assert [row[1:] for row in goals.rows] == [
        ("3.00", "at least 2.5 times the tokens/s", "met"),
        ("1.25", "at most 1.5 times a chunk", "met"),
    ]


def test_goals_that_are_missed_are_called_so() -> None:
    contest = finished(together=440.0, beside=620.0)
    assert [(round(figure, 2), met) for _, figure, _, met in goals_of(contest)] == [
        (2.44, False),
        (1.55, False),
    ]
    assert [row[-1] for row in tables(contest)[2].rows] == ["not met", "not met"]


def test_json_holds_every_sample_and_the_goals() -> None:
    found = json.loads(json.dumps(ServeRun({"Date": "today"}, finished()).to_json()))
    assert found["facts"] == {"Date": "today"}
    assert [goal["met"] for goal in found["goals"].values()] == [True, True]
    peer, own = found["figures"]
    assert (peer["server"], own["server"]) == (PEER, OWN)
    assert own["samples"]["beside_ms"] == [500.0, 600.0, 400.0, 500.0]
    assert found["plan"]["long"] == 3000
    assert found["uses"][0]["cpu_seconds_of_client"] == 0.2


def test_what_others_used_is_told_and_too_much_of_it_is_a_warning() -> None:
    assert warnings(finished(), 3, 0.05) == []
    remark = "the waiting one used 0.5% of a core, the client 10.0%, and all other programs 0.0%"
    assert remark in as_text(ServeRun({}, finished()))
    (line,) = warnings(finished(others=0.5), 3, 0.05)
    assert line == "others used 26% of a core meanwhile: repeat it on an idle machine"
    assert "other programs" not in as_text(ServeRun({}, finished(others=None)))


def test_few_rounds_and_late_requests_are_warnings() -> None:
    contest = finished()
    contest.peer.missed = 2
    few, late = warnings(contest, 5, 0.05)
    assert few == "fewer than 5 rounds: the figures are a first impression"
    assert late == "2 short requests came when llama.cpp had read the long prompt"


def test_the_page_has_a_block_for_each_program(tmp_path: Path) -> None:
    begin, end = markers(SERVE_PEERS)
    page = tmp_path / "page.md"
    page.write_text(f"{begin}\nold\n{end}\n\nbetween\n\n{BEGIN}\nkept\n{END}\n")
    check_page(page, SERVE_PEERS)
    replace_block(page, as_markdown(ServeRun({"Date": "today"}, finished())), SERVE_PEERS)
    text = page.read_text()
    assert text.startswith(f"{begin}\n\n- Date: today\n\n### Chats\n\n| Test | llama.cpp | hipfire |")
    assert text.endswith(f"| met |\n\n{end}\n\nbetween\n\n{BEGIN}\nkept\n{END}\n")
    replace_block(page, "new")
    assert text.partition(BEGIN)[0] == page.read_text().partition(BEGIN)[0]
