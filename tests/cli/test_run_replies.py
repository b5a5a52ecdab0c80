"""`hipfire run` on tiny models: what goes to stdout and to stderr, prompts, lengths, Ctrl-C, closed pipes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_kit import GREEDY, LENGTH, answer, one_line
from shell import spawn

from hipfire.cli.main import main
from tiny_models import tiny_model, write_folder

Output = pytest.CaptureFixture[str]
PROGRAM = [sys.executable, "-c", "import sys; from hipfire.cli.main import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that never ends a greedy reply by itself, with a template; the dots belong to its name."""
    return write_folder(tmp_path_factory.mktemp("cli") / "Tiny-1.5-0.3B", tiny_model("llama"))


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """The same model without a chat template and without ChatML tokens."""
    path = Path(shutil.copytree(folder, folder.with_name("base")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text().replace("<|im_", "<|other_")
        (path / name).write_text(text)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_reply_goes_to_stdout_and_notes_to_stderr(home: Path, folder: Path, capsys: Output) -> None:
    expected = answer(folder, "Hello AB")
    assert main(["run", str(folder), "Hello", "AB", *GREEDY, "-n", str(LENGTH)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{expected}\n"
    assert "[llama] 256d 2L 264 vocab" in shown.err
    assert f"[{LENGTH} tok, " in shown.err
    assert shown.err.rstrip().endswith("length]")
    assert "\x1b" not in shown.err


def test_no_stream_prints_the_same_text(home: Path, folder: Path, capsys: Output) -> None:
    words = ["run", str(folder), "x", *GREEDY, "-n", "9"]
    assert main(words) == 0
    streamed = capsys.readouterr().out
    assert main([*words, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed


def test_json_is_one_object(home: Path, folder: Path, capsys: Output) -> None:
    words = ["run", str(folder), "x", "-t", "0.9", "--seed", "7", "-n", "12", "--json"]
    results = []
    for _ in range(2):
        assert main(words) == 0
        results.append(json.loads(capsys.readouterr().out))
    shown = results[0]
    assert set(shown) == {
        "content", "tokens", "prompt_tokens", "tok_s", "prefill_s", "finish_reason", "seed",
    }  # fmt: skip
    assert (shown["tokens"], shown["seed"]) == (12, 7)
    assert shown["finish_reason"] in ("stop", "length")
    assert shown["tok_s"] > 0
    # user turn: 4 + 1 + 1 + 2 tokens around one letter; the assistant's opening has 11
    template = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert shown["prompt_tokens"] == len(template.replace("<|im_start|>", "S").replace("<|im_end|>", "E"))
    assert results[1]["content"] == shown["content"]


def test_a_seed_changes_the_draw_and_is_reported(home: Path, folder: Path, capsys: Output) -> None:
    seen = set()
    for seed in ("1", "2", "3"):
        assert main(["run", str(folder), "x", "-t", "1.5", "--seed", seed, "-n", "12", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["seed"] == int(seed)
        seen.add(shown["content"])
    assert len(seen) > 1
    assert main(["run", str(folder), "x", "-t", "1.5", "-n", "12", "--json"]) == 0
    free = json.loads(capsys.readouterr().out)
    again = ["run", str(folder), "x", "-t", "1.5", "-n", "12", "--json", "--seed", str(free["seed"])]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out)["content"] == free["content"]


def test_a_stop_text_ends_the_reply(home: Path, folder: Path, capsys: Output) -> None:
    words = ["run", str(folder), "x", *GREEDY, "-n", str(LENGTH)]
    assert main(words) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    mark = whole[5:7]
    assert main([*words, "--stop", "never seen", "--stop", mark, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["content"] == whole[: whole.index(mark)]
    assert shown["finish_reason"] == "stop"


def test_the_prompt_can_come_from_stdin(home: Path, folder: Path) -> None:
    done = spawn("run", str(folder), "-", *GREEDY, "-n", "8", "--json", stdin="from a\npipe é")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["content"] == answer(folder, "from a\npipe é", length=8)
    # two bytes for é, and a control token instead of each marker
    assert shown["prompt_tokens"] == len("Suser\nfrom a\npipe ??E\nSassistant\n")


def test_words_and_stdin_together_are_refused(home: Path, folder: Path, capsys: Output) -> None:
    assert main(["run", str(folder), "5", "-", "3"]) == 1
    one_line(capsys.readouterr(), "standard input", "quotes")
    assert main(["run", str(folder), *GREEDY, "--raw", "-n", "2", "--json", "--", "-", "--nope"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len("- --nope")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_stdin_that_is_not_utf8_is_refused(home: Path, folder: Path, locale: str) -> None:
    env = {**os.environ, "LC_ALL": locale}
    done = subprocess.run(
        [*PROGRAM, "run", str(folder), "-"], input=b"\xff\xfe", capture_output=True, env=env, check=False
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"UTF-8" in done.stderr.splitlines()[-1]
    assert b"internal" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_system_message_and_raw_text_change_the_prompt(home: Path, folder: Path, capsys: Output) -> None:
    sizes = {}
    for name, extra in {"plain": [], "system": ["--system", "be brief"], "raw": ["--raw"]}.items():
        assert main(["run", str(folder), "hey", *GREEDY, "-n", "8", "--json", *extra]) == 0
        sizes[name] = json.loads(capsys.readouterr().out)
    assert sizes["raw"]["prompt_tokens"] == 3
    assert sizes["raw"]["content"] == answer(folder, "hey", raw=True, length=8)
    assert sizes["system"]["prompt_tokens"] == sizes["plain"]["prompt_tokens"] + len("Ssystem\nbe briefE\n")


def test_a_base_model_continues_text_and_says_so(home: Path, base: Path, capsys: Output) -> None:
    assert main(["run", str(base), "hey", *GREEDY, "-n", "8"]) == 0
    shown = capsys.readouterr()
    assert "base model without a chat template" in shown.err
    assert shown.out == f"{answer(base, 'hey', raw=True, length=8)}\n"
    assert main(["run", str(base), "hey", *GREEDY, "-n", "8", "--raw"]) == 0
    again = capsys.readouterr()
    assert again.out == shown.out
    assert "base model" not in again.err


def test_context_overflow_names_both_numbers(home: Path, folder: Path, capsys: Output) -> None:
    words = ["run", str(folder), "x" * 600, "--raw", *GREEDY]
    assert main([*words, "--max-seq", "512"]) == 1
    one_line(capsys.readouterr(), "601 tokens", "512")
    assert main([*words, "--max-seq", "610", "-n", "11"]) == 1
    one_line(capsys.readouterr(), "611 tokens", "610")
    # a length that nobody chose is cut to what fits
    assert main([*words, "--max-seq", "610", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 10
    assert main([*words, "--max-seq", "5000"]) == 1
    one_line(capsys.readouterr(), "5000", "4096")


def test_a_given_flag_beats_the_model_and_the_settings(
    home: Path, folder: Path, tmp_path: Path, capsys: Output
) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "own"))
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 1.7, "top_k": 3, "do_sample": True})
    )
    home.mkdir()
    (home / "config.toml").write_text("[generation]\nmax_tokens = 5\n")
    assert main(["run", str(path), "x", *GREEDY, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["tokens"] == 5
    assert first["content"] == answer(path, "x", length=5)
    assert main(["run", str(path), "x", *GREEDY, "--json", "-n", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c_while_generating_exits_130(home: Path, folder: Path) -> None:
    process = start("run", str(folder), "x", *GREEDY, "-n", "4000")
    assert process.stdout is not None
    # the first piece is out, so the model is generating
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err.splitlines()[-1] == b"hipfire: interrupted"
    assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_run_quietly(home: Path, folder: Path) -> None:
    process = start("run", str(folder), "x", *GREEDY, "-n", "2000")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert err.splitlines() == [b"hipfire: [llama] 256d 2L 264 vocab"]
