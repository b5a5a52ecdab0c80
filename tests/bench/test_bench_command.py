"""`hipfire bench` on a tiny model file: tables, JSON, banner, and everything that it refuses."""

from __future__ import annotations

import hashlib
import json
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from hipfire.bench import measure as timing
from hipfire.cli.bench import DEFAULT_PROMPT, MAX_PROMPT_BYTES, prompt_text
from hipfire.cli.main import main
from hipfire.engine import llm as engine
from hipfire.engine.llm import LLM
from tiny_models import tiny_model, write_gguf

Output = pytest.CaptureFixture[str]
# seconds of work become milliseconds
QUICK = ("--pp", "8,16", "--tg", "4", "-n", "3", "--runs", "3", "--warmups", "1", "--max-seq", "1024")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", tiny_model("llama"))


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any measuring an error."""

    def worked(*_: object, **__: object) -> None:
        raise RuntimeError("work began")

    monkeypatch.setattr(timing, "measure", worked)


def refused(shown: Any, *parts: str) -> None:
    """Check an error: nothing on stdout, a last line on stderr with these parts, no traceback."""
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    assert last.startswith("hipfire: ")
    assert all(part in last for part in parts), last
    assert "internal error" not in last
    assert "Traceback" not in shown.err


def test_tables_go_to_stdout_and_the_banner_to_stderr(home: Path, model: Path, capsys: Output) -> None:
    words = ["bench", str(model), *QUICK, "--ctx", "0,6", "--batch", "1,2", "--threads", "1"]
    assert main(words) == 0
    shown = capsys.readouterr()
    prefill, decode, reply = (part.splitlines() for part in shown.out.split("\n\n"))
    header = ["TEST", "UNIT", "MEDIAN", "MEAN", "MIN", "MAX", "STDEV"]
    assert prefill[0].startswith("Prefill")
    assert [line.split()[:2] for line in prefill[2:]] == [["pp8", "tok/s"], ["pp16", "tok/s"]]
    assert decode[0].startswith("Decode")
    assert "without sampling" in decode[0]
    names = [f"tg4 ctx {ctx} batch {batch}" for ctx in (0, 6) for batch in (1, 2)]
    assert [line.rsplit(maxsplit=6)[0].strip() for line in decode[2:]] == [n for n in names for _ in "ab"]
    assert [line.split()[5] for line in decode[2:]] == ["tok/s", "ms/step"] * 4
    assert reply[0].endswith("greedy reply of 3, with sampling")
    assert [tuple(line.split()[:2]) for line in reply[2:]] == [
        ("Prefill", "tok/s"), ("TTFT", "ms"), ("Decode", "tok/s"), ("Wall", "tok/s"), ("Decode", "ms/token"),
    ]  # fmt: skip
    for lines in (prefill, decode, reply):
        assert lines[1].split() == header
        for line in lines[2:]:
            median, mean, low, high, _ = (float(word) for word in line.split()[-5:])
            assert 0 < low <= min(median, mean)
            assert max(median, mean) <= high
    tokens = len(LLM(model).encode_chat([{"role": "user", "content": DEFAULT_PROMPT}]))
    assert f"Prompt of {tokens} tokens" in reply[0]
    # whoever is first on a machine is told of kernels before that
    banner = [line for line in shown.err.splitlines() if "compiling kernels" not in line]
    assert str(model) in banner[0]
    assert "llama" in banner[0]
    assert "1 threads" in banner[1]
    digest = hashlib.md5(DEFAULT_PROMPT.encode()).hexdigest()
    assert banner[2] == (
        f"hipfire: kv bf16, max_seq 1024, runs 3, warm-ups 1, prompt of {tokens} tokens (md5 {digest})"
    )
    assert "warning" not in shown.err


def test_json_holds_everything(home: Path, model: Path, tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("caf\u00e9 \u6f22  \r\n".encode())
    flags = [*QUICK, "--ctx", "5", "--batch", "1,2", "--kv-cache", "q8", "--threads", "1", "--device", "cpu"]
    assert main(["bench", str(model), *flags, "--prompt-file", str(file), "-j"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["model"], found["file_bytes"]) == (str(model), model.stat().st_size)
    assert (found["architecture"], found["threads"]) == ("llama", 1)
    assert (found["kv_mode"], found["max_seq"]) == ("q8", 1024)
    assert (found["device"], found["kv_backend"]) == ("cpu", None)
    assert found["memory"]["caches"] == 2 * 1024 * 272  # of 2 layers, 2 heads of 32 codes with a scale
    assert set(found["memory"]) == {"weights", "caches", "scratch"}
    assert (found["runs"], found["warmups"]) == (3, 1)
    assert found["machine"]["cpu"]["usable_cores"] >= 1
    assert found["machine"]["libraries"]["torch"] == metadata.version("torch")
    assert set(found["machine"]) == {"platform", "cpu", "hipfire", "python", "libraries"}
    # the bytes are those of the file: nothing is tidied
    assert found["prompt_md5"] == hashlib.md5(file.read_bytes()).hexdigest()
    assert found["prompt_chars"] == len("caf\u00e9 \u6f22  \r\n")
    message = [{"role": "user", "content": "caf\u00e9 \u6f22  \r\n"}]
    assert found["prompt_tokens"] == len(LLM(model).encode_chat(message))
    (warning,) = found["warnings"]
    assert "launch overhead" in warning
    assert f"hipfire: warning: {warning}" in shown.err.splitlines()
    assert [each["tokens"] for each in found["prefill"]] == [8, 16]
    assert [(each["batch"], each["ctx"], each["tokens"]) for each in found["decode"]] == [
        (1, 5, 4),
        (2, 5, 4),
    ]
    assert found["reply"]["tokens"] == 3
    for each in (*found["prefill"], *found["decode"]):
        assert len(each["seconds"]) == 3
        counted = each["tokens"] * each.get("batch", 1)
        assert each["tok_s"]["samples"] == [counted / seconds for seconds in each["seconds"]]
        assert each["tok_s"]["median"] == statistics.median(each["tok_s"]["samples"])
    for run in found["reply"]["seconds"]:
        assert 0 < run["prefill"] <= run["first_token"] < run["last_token"]


def test_words_are_the_prompt_and_default_lengths_are_bounded(
    home: Path, model: Path, capsys: Output
) -> None:
    flags = ["--tg", "2", "-n", "2", "--runs", "1", "--warmups", "0", "--max-seq", "600", "--kv-mode", "f32"]
    assert main(["bench", str(model), "two", "words", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompt_chars"], found["kv_mode"]) == (len("two words"), "f32")
    assert [each["tokens"] for each in found["prefill"]] == [128, 512]
    assert "pp 1024 left out: the context holds 600 tokens" in found["warnings"]
    assert found["reply"]["wall_tok_s"]["stdev"] is None


def test_settings_of_the_files_apply(home: Path, model: Path, capsys: Output) -> None:
    for key, value in (("kv_cache", "f32"), ("max_seq", "700")):
        assert main(["config", "set", key, value]) == 0
    flags = ["--pp", "4", "--tg", "2", "-n", "2", "--runs", "1", "--warmups", "0"]
    assert main(["bench", str(model), "hi", *flags, "-j"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kv_mode"], found["max_seq"]) == ("f32", 700)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--pp", "0"], "pp: 0"), (["--pp", "128,-1"], "pp: -1"), (["--ctx", "-2"], "ctx: -2"),
        (["--batch", "0"], "batch: 0"), (["--tg", "0"], "tg: 0"), (["-n", "1"], "max_tokens: 1"),
        (["--runs", "0"], "runs: 0"), (["--warmups", "-1"], "warmups: -1"),
        (["--kv-cache", "q3"], "kv_cache"), (["--max-seq", "9"], "max_seq"), (["--threads", "0"], "threads"),
        (["--device", "tpu"], "hardware.device"), (["--kv-backend", "paged"], "kv_backend"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_before_the_model_is_loaded(
    home: Path, model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, flags: list[str], part: str
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise RuntimeError("a model was loaded")

    monkeypatch.setattr(engine, "load_model", loaded)
    assert main(["bench", str(model), *flags]) == 1
    refused(capsys.readouterr(), part)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--pp", "128,,512"], "128,,512"), (["--pp", ""], "not a list"), (["--ctx", "1.5"], "1.5"),
        (["--batch", "many"], "many"), (["--tg", "1.5"], "1.5"), (["--pp"], "pp"),
        (["--runs", "auto"], "auto"), (["--nope"], "--nope"), (["--redline"], "--redline"),
        (["--spec", "auto"], "--spec"), (["--concurrency", "1"], "--concurrency"),
        (["--backend", "both"], "--backend"), (["--workload", "both"], "--workload"),
    ],
)  # fmt: skip
def test_words_that_are_no_usage_exit_2(
    home: Path, model: Path, capsys: Output, flags: list[str], part: str
) -> None:
    assert main(["bench", str(model), *flags]) == 2
    refused(capsys.readouterr(), part, "hipfire bench --help")


@pytest.mark.parametrize(("name", "part"), [("./gone.gguf", "no such file"), ("no-such-tag", "no-such-tag")])
def test_an_unknown_model_is_refused(
    home: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", name]) == 1
    refused(capsys.readouterr(), part)


@pytest.mark.parametrize(
    ("flags", "numbers", "part"),
    [
        (["--pp", "8,1025"], "1025 tokens requested but the context holds 1024", "pp 1025"),
        (["--ctx", "1000"], "1128 tokens requested but the context holds 1024", "ctx 1000"),
        (["-n", "1020"], "tokens requested but the context holds 1024", "lower max_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_measuring(
    home: Path, model: Path, capsys: Output, idle: None, flags: list[str], numbers: str, part: str
) -> None:
    assert main(["bench", str(model), "hi", "--max-seq", "1024", *flags]) == 1
    refused(capsys.readouterr(), numbers, part)


def test_a_batch_that_needs_too_much_memory_is_refused(
    home: Path, model: Path, capsys: Output, idle: None
) -> None:
    assert main(["bench", str(model), "hi", "--batch", "1,100000000"]) == 1
    refused(capsys.readouterr(), "MiB are available")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"ab\xffcd", "not UTF-8 at byte 2"),
        (b"", "is empty"),
        (None, "No such file"),
        ("folder", "Is a directory"),
    ],
)
def test_a_bad_prompt_file_is_refused(
    home: Path,
    model: Path,
    tmp_path: Path,
    capsys: Output,
    idle: None,
    content: bytes | str | None,
    part: str,
) -> None:
    file = tmp_path / "prompt.txt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    assert main(["bench", str(model), "--prompt-file", str(file)]) == 1
    refused(capsys.readouterr(), "--prompt-file", "prompt.txt", part)


def test_a_prompt_file_without_end_is_not_read_to_the_end(
    home: Path, model: Path, capsys: Output, idle: None
) -> None:
    assert main(["bench", str(model), "--prompt-file", "/dev/zero"]) == 1
    refused(capsys.readouterr(), "longer than 16.0 MiB")
    assert MAX_PROMPT_BYTES == 16 * 1024 * 1024


def test_both_kinds_of_prompt_are_refused(
    home: Path, model: Path, tmp_path: Path, capsys: Output, idle: None
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hi")
    assert main(["bench", str(model), "hello", "--prompt-file", str(file)]) == 1
    refused(capsys.readouterr(), "cannot be both")


def test_words_that_are_no_text_are_refused(home: Path, model: Path, capsys: Output, idle: None) -> None:
    assert main(["bench", str(model), "a\udcff"]) == 1
    refused(capsys.readouterr(), "not valid UTF-8")


def test_the_built_in_prompt_is_used_without_words() -> None:
    assert prompt_text([], None) == DEFAULT_PROMPT
    assert prompt_text(["a", " b"], None) == "a  b"


def test_an_interrupt_ends_the_command_cleanly(
    home: Path, model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "time_decode", interrupt)
    assert main(["bench", str(model), "hi", *QUICK, "--json"]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == "hipfire: interrupted"


def test_help_says_where_sampling_counts(home: Path, capsys: Output) -> None:
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Usage: hipfire bench")
    assert "sampling is not part of them" in text
    assert "sampling included" in text
    assert "\x1b" not in text
