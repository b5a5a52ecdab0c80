"""benchmarks/cpu_peers.py: turns, ratios, what else ran meanwhile, and whole runs against a made-up peer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import cpu_peers
from hipfire.base.errors import ValidationError
from peers.contest import Arm, Case, Sample, Series, Way, median_of_ratios, play, ratio_of_medians
from peers.machine import CpuTimes
from peers.matches import Texts, Workers, timed
from peers.page import BEGIN, END
from peers.worker import BENCHMARKS, Worker, worker_environment
from tiny_models import tiny_model, write_gguf

Output = pytest.CaptureFixture[str]
PP, TG, BATCH = Case("pp", 12), Case("tg", 6), Case("tg", 6, 4)
SLOW, QUICK = Way("call", "slow setting"), Way("call", "quick setting")
PEER = Arm("peer Q4_1", "Q4_1", peer=True, ways=(SLOW, QUICK), batches=False)
OWN = Arm("hipfire Q4_1", "Q4_1")
# a peer that answers at once, whatever it is asked
PEER_PROGRAM = """
from peers.serve import serve
answers = {"info": {"version": "0", "system": "none | at all"}, "load": {}, "unload": {}}
answers |= {"pp": {"seconds": 0.5}, "tg": {"seconds": 0.25}}
serve({name: lambda answer=answer, **_: answer for name, answer in answers.items()})
"""


class Players:
    """Made-up times, by the setting alone; notes whose turn it was."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, str, str]] = []

    def measure(self, arm: Arm, way: Way, case: Case) -> Sample:
        self.turns.append((case.name, arm.name, way.setting))
        return Sample(2.0 if way.setting == "slow setting" else 1.0, 3.0)


def series(arm: Arm, seconds: Sequence[float]) -> Series:
    return Series(arm, Way(), TG, tuple(Sample(each, each) for each in seconds))


def test_the_order_of_arms_turns_around_from_round_to_round() -> None:
    players = Players()
    own = Arm("hipfire hf4", "hf4")
    play([Arm("peer", "Q4_0", peer=True), own], [PP, TG], players.measure, rounds=3, warmups=1)
    forwards = [("pp12", "peer"), ("pp12", own.name), ("tg6", "peer"), ("tg6", own.name)]
    backwards = [("pp12", own.name), ("pp12", "peer"), ("tg6", own.name), ("tg6", "peer")]
    assert [turn[:2] for turn in players.turns] == [*forwards, *forwards, *backwards, *forwards]


def test_warm_ups_do_not_count_and_settle_the_setting() -> None:
    players, rates, said = Players(), iter([1.0, 2.0]), list[str]()
    done = play(
        [PEER, OWN],
        [PP],
        players.measure,
        rounds=2,
        warmups=2,
        each_round=lambda: next(rates),
        progress=said.append,
    )
    assert [(each.arm, each.way, len(each.samples)) for each in done.series] == [
        (PEER, QUICK, 2),
        (OWN, Way(), 2),
    ]
    assert players.turns.count(("pp12", PEER.name, "slow setting")) == 2
    assert players.turns.count(("pp12", PEER.name, "quick setting")) == 4
    assert done.notes == (1.0, 2.0)
    assert said == ["warm-up 1 of 2", "warm-up 2 of 2", "round 1 of 2", "round 2 of 2"]


def test_both_calls_of_the_better_setting_are_measured_to_the_end() -> None:
    ways = (Way("a", "off"), Way("b", "off"), Way("a", "on"), Way("b", "on"))
    # "off" is good in prefill alone, and there by one of its calls only
    times = {("pp12", "b", "off"): 1.0, ("tg6", "a", "on"): 1.0}

    def measure(arm: Arm, way: Way, case: Case) -> Sample:
        return Sample(times.get((case.name, way.call, way.setting), 5.0), 5.0)

    done = play([Arm("peer", "x", peer=True, ways=ways)], [PP, TG], measure, rounds=1, warmups=1)
    assert [(each.case, each.way.name) for each in done.series] == [
        (PP, "a, off"),
        (PP, "b, off"),
        (TG, "a, on"),
        (TG, "b, on"),
    ]
    best = done.best(done.peer, PP)
    assert best is not None
    assert best.way.name == "b, off"


