"""hipfire's server against that of llama-cpp-python: same file, same threads, in turns, in one run.

usage: serve_peers.py [--model TAG] [--rounds 5] [--threads N] [--json FILE] [--write-docs]

Prints, for both servers: chats held one after another and at once, the first token of a request alone and of
a short one beside a long prompt, and whether hipfire's goals are met. The peer's environment is that of
cpu_peers.py; what its server needs besides is installed there.

docs/performance.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from hipfire.base.cpu import cpu_name, usable_threads
from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import LocalModel, open_library
from peers.command import guarded, positive
from peers.environment import MODULE, PACKAGE, cache_folder, peer_python
from peers.files import check_gguf
from peers.machine import CpuTimes
from peers.page import SERVE_PEERS, check_page, replace_block
from peers.report import OWN, PEER
from peers.serve_environment import SERVER, add_server
from peers.serve_measure import Contest, Plan, play
from peers.serve_report import ServeRun, as_markdown, as_text, warnings
from peers.serve_requests import ask
from peers.serve_servers import Setup, Side, own_server, peer_server
from peers.serve_texts import Texts, encoder
from peers.worker import BENCHMARKS, worker_environment

PAGE = BENCHMARKS.parent / "docs" / "performance.md"
WORDS = BENCHMARKS / "texts" / "lighthouse.txt"
# what a run needs so that its figures may be quoted: rounds, and the most of a core that others may take
QUOTED_ROUNDS, QUIET = 5, 0.05
# tokens that a chat template and a reply take beside the long prompt
AROUND = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code. A failure or an interruption ends in one line."""
    options = read_arguments(arguments)
    return guarded("serve_peers", lambda: run_all(options))


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2:135m", help="a GGUF file or its tag")
    add("--rounds", type=positive, default=QUOTED_ROUNDS)
    add("--warmups", type=positive, default=1, help="rounds before those, which do not count")
    add("--threads", type=positive, default=usable_threads(), help="threads of either side")
    add("--chats", type=positive, default=8, help="chats, and hipfire's slots")
    add("--tokens", type=positive, default=96, help="most tokens of a reply")
    add("--long", type=positive, default=3000, help="tokens of the long prompt")
    add("--chunk", type=positive, default=256, help="tokens of a prompt that hipfire reads in one piece")
    add("--probes", type=positive, default=2, help="short requests beside long prompts in each round")
    add("--peer-env", type=Path, help=f"environment that has {PACKAGE} installed")
    add("--json", type=Path, help="file to write all samples to")
    add("--write-docs", action="store_true", help=f"put the tables into {PAGE.name}")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for. What could fail at the end is checked at the start."""
    if options.write_docs:
        check_page(PAGE, SERVE_PEERS)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValidationError(f"there is no folder {options.json.absolute().parent}", hint="make it first")
    model = open_library().require(options.model)
    check_gguf(model.path)
    texts = Texts(encoder(model.path), WORDS.read_text(encoding="utf-8").split())
    python = peer_python(cache_folder(), options.peer_env, progress)
    add_server(python, progress)
    contest = measure(options, model, texts, python)
    run = ServeRun(describe_run(options, model, contest, python), contest)
    print(as_text(run))
    for warning in warnings(contest, QUOTED_ROUNDS, QUIET):
        print(f"serve_peers: warning: {warning}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.write_docs:
        replace_block(PAGE, as_markdown(run), SERVE_PEERS)


def measure(options: argparse.Namespace, model: LocalModel, texts: Texts, python: Path) -> Contest:
    """Start both servers, the peer's by its faster setting, and play all rounds."""
    setup = Setup(
        model.path, options.threads, options.long + options.tokens + AROUND, options.chats, options.chunk
    )
    plan = Plan(
        rounds=options.rounds,
        warmups=options.warmups,
        chats=options.chats,
        tokens=options.tokens,
        long=options.long,
        chunk=options.chunk,
        probes=options.probes,
    )
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flash = faster_setting(setup, python, logs, texts, plan)
        progress(f"starting {PEER}")
        peer = stack.enter_context(peer_server(setup, python, logs / "peer.log", flash=flash))
        progress(f"starting {OWN}")
        own = stack.enter_context(own_server(setup, model, open_library(), logs / "own.log", progress))
        return play(own, peer, texts, plan, CpuTimes(), progress=progress)


def faster_setting(setup: Setup, python: Path, logs: Path, texts: Texts, plan: Plan) -> bool:
    """Return whether the peer answers a question and a long prompt faster with flash attention."""
    seconds = {}
    for flash in (False, True):
        word = "with" if flash else "without"
        progress(f"trying {PEER} {word} flash attention")
        with peer_server(setup, python, logs / f"{word}.log", flash=flash) as side:
            # the first request pays for pages that were never touched
            ask(side, texts.question(0), 1)
            seconds[flash] = _seconds(side, texts, plan)
    return seconds[True] < seconds[False]


def describe_run(
    options: argparse.Namespace, model: LocalModel, contest: Contest, python: Path
) -> dict[str, str]:
    """Return facts about the machine and both programs; no paths, since they end up in the documentation."""
    words = ["python", "benchmarks/serve_peers.py", "--model", model.name]
    for name in ("rounds", "threads", "chats", "tokens", "long", "chunk", "probes"):
        words += [f"--{name}", str(getattr(options, name))]
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numba", "uvicorn"))
    return {
        "Date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "Processor": f"{cpu_name()} ({platform.machine()}, {platform.system()})",
        "Threads": f"{options.threads} on either side",
        "Model": f"{model.path.name} on either side",
        OWN: f"{metadata.version('hipfire')}, {contest.own.side.settings}, "
        f"Python {platform.python_version()}, {libraries}",
        PEER: f"{SERVER} of {PACKAGE} {_peer_version(python)}, {contest.peer.side.settings}",
        "Command": f"`{shlex.join(words)}`",
    }


def progress(text: str) -> None:
    """Say what is being done."""
    print(f"serve_peers: {text}", file=sys.stderr, flush=True)


def _seconds(side: Side, texts: Texts, plan: Plan) -> float:
    """Return the time of two requests that no round makes."""
    last = 255
    question = ask(side, texts.question(last), plan.tokens)
    return question.wall_s + ask(side, texts.text(last, plan.long), 1).wall_s


def _peer_version(python: Path) -> str:
    done = subprocess.run(
        [str(python), "-c", f"import {MODULE}; print({MODULE}.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        env=worker_environment(own=False),
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
