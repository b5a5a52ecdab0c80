"""hipfire against llama.cpp on this machine's CPU: same files, same threads, in turns, in one run.

usage: cpu_peers.py [--models TAG ...] [--rounds 6] [--threads N] [--json FILE] [--write-docs]

Prints, for every model and format, tokens per second of both sides, their ratios, bits per weight of the
files, hipfire's decode step by operation, its rate with several sequences, and its share of the memory
bandwidth. The peer is the package llama-cpp-python in an environment of its own, which the first run
builds.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from hipfire.base.cpu import cpu_name, usable_threads
from hipfire.base.errors import ValidationError
from hipfire.base.printable import one_line
from hipfire.checkpoint.library import LocalModel, open_library
from peers.command import guarded, positive
from peers.contest import Arm
from peers.environment import PACKAGE, cache_folder, peer_python
from peers.files import check_gguf
from peers.machine import CpuTimes
from peers.matches import PEER_WAYS, Match, Plan, Workers, run_match
from peers.page import check_page, replace_block
from peers.plot import check_matplotlib, draw
from peers.report import OWN, PEER, Run, as_markdown, as_text, warnings
from peers.worker import Worker, WorkerError, worker_environment

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
MODELS = ("smollm2:135m", "gemma3:270m")
# models of which the peer also gets its fastest kind of file, to play against hipfire's own formats
REQUANTIZED = frozenset({"smollm2:135m"})
PEER_FORMAT, PEER_FILE_TYPE = "Q4_0", 2
OWN_FORMATS = ("hf4", "mq4")
WARMUPS = 2
# what a run needs so that its figures may be quoted: rounds, and the most of a core that others may take
QUOTED_ROUNDS, QUIET = 6, 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code. A failure or an interruption ends in one line."""
    options = read_arguments(arguments)
    return guarded("cpu_peers", lambda: run_all(options))


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), help="GGUF files or their tags")
    add("--rounds", type=positive, default=QUOTED_ROUNDS)
    add("--threads", type=positive, default=usable_threads(), help="threads of either side")
    add("--pp", type=positive, nargs="+", default=[512, 128], help="lengths of prompts")
    add("--tg", type=positive, nargs="+", default=[64, 128], help="numbers of decode steps")
    add("--batch", type=positive, default=8, help="sequences that hipfire decodes at once")
    add(
        "--no-requantized",
        action="store_true",
        help=f"leave out {PEER_FORMAT} against {', '.join(OWN_FORMATS)}",
    )
    add("--peer-env", type=Path, help=f"environment that has {PACKAGE} installed")
    add("--json", type=Path, help="file to write all samples to")
    add("--write-docs", action="store_true", help=f"put the tables and a picture into {PAGE.name}")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for. What could fail at the end is checked at the start."""
    if options.write_docs:
        check_matplotlib()
        check_page(PAGE)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValidationError(f"there is no folder {options.json.absolute().parent}", hint="make it first")
    library = open_library()
    models = [library.require(name) for name in options.models]
    for model in models:
        check_gguf(model.path)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    python = peer_python(cache, options.peer_env, progress)
    plan = Plan(
        rounds=options.rounds,
        warmups=WARMUPS,
        prefill=tuple(dict.fromkeys(options.pp)),
        decode=tuple(dict.fromkeys(options.tg)),
        batch=options.batch,
    )
    with ExitStack() as stack:
        # workers end before the files that they have mapped go away
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        workers = Workers(
            peer=stack.enter_context(start(PEER, str(python), "peers.llama_worker", options.threads)),
            own=stack.enter_context(start(OWN, sys.executable, "peers.hipfire_worker", options.threads)),
            clock=CpuTimes(),
        )
        facts = describe_run(options, models, workers)
        matches = tuple(play_all(models, workers, plan, scratch, requantized=not options.no_requantized))
    run = Run(facts, matches)
    print(as_text(run))
    for warning in warnings(run, QUOTED_ROUNDS, QUIET):
        print(f"cpu_peers: warning: {warning}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.write_docs:
        picture = PAGE.with_suffix(".svg")
        draw(run, picture)
        replace_block(PAGE, as_markdown(run, picture.name))


def start(name: str, python: str, module: str, threads: int) -> Worker:
    """Start the worker of one side."""
    return Worker(name, [python, "-m", module, str(threads)], worker_environment(own=name == OWN))


def play_all(
    models: Sequence[LocalModel], workers: Workers, plan: Plan, scratch: Path, *, requantized: bool
) -> Iterator[Match]:
    """Measure every model with the very same file on both sides, then the peer's fastest kind of file."""
    for model in models:
        title = f"{model.name}, same file"
        arms = [peer_arm(model.format), own_arm(model.format)]
        yield run_match(title, [(arm, model.path) for arm in arms], workers, plan, teller(title))
        if requantized and model.name in REQUANTIZED:
            title = f"{model.name}, requantized"
            files = requantize(model.path, workers, scratch, teller(title))
            yield run_match(title, files, workers, plan, teller(title))
            for path in {path for _, path in files}:
                path.unlink()


