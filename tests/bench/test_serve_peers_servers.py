"""The servers of benchmarks/serve_peers.py: the peer's environment, starts and ends, and whole runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_stand_in import StandIn, serving

import serve_peers
from hipfire.base.errors import UnsupportedError
from hipfire.checkpoint.library import open_library
from hipfire.validate.harness_server import Server, ServerPlan
from peers import serve_measure, serve_servers
from peers.page import SERVE_PEERS, markers
from peers.report import PEER
from peers.serve_environment import add_server
from peers.serve_servers import ServeError, Setup, Side, own_server, peer_server
from peers.serve_texts import Texts, encoder
from peers.worker import BENCHMARKS

Output = pytest.CaptureFixture[str]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs scripts and process groups")
# a Python that notes its arguments; it has the server's packages once pip has run, unless `broken` lies there
PEER_PYTHON = """
import pathlib, sys
here = pathlib.Path(__file__).parent
(here / "calls").open("a").write(" ".join(sys.argv[1:3]) + "\\n")
if sys.argv[1:3] == ["-m", "pip"]:
    if (here / "offline").exists():
        sys.exit("ERROR: No matching distribution")
    (here / "asked").write_text(" ".join(sys.argv[3:]))
    (here / "installed").touch()
elif not (here / "installed").exists() or (here / "broken").exists():
    sys.exit("Traceback\\nModuleNotFoundError: No module named 'uvicorn'")
"""
# answers /v1/models as the peer does, with a child that must not outlive it
PEER_SERVER = """
import http.server, json, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
(here / "words").write_text(json.dumps(sys.argv[1:]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(here / "child").write_text(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "the model"}]}')
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def script(path: Path, body: str) -> Path:
    """Write a Python program that can be started by its name."""
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_what_the_server_needs_is_installed_once_and_the_package_is_not_built(tmp_path: Path) -> None:
    python = script(tmp_path / "python", PEER_PYTHON)
    said: list[str] = []
    for _ in range(2):
        add_server(python, said.append)
    assert said == ["installing what llama_cpp.server needs"]
    assert calls(tmp_path).count("-m pip") == 1
    asked = (tmp_path / "asked").read_text()
    assert "uvicorn>=0.22.0" in asked
    assert "llama" not in asked
    assert "--only-binary :all:" in asked


@pytest.mark.parametrize(
    ("mark", "line"),
    [
        ("offline", "pip could not install what llama_cpp.server needs: ERROR: No matching distribution; "),
        ("broken", "llama_cpp.server cannot be used: ModuleNotFoundError: No module named 'uvicorn'; "),
    ],
)
def test_an_environment_that_cannot_serve_is_refused(tmp_path: Path, mark: str, line: str) -> None:
    (tmp_path / mark).touch()
    with pytest.raises(UnsupportedError) as caught:
        add_server(script(tmp_path / "python", PEER_PYTHON), lambda _: None)
    assert caught.value.line().startswith(line)


def setup_for(path: Path) -> Setup:
    return Setup(path, threads=3, context=4096, slots=8, chunk=256)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_peer_gets_the_same_file_and_threads_and_ends_with_all_its_processes(tmp_path: Path) -> None:
    python = script(tmp_path / "python", PEER_SERVER)
    with peer_server(setup_for(tmp_path / "m.gguf"), python, tmp_path / "log", flash=True) as side:
        assert (side.name, side.model) == (PEER, "the model")
        child = int((tmp_path / "child").read_text())
        assert child in side.pids()
        assert len(side.pids()) == 2
    assert not is_running(child)
    words = json.loads((tmp_path / "words").read_text())
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["-m", "llama_cpp.server"]
    assert flags["--model"] == str(tmp_path / "m.gguf")
    assert flags["--n_threads"] == flags["--n_threads_batch"] == "3"
    assert (flags["--interrupt_requests"], flags["--logits_all"]) == ("false", "false")
    assert flags["--flash_attn"] == "true"


def test_a_peer_that_dies_at_the_start_says_why(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "import sys; sys.exit('ValueError: no such file')")
    server = peer_server(setup_for(tmp_path), python, tmp_path / "log", flash=False)
    with pytest.raises(ServeError, match="ended with code 1: ValueError: no such file"), server:
        pytest.fail("it came up")
    missing = peer_server(setup_for(tmp_path), tmp_path / "none", tmp_path / "log", flash=False)
    with pytest.raises(ServeError, match="cannot be started: No such file"), missing:
        pytest.fail("it came up")


