"""`hipfire pull`, `list`, `rm`, `verify` and `inspect` from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fault_server import Behaviour, serving
from samples import BODY, card, write_gguf
from shell import spawn, use_registry

from hipfire.checkpoint.library import manifest_path
from hipfire.cli.main import main

ESCAPE = "\x1b"


def test_pull_verify_list_rm(home: Path, tiny: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "models" / "Tiny.gguf"
    assert main(["pull", "tiny"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{path}\n"
    assert "installed tiny:1m" in shown.err
    assert ESCAPE not in shown.err
    assert "\r" not in shown.err
    assert len(shown.err.splitlines()) <= 4
    assert path.read_bytes() == tiny
    assert main(["pull", "tiny:1m"]) == 0
    assert "already installed" in capsys.readouterr().err
    assert main(["verify", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("tiny:1m ok sha256 ")
    assert main(["list", "-j"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["models"][0] | {"path": ""} == {
        "name": "tiny:1m", "path": "", "size_bytes": len(tiny), "format": "Q4_1", "registry_tag": "tiny:1m",
    }  # fmt: skip
    assert listed["registry"][0]["downloaded"] is True
    path.write_bytes(tiny[:-1] + b"\1")
    assert main(["verify", "tiny"]) == 1
    assert "sha256 is" in capsys.readouterr().err
    assert main(["rm", "tiny", "-y"]) == 0
    assert "removed 2 file(s)" in capsys.readouterr().err
    assert not path.exists()
    assert main(["rm", "tiny", "-y"]) == 1


def test_pull_quantizes_on_arrival(
    home: Path, tiny: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(source: Path, fmt: str, out: Path, *, progress: Any) -> None:
        progress.start(len(tiny), 1)
        out.write_bytes(source.read_bytes()[::-1] + fmt.encode())
        progress.tensor("t", len(tiny))
        progress.done()

    monkeypatch.setattr("hipfire.quantize.pipeline.quantize", fake)
    out = home / "models" / "tiny-1m.hf4"
    assert main(["pull", "tiny", "--format", "hf4"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_bytes() == tiny[::-1] + b"hf4"
    assert main(["verify", "tiny:1m-hf4"]) == 0
    assert capsys.readouterr().out.startswith("tiny:1m-hf4 ok sha256 ")
    out.write_bytes(b"kept")
    assert main(["pull", "tiny", "--format", "hf4"]) == 0
    assert "already there" in capsys.readouterr().err
    assert out.read_bytes() == b"kept"
    # a record that is there is not replaced: it says that the file changed
    assert main(["verify", "tiny:1m-hf4"]) == 1
    # as after a call that ended before it wrote the record
    manifest_path(out).unlink()
    assert main(["pull", "tiny", "--format", "hf4"]) == 0
    assert main(["verify", "tiny:1m-hf4"]) == 0
    capsys.readouterr()

    def stopped(*_: object, **__: object) -> None:
        assert not manifest_path(out).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("hipfire.quantize.pipeline.quantize", stopped)
    assert main(["pull", "tiny", "--format", "hf4", "--force"]) == 130
    assert main(["rm", "tiny-hf4", "-y"]) == 0
    assert (home / "models" / "Tiny.gguf").exists()


@pytest.mark.parametrize(
    ("answer", "kept"), [("n", True), ("", True), ("yep", True), ("y", False), ("YES", False)]
)
def test_rm_asks(home: Path, answer: str, kept: bool) -> None:
    (home / "models").mkdir(parents=True)
    path = home / "models" / "mine.gguf"
    path.write_bytes(b"x")
    done = spawn("rm", "mine", stdin=answer)
    assert done.returncode == 0
    assert "Remove 1 file(s)? [y/N]" in done.stderr
    assert done.stdout == ""
    assert path.exists() is kept
    assert ("cancelled" in done.stderr) is kept


def test_rm_clears_what_an_unfinished_pull_left(
    home: Path, tiny: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    staging = home / "models" / ".pull" / "Tiny.gguf"
    staging.mkdir(parents=True)
    (staging / "chunk-000.whl").write_bytes(b"broken")
    (home / "models" / ".pull" / "Tiny.gguf.lock").write_bytes(b"")
    assert main(["rm", "tiny", "-y"]) == 0
    assert not staging.exists()
    assert "removed 1 file(s)" in capsys.readouterr().err
    assert main(["pull", "tiny"]) == 0


def test_rm_never_removes_files_outside(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "precious.gguf"
    path.write_bytes(b"x")
    assert main(["rm", str(path), "-y"]) == 1
    assert "outside" in capsys.readouterr().err
    assert path.exists()


def test_empty_library_gives_a_hint_and_what_there_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr()
    assert "hipfire pull smollm2:135m" in shown.err
    assert "Available models:" in shown.out
    rows = {line.split()[0]: line for line in shown.out.splitlines()[2:]}
    assert "needs a later version" not in rows["smollm2:135m"]
    assert {"gemma3:270m", "qwen3.5:0.8b"} <= set(rows)


def test_family_without_a_model_file_is_marked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [{"kind": "hf", "repo": None, "file": "t.mq4"}]
    models = {
        f"{name}:1m": card(f"{name}.mq4", BODY, source, family=name) for name in ("llama", "no_such_family")
    }
    use_registry(tmp_path, monkeypatch, models)
    assert main(["list", "-r", "-j"]) == 0
    cards = {each["tag"]: each for each in json.loads(capsys.readouterr().out)["registry"]}
    assert cards["llama:1m"]["runnable"] is True
    assert cards["no_such_family:1m"]["runnable"] is False


def test_interrupted_pull_exits_130_and_continues(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = os.urandom(1 << 20)
    source = [{"kind": "hf", "repo": "me/tiny", "file": "tiny.mq4"}]
    use_registry(tmp_path, monkeypatch, {"tiny:1m": card("tiny.mq4", body, source)})
    stalled = Behaviour(body, drop_after=1 << 19, hold_open=True)
    command = [sys.executable, "-m", "hipfire.cli", "pull", "tiny"]
    part = home / "models" / ".pull" / "tiny.mq4" / "hf.part"
    with serving(stalled) as base:
        env = {**os.environ, "HIPFIRE_HF_BASE": base, "HF_HOME": str(tmp_path / "hub")}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
        )
        while process.poll() is None and not (part.exists() and part.stat().st_size >= 1 << 18):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert out == ""
        assert "Traceback" not in err
        assert err.splitlines()[-1] == "hipfire: interrupted"
        kept = part.stat().st_size
        stalled.drop_after = None
        done = spawn("pull", "tiny", env=env)
    assert done.returncode == 0, done.stderr
    assert stalled.requests[-1]["range"] == f"bytes={kept}-"
    assert (home / "models" / "tiny.mq4").read_bytes() == body


def test_inspect_counts_bits(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "模型 с пробелом.gguf")
    assert main(["inspect", str(path), "-j"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["architecture"], facts["weights"]) == ("gguf", "llama", 4 * 64 + 64 + 2 * 32)
    by_name = {each["name"]: each for each in facts["tensors"]}
    assert by_name["token_embd.weight"] == {
        "name": "token_embd.weight",
        "qtype": "GGUF_Q8_0",
        "shape": [4, 64],
        "nbytes": 272,
        "bits_per_weight": 8.5,
    }
    assert facts["totals"]["GGUF_F32"] == {
        "tensors": 1,
        "weights": 64,
        "nbytes": 256,
        "bits_per_weight": 32.0,
    }
    assert facts["bits_per_weight"] == round(8 * (272 + 256 + 128) / 384, 4)
    assert main(["inspect", str(path), "--tensors", "1"]) == 0
    text = capsys.readouterr().out
    assert "token_embd.weight" in text
    assert "output_norm.weight" not in text
    assert "... 2 more tensors" in text
    (tmp_path / "junk.gguf").write_bytes(b"not a model at all")
    assert main(["inspect", str(tmp_path / "junk.gguf")]) == 1
