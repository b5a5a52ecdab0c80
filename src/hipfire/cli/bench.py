"""`hipfire bench`: how fast a model reads and writes on this machine, as tables or as JSON.

This file knows flags, settings and the banner. What is timed, and what the tables say, is in `hipfire.bench`.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hipfire import __version__
from hipfire.base import log
from hipfire.base.config_keys import Value
from hipfire.base.errors import ValidationError
from hipfire.bench.plan import BenchOptions, BenchPlan, plan_bench
from hipfire.bench.report import HEADER, tables
from hipfire.bench.results import Measurements
from hipfire.bench.workload import make_workload
from hipfire.checkpoint.library import LocalModel, open_library
from hipfire.cli import host
from hipfire.cli.loading import load_llm
from hipfire.cli.output import size_text, write, write_json, write_table
from hipfire.cli.overrides import model_settings
from hipfire.cli.serving import find_server
from hipfire.cli.settings import WHOLE, load_settings
from hipfire.cli.version import library_versions

if TYPE_CHECKING:
    from hipfire.engine.llm import LLM

# long enough that its prefill is more than the cost of starting operations
DEFAULT_PROMPT = (
    "A lighthouse keeper notes the weather four times a day: the wind, the height of the waves, how far one "
    "can see, and which ships went by. After forty years the notebooks fill a whole wall of the tower, and "
    "the museum of the town would like to have them. Explain to a curious child of twelve what such "
    "notebooks can tell us about the climate that a single good thermometer cannot, which mistakes a careful "
    "reader has to look out for, and how one could check by simple means that no quiet night was invented."
)
MAX_PROMPT_BYTES = 16 << 20


def _read_lengths(_: Any, tokens: Sequence[Any]) -> tuple[int, ...]:
    """Read whole numbers separated by commas."""
    try:
        return tuple(int(word) for word in tokens[0].value.split(","))
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a list such as 128,512") from None


def _read_number(_: Any, tokens: Sequence[Any]) -> int:
    """Read a whole number; the parser's own rule would round 1.5."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a whole number") from None


LENGTHS = Parameter(converter=_read_lengths, n_tokens=1, negative="", metavar="LIST", show_default=False)
NUMBER = Parameter(converter=_read_number)


@dataclass(frozen=True)
class Flags:
    """What to measure, and settings for this run alone."""

    pp: Annotated[tuple[int, ...] | None, LENGTHS] = None
    """Lengths of synthetic prompts, such as 128,512; by default 128,512,1024 as far as they fit."""

    ctx: Annotated[tuple[int, ...] | None, LENGTHS] = None
    """Contexts to decode from, in tokens; by default 0, an empty one."""

    tg: Annotated[int, NUMBER] = 128
    """Decode steps per run; sampling is not part of them."""

    batch: Annotated[tuple[int, ...], LENGTHS] = (1,)
    """Numbers of sequences to decode at once, such as 1,8, with every context; by default 1."""

    matrix: Annotated[bool, Parameter(negative="")] = False
    """Default to 128,512,2048,4096,8192,20000 for --pp and --ctx, as far as they fit."""

    max_tokens: Annotated[int, NUMBER, Parameter(name=["--max-tokens", "-n"])] = 128
    """Length of the reply to the prompt, sampling included; end tokens do not end it."""

    runs: Annotated[int, NUMBER] = 5
    """Counted runs of each measurement."""

    warmups: Annotated[int, NUMBER] = 2
    """Runs before those, which do not count."""

    device: str | None = None
    """What computes: auto, cpu, gpu, or a number as in gpu:1."""

    kv_cache: Annotated[str | None, Parameter(name=["--kv-cache", "--kv-mode"])] = None
    """Cache of keys and values: auto, q8, bf16 or f32."""

    kv_backend: str | None = None
    """How a GPU gets memory for keys and values: auto, vmm or legacy."""

    tp: Annotated[int | None, WHOLE] = None
    """Devices that share the model, each with a part of every matrix."""

    max_seq: Annotated[int | None, WHOLE] = None
    """Context length in tokens."""

    threads: Annotated[int | None, WHOLE] = None
    """CPU threads."""

    def options(self) -> BenchOptions:
        """Return the measurements that the flags ask for; ValidationError for impossible ones."""
        return BenchOptions(
            pp=self.pp,
            ctx=self.ctx,
            batch=self.batch,
            tg=self.tg,
            max_tokens=self.max_tokens,
            runs=self.runs,
            warmups=self.warmups,
            matrix=self.matrix,
        )

    def settings(self) -> dict[str, Value]:
        """Return the one-shot settings by name."""
        names = ("device", "tp", "kv_cache", "kv_backend", "max_seq", "threads")
        return {name: getattr(self, name) for name in names}


DEFAULTS = Flags()