def test_hipfire_gets_a_slot_for_each_chat_and_a_home_of_its_own(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ServerPlan] = []
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)

    def start(plan: ServerPlan, tell: object) -> Server:
        plans.append(plan)
        return Server(plan, {"model": "some"}, process)

    monkeypatch.setattr(serve_servers, "start", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HIPFIRE_PORT", "1")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"not read by anyone")
    library = open_library()
    with own_server(setup_for(path), library.require(str(path)), library, tmp_path / "log", print) as side:
        assert (side.model, side.pids()) == ("some", (process.pid,))
        (plan,) = plans
        assert (plan.folder / "models" / "tiny.gguf").resolve() == path
    assert process.poll() is not None
    assert not plan.folder.exists()
    words = list(plan.words)
    flags = dict(zip(words[-10::2], words[-9::2], strict=True))
    expected = {"--kv-mode": "bf16", "--max-seq": "4096", "--threads": "3", "--slots": "8"}
    assert flags == {**expected, "--prefill-chunk": "256"}
    assert plan.environment["HIPFIRE_HOME"] == str(plan.folder)
    assert not {"OMP_NUM_THREADS", "HIPFIRE_PORT"} & plan.environment.keys()


@pytest.mark.real
def test_long_texts_have_exactly_their_tokens_in_a_real_model() -> None:
    model = open_library().find("smollm2:135m")
    if model is None:
        pytest.skip("not run: smollm2:135m is not installed (hipfire pull smollm2:135m)")
    encode = encoder(model.path)
    texts = Texts(encode, serve_peers.WORDS.read_text(encoding="utf-8").split())
    made = [encode(texts.text(number, length)) for number, length in ((0, 256), (1, 256), (2, 3000))]
    assert [len(tokens) for tokens in made] == [256, 256, 3000]
    assert len({tokens[0] for tokens in made}) == 3


@pytest.fixture
def stage(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a run play between stand-ins; the peer is quicker with flash attention. Returns arguments."""

    @contextlib.contextmanager
    def own(setup: Setup, *_: object) -> Iterator[Side]:
        assert setup.slots == 2
        with serving(StandIn(token_s=0.002, read_s=0.0005)) as side:
            yield side

    @contextlib.contextmanager
    def peer(setup: Setup, python: Path, log: Path, *, flash: bool) -> Iterator[Side]:
        kind = StandIn(token_s=0.004, read_s=0.001 if flash else 0.003, lock=True, timed=False)
        with serving(kind, PEER) as side:
            yield Side(PEER, side.address, side.model, side.group, f"flash attention {flash}")

    monkeypatch.setattr(serve_measure, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(serve_peers, "own_server", own)
    monkeypatch.setattr(serve_peers, "peer_server", peer)
    monkeypatch.setattr(serve_peers, "peer_python", lambda *_: Path(sys.executable))
    monkeypatch.setattr(serve_peers, "add_server", lambda *_: None)
    monkeypatch.setattr(serve_peers, "_peer_version", lambda _: "0.3")
    monkeypatch.setattr(serve_peers, "check_gguf", lambda _: None)
    monkeypatch.setattr(serve_peers, "encoder", lambda _: lambda text: [hash(w) for w in text.split()])
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"not read by anyone")
    counts = ["--chats", "2", "--tokens", "3", "--long", "60", "--chunk", "8", "--probes", "2"]
    return ["--model", str(path), "--rounds", "2", "--threads", "1", *counts]


def test_a_whole_run(
    stage: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    begin, end = markers(SERVE_PEERS)
    page = tmp_path / "page.md"
    page.write_text(f"{begin}\nnot measured yet\n{end}\n")
    monkeypatch.setattr(serve_peers, "PAGE", page)
    out = tmp_path / "run.json"
    assert serve_peers.main([*stage, "--json", str(out), "--write-docs"]) == 0
    shown = capfd.readouterr()
    assert "2 chats one by one: tokens/s" in shown.out
    assert "Command: `python benchmarks/serve_peers.py --model tiny --rounds 2 --threads 1" in shown.out
    assert "llama.cpp: llama_cpp.server of llama-cpp-python 0.3, flash attention True" in shown.out
    assert "fewer than 5 rounds" in shown.err
    written = page.read_text()
    assert "| 2 chats at once: tokens/s |" in written
    assert str(tmp_path) not in written
    found = json.loads(out.read_text())
    assert [each["server"] for each in found["figures"]] == [PEER, "hipfire"]
    assert len(found["figures"][1]["samples"]["serial_s"]) == 2


def test_a_server_that_refuses_ends_the_run_with_one_line(
    stage: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    @contextlib.contextmanager
    def own(*_: object) -> Iterator[Side]:
        with serving(StandIn(status=500)) as side:
            yield side

    monkeypatch.setattr(serve_peers, "own_server", own)
    assert serve_peers.main(stage) == 1
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == "serve_peers: hipfire did not answer: status 500: no such luck"


def test_what_cannot_be_written_in_the_end_is_refused_in_the_beginning(
    stage: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.setattr(serve_peers, "peer_python", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr(serve_peers, "PAGE", tmp_path / "tiny.gguf.md")
    assert serve_peers.main([*stage, "--json", str(tmp_path / "none" / "x.json")]) == 1
    assert "there is no folder" in capfd.readouterr().err
    assert serve_peers.main([*stage, "--write-docs"]) == 1
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_server_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    python = script(tmp_path / "python", PEER_SERVER)
    program = (
        "import sys, time, serve_peers\n"
        "from pathlib import Path\n"
        "from peers.serve_servers import Setup, peer_server\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "def run_all(options):\n"
        "    setup = Setup(folder, 1, 64, 1, 8)\n"
        f"    with peer_server(setup, Path({str(python)!r}), folder / 'log', flash=False) as side:\n"
        "        print(*side.pids(), flush=True)\n"
        "        time.sleep(600)\n"
        "serve_peers.run_all = run_all\n"
        "sys.exit(serve_peers.main([]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said == ("serve_peers: interrupted\n" if number == signal.SIGINT else "")
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids
    assert not any(map(is_running, pids))