def test_an_arm_without_batches_sits_out() -> None:
    done = play([PEER, OWN], [TG, BATCH], Players().measure, rounds=1, warmups=1)
    assert done.best(PEER, BATCH) is None
    batch = done.best(OWN, BATCH)
    assert batch is not None
    # four sequences of six tokens in a second
    assert batch.tok_s.median == 24


@pytest.mark.parametrize(("rounds", "warmups"), [(0, 1), (1, 0)])
def test_a_contest_needs_rounds_and_warm_ups(rounds: int, warmups: int) -> None:
    with pytest.raises(ValidationError, match="at least 1"):
        play([PEER], [PP], Players().measure, rounds=rounds, warmups=warmups)


def test_the_two_ratios_differ_when_the_machine_drifts() -> None:
    # twice as fast in two rounds; in the middle one the machine slowed down for the peer
    own, other = series(OWN, [1.0, 2.0, 8.0]), series(PEER, [2.0, 10.0, 16.0])
    assert median_of_ratios(own, other) == pytest.approx(2.0)
    assert ratio_of_medians(own, other) == pytest.approx(5.0)


def test_synthetic_texts_are_the_same_every_time_and_hold_no_control_tokens() -> None:
    texts = Texts(49152)
    assert texts.request(BATCH) == Texts(49152).request(BATCH)
    request = texts.request(BATCH)
    rows = request["rows"]
    assert [len(row) for row in rows] == [6] * 4
    assert len({tuple(row) for row in rows}) == 4
    assert min(min(row) for row in rows) >= 1000
    assert max(Texts(100).request(PP)["tokens"]) < 100
    assert len(texts.request(PP)["tokens"]) == 12


class Asked:
    """A worker that moves the clock when it is asked: its own time, the other one's, and everybody's."""

    def __init__(self, name: str, pid: int, clock: FakeClock) -> None:
        self.name, self.pid, self.clock = name, pid, clock

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.clock.times[self.pid] += 1.5
        self.clock.times[3 - self.pid] += 0.125
        self.clock.total += 2.0
        return {"seconds": 0.5, "do": do}


class FakeClock:
    def __init__(self) -> None:
        self.total = 10.0
        self.times = {1: 1.0, 2: 1.0}

    def busy(self) -> float:
        return self.total

    def process(self, pid: int) -> float:
        return self.times[pid]


@pytest.mark.parametrize("arm", [PEER, OWN])
def test_what_others_did_meanwhile_is_noted(arm: Arm) -> None:
    clock, pauses = FakeClock(), list[float]()
    workers = Workers(Asked("peer", 1, clock), Asked("own", 2, clock), clock, pauses.append)
    sample = timed(workers, arm, PP, {})
    assert (sample.seconds, sample.others, sample.waiting) == (0.5, 0.375, 0.125)
    assert pauses == [0.05]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs a Linux kernel")
def test_cpu_times_are_read_from_the_kernel(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    cpu = min(os.sched_getaffinity(0))
    (tmp_path / "stat").write_text(
        f"cpu 9 9 9 9\ncpu{cpu} 1 2 3 400 500 4 5 6 7 8\ncpu999 50 50 50\nintr 7\n"
    )
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a ) b) S " + " ".join(map(str, range(1, 20))))
    times = CpuTimes(tmp_path)
    assert times.busy() == pytest.approx((1 + 2 + 3 + 4 + 5 + 6) / ticks)
    assert times.process(7) == pytest.approx((11 + 12) / ticks)
    assert CpuTimes(tmp_path / "none").busy() is None
    assert CpuTimes(tmp_path / "none").process(7) is None