def requantize(
    source: Path, workers: Workers, scratch: Path, tell: Callable[[str], None]
) -> list[tuple[Arm, Path]]:
    """Make the peer's fastest kind of file and hipfire's own ones; returns who plays which."""
    stem = source.name.partition(".")[0]
    theirs = scratch / f"{stem}.{PEER_FORMAT}.gguf"
    tell(f"writing {theirs.name}")
    workers.peer.ask("requantize", source=str(source), out=str(theirs), ftype=PEER_FILE_TYPE)
    files = [(peer_arm(PEER_FORMAT), theirs), (own_arm(PEER_FORMAT), theirs)]
    for fmt in OWN_FORMATS:
        out = scratch / f"{stem}.{fmt}"
        tell(f"writing {out.name}")
        command = [sys.executable, "-m", "hipfire.cli", "quantize", str(source), "--format", fmt]
        done = subprocess.run(
            [*command, "--out", str(out), "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise WorkerError(f"hipfire quantize --format {fmt} failed: {one_line(last[0])}")
        files.append((own_arm(fmt), out))
    return files


def peer_arm(fmt: str) -> Arm:
    """Return the peer with a file of a format."""
    return Arm(f"{PEER} {fmt}", fmt, peer=True, ways=PEER_WAYS, batches=False)


def own_arm(fmt: str) -> Arm:
    """Return hipfire with a file of a format."""
    return Arm(f"{OWN} {fmt}", fmt)


def describe_run(
    options: argparse.Namespace, models: Sequence[LocalModel], workers: Workers
) -> dict[str, str]:
    """Return facts about the machine and both programs; no paths, since they end up in the documentation."""
    own, peer = workers.own.ask("info"), workers.peer.ask("info")
    words = ["python", "benchmarks/cpu_peers.py", "--models", *(model.name for model in models)]
    words += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
    for name, lengths in (("--pp", options.pp), ("--tg", options.tg), ("--batch", [options.batch])):
        words += [name, *map(str, lengths)]
    if options.no_requantized:
        words.append("--no-requantized")
    libraries = ", ".join(f"{name} {own['libraries'][name]}" for name in ("torch", "numba"))
    return {
        "Date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "Processor": f"{cpu_name()} ({platform.machine()}, {platform.system()})",
        "Threads": f"{options.threads} on either side",
        OWN: f"{own['version']}, path {own['path']} ({', '.join(own['features'])}), "
        f"Python {own['python']}, {libraries}",
        PEER: f"{PACKAGE} {peer['version']}, {one_line(peer['system'])}",
        "Command": f"`{shlex.join(words)}`",
    }


def teller(title: str) -> Callable[[str], None]:
    """Return a `progress` for lines about one match."""
    return lambda text: progress(f"{title}: {text}")


def progress(text: str) -> None:
    """Say what is being done."""
    print(f"cpu_peers: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
