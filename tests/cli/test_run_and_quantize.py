"""`hipfire run` and `hipfire quantize`: what they refuse, and what quantizing shows and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_kit import GREEDY, one_line

from hipfire.checkpoint.hfq import HfqFile
from hipfire.cli.main import main
from hipfire.cli.progress import TensorProgress
from tiny_models import tiny_model, write_folder

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that never ends a greedy reply by itself, with a template; the dots belong to its name."""
    return write_folder(tmp_path_factory.mktemp("cli") / "Tiny-1.5-0.3B", tiny_model("llama"))


BAD_VALUES = [
    (["--temp", "9"], "temperature"), (["--temp", "nan"], "temperature"), (["--top-p", "1.5"], "top_p"),
    (["--min-p", "-0.1"], "min_p"), (["--repeat-penalty", "0.5"], "repeat_penalty"),
    (["--presence-penalty", "3"], "presence_penalty"), (["--frequency-penalty", "-3"], "frequency_penalty"),
    (["--seed", "-1"], "seed"), (["--max-tokens", "-5"], "max_tokens"), (["--stop", ""], "stop"),
    (["--kv-mode", "q3"], "kv_cache"), (["--max-seq", "0"], "max_seq"), (["--threads", "0"], "threads"),
    (["--device", "cuda"], "hardware.device"), (["--kv-backend", "paged"], "kv_backend"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "part"), BAD_VALUES)
@pytest.mark.parametrize("model", ["folder", "absent"])
def test_bad_values_are_refused_before_any_work(
    home: Path, folder: Path, tiny: bytes, capsys: Output, flags: list[str], part: str, model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def worked(*_: object, **__: object) -> None:
        raise RuntimeError("work began")

    monkeypatch.setattr("hipfire.cli.pull.fetch_card", worked)
    monkeypatch.setattr("hipfire.engine.llm.load_model", worked)
    assert main(["run", str(folder) if model == "folder" else "tiny:1m", "hi", *flags]) == 1
    one_line(capsys.readouterr(), part)


@pytest.mark.parametrize(
    ("flags", "part"),
    [(["--temp", "warm"], "warm"), (["--nope"], "--nope"), (["-n", "1.5"], "1.5"), ([], "run")],
)
def test_words_that_are_no_usage_exit_2(
    home: Path, folder: Path, capsys: Output, flags: list[str], part: str
) -> None:
    words = ["run", *([str(folder), "hi"] if flags else []), *flags]
    assert main(words) == 2
    one_line(capsys.readouterr(), part, "hipfire run --help")


@pytest.mark.parametrize(
    ("name", "part"), [("./gone.gguf", "gone.gguf"), ("no-such-tag", "no-such-tag"), ("../x", "../x")]
)
@pytest.mark.parametrize("command", ["run", "quantize"])
def test_missing_models(
    home: Path,
    tmp_path: Path,
    capsys: Output,
    command: str,
    name: str,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, name]) == 1
    one_line(capsys.readouterr(), Path(part).name)


def test_a_damaged_model_is_one_line(home: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    for command in (["run"], ["quantize", "-o", str(tmp_path / "out")]):
        assert main([command[0], str(tmp_path / "m.gguf"), *command[1:]]) == 1
        one_line(capsys.readouterr(), "m.gguf")
    assert not (tmp_path / "out").exists()


def test_quantize_shows_a_table(home: Path, folder: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "m.hf4"
    assert main(["quantize", str(folder), "--format", "hf4", "-o", str(out)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split() == [
        "format",
        "tensors",
        "weights",
        "bytes",
        "bits/weight",
        "relative",
        "RMS",
        "error",
    ]
    with HfqFile.open(out) as container:
        infos = list(container.tensors.values())
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert set(rows) == {"F16", "Q8F16", "HFQ4G256", "HFQ4G128", "all"}
    assert rows["all"][:3] == [
        str(len(infos)), str(sum(info.numel for info in infos)), str(sum(info.nbytes for info in infos)),
    ]  # fmt: skip
    assert rows["F16"][3:] == ["16.000", "-"]
    assert 0.05 < float(rows["HFQ4G256"][4]) < 0.15
    assert lines[-1].startswith(f"{out}: ")
    assert "(21 tensors)" in shown.err
    assert "\x1b" not in shown.err + shown.out


def test_quantize_writes_json(home: Path, folder: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "m.q8"
    assert main(["quantize", str(folder), "--format", "Q8F16", "-o", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {
        "source", "output", "format", "seconds", "file_bytes", "formats", "total", "skipped", "mtp",
    }  # fmt: skip
    assert (shown["source"], shown["output"], shown["format"]) == (str(folder), str(out), "q8")
    assert shown["file_bytes"] == out.stat().st_size
    with HfqFile.open(out) as container:
        assert container.metadata["hipfire_quant_recipe"] == "q8"


def test_quantize_keeps_an_existing_file_unless_forced(
    home: Path, folder: Path, tmp_path: Path, capsys: Output
) -> None:
    out = tmp_path / "m"
    out.write_bytes(b"mine")
    words = ["quantize", str(folder), "--format", "q8", "-o", str(out)]
    assert main(words) == 1
    one_line(capsys.readouterr(), str(out), "--force")
    assert out.read_bytes() == b"mine"
    assert main([*words, "--force"]) == 0
    with HfqFile.open(out) as container:
        assert len(container.tensors) == 21


def test_the_default_name_keeps_the_dots_of_a_folder(
    home: Path, folder: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", str(folder), "--format", "hf4"]) == 0
    assert main(["quantize", "Tiny-1.5-0.3B.hf4", "--format", "f16"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Tiny-1.5-0.3B.f16", "Tiny-1.5-0.3B.hf4"]
    capsys.readouterr()
    assert main(["run", "./Tiny-1.5-0.3B.hf4", "x", "-n", "4", *GREEDY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4


def test_an_unknown_format_is_found_first(home: Path, folder: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "m"
    out.write_bytes(b"mine")
    assert main(["quantize", str(folder), "--format", "mq44", "-o", str(out)]) == 1
    shown = capsys.readouterr()
    one_line(shown, "mq44", "did you mean mq4?")
    assert len(shown.err.splitlines()) == 1


def test_tensors_that_are_left_out_are_named(home: Path, tmp_path: Path, capsys: Output) -> None:
    source = write_folder(tmp_path / "src", tiny_model("llama"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert main(["quantize", str(source), "--format", "q8", "-o", str(tmp_path / "m")]) == 0
    assert "left out: lm_head.weight" in capsys.readouterr().err


def test_interrupting_quantize_leaves_no_half_file(
    home: Path, folder: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "m"
    out.parent.mkdir()
    out.write_bytes(b"mine")

    def interrupt(self: TensorProgress, name: str, nbytes: int) -> None:
        if "layers.1" in name:
            assert len(list(out.parent.iterdir())) == 2
            raise KeyboardInterrupt

    monkeypatch.setattr(TensorProgress, "tensor", interrupt)
    assert main(["quantize", str(folder), "--format", "q8", "-o", str(out), "--force"]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == "hipfire: interrupted"
    assert list(out.parent.iterdir()) == [out]
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize("command", ["run", "quantize"])
def test_help_describes_every_flag(home: Path, capsys: Output, command: str) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: hipfire {command}")
    flags = {
        "run": ["--temp", "--top-p", "--stop", "--system", "--raw", "--no-stream", "--json", "--seed"],
        "quantize": ["--format", "--out", "--force", "--device", "--json"],
    }
    assert all(flag in text for flag in flags[command])
    assert "\x1b" not in text