def bench(
    model: str,
    /,
    *prompt: str,
    flags: Annotated[Flags, Parameter(name="*")] = DEFAULTS,
    prompt_file: Path | None = None,
    json: Annotated[bool, Parameter(name=["--json", "-j"], negative="")] = False,
) -> None:
    """Measure how fast a model runs: synthetic prefills and decodes, then a real prompt and its greedy reply.

    Sampling is left out of the decode figures of synthetic tokens and is part of the reply's figures.

    Parameters
    ----------
    model
        Tag, installed name or path of a model.
    prompt
        Words of the real prompt, joined by spaces; a built-in paragraph without them.
    prompt_file
        File with the real prompt, in UTF-8; its text is used as it is.
    json
        Print one JSON object with every sample instead of the tables.
    """
    # a mistake on the command line is found before seconds are spent on torch and weights
    options, given = flags.options(), flags.settings()
    config = load_settings()
    for name in given:
        config.resolve(name, cli=given)
    text = prompt_text(prompt, prompt_file)
    local = open_library(config).require(model)
    resolve = model_settings(config, given, local)
    llm = load_llm(local.path, lambda name: resolve(name).value, slots=options.slots)
    workload = make_workload(llm, text)
    plan = plan_bench(options, len(workload.prompt), llm.loaded.max_seq)
    if (found := find_server(config)) is not None:
        busy = f"a server is up at {found.remote.address}: what it does meanwhile slows these runs down"
        plan = replace(plan, warnings=(*plan.warnings, busy))
    facts = _facts(local, llm) | _prompt_facts(text, len(workload.prompt))
    _announce(facts, plan)

    # imports torch
    from hipfire.bench.measure import measure  # noqa: PLC0415

    done = measure(llm.loaded.runner, plan, workload, progress=log.logger().info)
    if json:
        repeats = {"runs": plan.runs, "warmups": plan.warmups, "warnings": list(plan.warnings)}
        write_json(facts | repeats | done.to_json())
    else:
        _print(done)


def prompt_text(words: Sequence[str], file: Path | None) -> str:
    """Return the prompt: the words, or the file's text as it is, or a built-in paragraph.

    Raises ValidationError for both, for a file that cannot be read, is empty or too long, and for text that
    is not UTF-8.
    """
    if file is None:
        text = " ".join(words) or DEFAULT_PROMPT
        try:
            # under some locales Python reads arguments that are no text as lone surrogates
            text.encode()
        except UnicodeError as error:
            raise ValidationError("the prompt is not valid UTF-8 text", hint="convert it first") from error
        return text
    if words:
        raise ValidationError("the prompt cannot be both words and --prompt-file", hint="give one of them")
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValidationError(
            f"--prompt-file: {file} cannot be read: {reason}", hint="give the path of a text file"
        ) from error
    if not data or len(data) > MAX_PROMPT_BYTES:
        fault = f"is longer than {size_text(MAX_PROMPT_BYTES)}" if data else "is empty"
        raise ValidationError(f"--prompt-file: {file} {fault}", hint="give another text file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(
            f"--prompt-file: {file} is not UTF-8 at byte {error.start}", hint="convert it to UTF-8 first"
        ) from error


def _facts(local: LocalModel, llm: LLM) -> dict[str, Any]:
    loaded = llm.loaded
    return {
        "model": str(local.path),
        "file_bytes": local.nbytes(),
        "architecture": loaded.config.to_hf()["model_type"],
        "device": loaded.device,
        "threads": loaded.threads,
        "kv_mode": loaded.runner.cache.mode.name,
        "kv_backend": loaded.kv_backend,
        "max_seq": loaded.max_seq,
        "memory": loaded.memory(),
        "machine": {
            "platform": host.platform_name(),
            "cpu": host.cpu_facts(),
            "hipfire": __version__,
            "python": platform.python_version(),
            "libraries": library_versions(),
        },
    }


def _prompt_facts(text: str, tokens: int) -> dict[str, Any]:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return {"prompt_tokens": tokens, "prompt_md5": digest, "prompt_chars": len(text)}


def _announce(facts: Mapping[str, Any], plan: BenchPlan) -> None:
    """Write the banner and the warnings to stderr."""
    cpu, notice = facts["machine"]["cpu"], log.logger()
    notice.info(f"{facts['model']}: {facts['architecture']}, {size_text(facts['file_bytes'])}")
    notice.info(f"{cpu['model']}, {cpu['usable_cores']} cores, {facts['threads']} threads")
    notice.info(
        f"kv {facts['kv_mode']}, max_seq {facts['max_seq']}, "
        f"runs {plan.runs}, warm-ups {plan.warmups}, "
        f"prompt of {facts['prompt_tokens']} tokens (md5 {facts['prompt_md5']})"
    )
    backend = "" if facts["kv_backend"] is None else f" ({facts['kv_backend']})"
    memory = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in facts["memory"].items())
    notice.info(f"on {facts['device']}{backend}: {memory}")
    for line in plan.warnings:
        notice.warning(line)


def _print(done: Measurements) -> None:
    for number, table in enumerate(tables(done)):
        write(f"\n{table.title}" if number else table.title)
        write_table(HEADER, table.rows, right=frozenset(range(2, len(HEADER))))