@pytest.fixture
def stage(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a run play against the made-up peer, in a folder of the test; returns the arguments for it."""

    def start(name: str, python: str, module: str, threads: int) -> Worker:
        command = [python, "-m", module, str(threads)]
        if name == cpu_peers.PEER:
            command = [python, "-c", PEER_PROGRAM]
        return Worker(name, command, worker_environment(own=True))

    monkeypatch.setattr(cpu_peers, "start", start)
    monkeypatch.setattr(cpu_peers, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(cpu_peers, "peer_python", lambda *_: Path(sys.executable))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    lengths = ["--pp", "9", "--tg", "3", "--batch", "2", "--threads", "1"]
    return ["--models", str(path), "--rounds", "2", *lengths]


def test_a_whole_run(
    stage: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nnot measured yet\n{END}\n")
    monkeypatch.setattr(cpu_peers, "PAGE", page)
    monkeypatch.setattr(cpu_peers, "check_matplotlib", lambda: None)
    monkeypatch.setattr(cpu_peers, "draw", lambda run, path: path.write_text("picture"))
    out = tmp_path / "run.json"
    assert cpu_peers.main([*stage, "--json", str(out), "--write-docs"]) == 0
    shown = capfd.readouterr()
    assert "tiny, same file  pp9   gguf         18.0 [18.0-18.0]" in shown.out
    assert "Command: `python benchmarks/cpu_peers.py --models tiny --rounds 2" in shown.out
    assert "llama.cpp: llama-cpp-python 0, none | at all" in shown.out
    assert "fewer than 6 rounds" in shown.err
    (match,) = json.loads(out.read_text())["matches"]
    assert {(each["case"], each["arm"]) for each in match["series"]} == {
        ("pp9", "llama.cpp gguf"),
        ("pp9", "hipfire gguf"),
        ("tg3", "llama.cpp gguf"),
        ("tg3", "hipfire gguf"),
        ("tg3x2", "hipfire gguf"),
    }
    step = match["decode_step"]["hipfire gguf"]
    assert min(step["program_seconds"], step["step_seconds"]) > 0
    assert sum(rows for _, rows, _ in step["kernels"]) > step["barriers"] > 0
    written = page.read_text()
    assert "| tiny, same file | pp9 | gguf | 18.0 [18.0-18.0] |" in written
    assert str(tmp_path) not in written
    assert (tmp_path / "page.svg").read_text() == "picture"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_worker_that_dies_ends_the_run_with_one_line(
    stage: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__],
        "PEER_PROGRAM",
        "import os\nfrom peers.serve import serve\n"
        "serve({'info': lambda: {'version': '0', 'system': ''}, 'load': lambda **_: os.abort()})",
    )
    assert cpu_peers.main(stage) == 1
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "cpu_peers: the llama.cpp worker ended at 'load' (SIGABRT)" in shown.err.splitlines()[-1]


def test_what_cannot_be_written_in_the_end_is_refused_in_the_beginning(
    stage: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.setattr(cpu_peers, "peer_python", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr(cpu_peers, "PAGE", tmp_path / "tiny.gguf.md")
    assert cpu_peers.main([*stage, "--json", str(tmp_path / "none" / "x.json")]) == 1
    assert "there is no folder" in capfd.readouterr().err
    monkeypatch.setattr(cpu_peers, "check_matplotlib", lambda: None)
    assert cpu_peers.main([*stage, "--write-docs"]) == 1
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_process_behind(number: signal.Signals, code: int) -> None:
    program = (
        "import os, sys, cpu_peers\n"
        "from peers.worker import Worker\n"
        "def run_all(options):\n"
        "    command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    with Worker('slow', command, dict(os.environ)) as worker:\n"
        "        print(worker.pid, flush=True)\n"
        "        worker.ask('load')\n"
        "cpu_peers.run_all = run_all\n"
        "sys.exit(cpu_peers.main([]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said == ("cpu_peers: interrupted\n" if number == signal.SIGINT else "")
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
