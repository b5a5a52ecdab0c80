"""`hipfire serve` and `restart`: what the words mean, what the server is told, and starting it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_kit import one_line
from stand_in_kit import free_port

from hipfire.base.config import require_key
from hipfire.base.errors import HipfireError
from hipfire.checkpoint.library import open_library
from hipfire.cli import serve
from hipfire.cli.main import main
from hipfire.cli.remote import Health
from hipfire.cli.serve_words import parse_words
from hipfire.cli.settings import load_settings
from hipfire.engine.turn import Thinking
from hipfire.server.options import ServeOptions

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def model(home: Path, tiny: bytes) -> str:
    """The tag of a model that is installed."""
    (home / "models").mkdir(parents=True)
    (home / "models" / "Tiny.gguf").write_bytes(tiny)
    return "tiny:1m"


def target_of(*words: str, flag: str | None = None) -> tuple[str | None, str, int]:
    config = load_settings()
    target = parse_words(words, flag, config, open_library(config))
    return target.model, target.address.host, target.address.port


@pytest.mark.parametrize("words", [*itertools.permutations(("tiny:1m", "0.0.0.0", "9000"))])
def test_words_come_in_any_order(model: str, words: tuple[str, ...]) -> None:
    assert target_of(*words) == ("tiny:1m", "0.0.0.0", 9000)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (None, "127.0.0.1", 1)),
        (("8080",), (None, "127.0.0.1", 8080)),
        (("localhost",), (None, "localhost", 1)),
        (("::1",), (None, "::1", 1)),
        (("[::1]:8080",), (None, "::1", 8080)),
        (("localhost:8080", "tiny"), ("tiny", "localhost", 8080)),
        (("Tiny.gguf",), ("Tiny.gguf", "127.0.0.1", 1)),
        # a part of a model's name
        (("Tin",), ("Tin", "127.0.0.1", 1)),
    ],
)
def test_a_word_is_known_by_its_form(model: str, words: tuple[str, ...], expected: Any) -> None:
    assert target_of(*words) == expected


def test_settings_stand_in_for_words(model: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HIPFIRE_HOST", "localhost")
    monkeypatch.setenv("HIPFIRE_MODEL", "tiny")
    assert target_of("9000") == ("tiny", "localhost", 9000)
    assert target_of("127.0.0.1:9000", flag="Tiny.gguf") == ("Tiny.gguf", "127.0.0.1", 9000)


def test_a_name_of_the_users_own_comes_before_a_host(model: str, home: Path) -> None:
    (home / "models.toml").write_text(f'[models."mine:8080"]\npath = "{home}/models/Tiny.gguf"\n')
    assert target_of("mine:8080") == ("mine:8080", "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("words", "flag", "parts"),
    [
        (("8080", "9090"), None, ["two ports", "8080 and 9090"]),
        (("localhost:8080", "9090"), None, ["two ports"]),
        (("localhost", "127.0.0.1"), None, ["two hosts"]),
        (("tiny", "tiny:1m"), None, ["two models"]),
        (("tiny",), "tiny:1m", ["two models"]),
        (("0",), None, ["serve.port", "[1, 65535]"]),
        (("65536",), None, ["serve.port"]),
        (("tinny:1m",), None, ["tinny:1m", "tiny:1m"]),
        (("missing.gguf",), None, ["missing.gguf"]),
        (("/no/such/file",), None, ["no such file"]),
    ],
)
def test_words_that_make_no_sense_are_refused(
    model: str, words: tuple[str, ...], flag: str | None, parts: list[str]
) -> None:
    with pytest.raises(HipfireError) as caught:
        target_of(*words, flag=flag)
    assert all(part in caught.value.line() for part in parts), caught.value.line()


@pytest.mark.parametrize("host", ["", "a b", "a\n", "x" * 256, "a\x00"])
def test_a_host_is_one_word(home: Path, host: str) -> None:
    with pytest.raises(HipfireError, match=r"serve\.host"):
        require_key("host").check(host, source="test")


def test_the_server_is_told_flags_then_settings(
    model: str, home: Path, started: list[ServeOptions], monkeypatch: Patch, capsys: Output
) -> None:
    (home / "config.toml").write_text(
        "[serve]\nslots = 2\nmax_queue = 7\nqueue_timeout_ms = 1500\nallow_origins = 'http://a.b, http://c.d'\n"
        "[generation]\ntop_p = 0.5\n[memory]\nmax_seq = 1024\n"
    )
    (home / "token").write_text("0123456789abcdef")
    monkeypatch.setenv("HIPFIRE_SERVE_TOKEN_FILE", str(home / "token"))
    port = free_port()
    words = ["serve", "tiny", str(port), "--slots", "3", "--kv-mode", "q8", "--idle-timeout", "0"]
    assert main([*words, "--no-prewarm", "--allow-request-paths"]) == 0
    assert "hipfire: serving at http://here\n" in capsys.readouterr().err
    (options,) = started
    assert options == replace(
        ServeOptions(
            host="127.0.0.1",
            port=port,
            model="tiny:1m",
            prewarm=False,
            idle_timeout_s=0,
            slots=3,
            max_seq=1024,
            kv_cache="q8",
            max_queue=7,
            queue_timeout_s=1.5,
            token_file=home / "token",
            allow_origins=("http://a.b", "http://c.d"),
            allow_request_paths=True,
        ),
        # built-in defaults: what was set goes before the model file's own values, these come after
        default_sampling=options.default_sampling,
        settings_of=options.settings_of,
    )
    assert (options.default_sampling.temperature, options.default_sampling.top_p) == (0.3, 0.8)


def test_every_model_has_settings_of_its_own(
    model: str, home: Path, started: list[ServeOptions], monkeypatch: Patch
) -> None:
    (home / "config.toml").write_text("[generation]\ntop_p = 0.5\n[prompt]\nsystem = 'All.'\n")
    (home / "models.toml").write_text(
        '[models."tiny:1m"]\n'
        "generation = {max_tokens = 99, top_k = 4}\nprompt = {system = 'One.'}\n"
        "memory = {max_seq = 2048, kv_cache = 'q8'}\nreasoning = {mode = 'on', budget = 'low'}\n"
    )
    other = home / "models" / "Other.gguf"
    other.write_bytes((home / "models" / "Tiny.gguf").read_bytes())
    assert main(["serve", str(free_port()), "--max-seq", "4096"]) == 0
    (options,) = started
    library = open_library(load_settings())
    tiny, plain = (options.settings_of(library.require(name)) for name in ("tiny", "Other"))
    # the temperature is the card's
    assert tiny.sampling == {"temperature": 0.5, "top_p": 0.5, "top_k": 4}
    assert (tiny.max_tokens, tiny.system, tiny.thinking) == (99, "One.", Thinking(True, None, 512))
    assert tiny.load == {"max_seq": 4096, "kv_mode": "q8"}
    assert plain.sampling == {"top_p": 0.5}
    assert (plain.max_tokens, plain.system, plain.thinking) == (None, "All.", Thinking())
    assert plain.load == {"max_seq": 4096}


def test_no_prewarm_by_variable(model: str, started: list[ServeOptions], monkeypatch: Patch) -> None:
    monkeypatch.setenv("HIPFIRE_NO_PREWARM", "1")
    assert main(["serve", "tiny", str(free_port())]) == 0
    assert started[0].prewarm is False


def test_a_wrong_flag_is_found_before_anything_happens(
    model: str, started: list[ServeOptions], capsys: Output
) -> None:
    assert main(["serve", "tiny", str(free_port()), "--kv-mode", "q9"]) == 1
    one_line(capsys.readouterr(), "memory.kv_cache", "q8")
    assert started == []


def test_a_path_is_served_by_its_path(
    model: str, tmp_path: Path, started: list[ServeOptions], monkeypatch: Patch
) -> None:
    path = tmp_path / "My model.gguf"
    path.write_bytes(b"GGUF")
    assert main(["serve", str(path), str(free_port())]) == 0
    assert started[0].model == str(path)


def test_a_detached_server_gets_the_same_options(
    model: str, started: list[ServeOptions], monkeypatch: Patch, capsys: Output
) -> None:
    commands: list[list[str]] = []

    def start(words: list[str], *_: Any) -> Any:
        commands.append(words)
        return Health("ok", 77, "t", None, None)

    monkeypatch.setattr(serve, "start_in_background", start)
    flags = [
        "--slots",
        "2",
        "--max-seq",
        "2048",
        "--no-prewarm",
        "--no-allow-request-paths",
        "--allow-open-bind",
    ]
    words = ["serve", f"localhost:{free_port()}", "tiny", *flags, "--allow-origins", "http://a.b"]
    assert main([*words, "-d"]) == 0
    assert "as process 77; log: " in capsys.readouterr().err
    assert main(words) == 0
    assert commands[0][1:4] == ["-m", "hipfire.cli", "serve"]
    assert main(commands[0][3:]) == 0
    foreground, background_ = started
    assert replace(background_, settings_of=foreground.settings_of) == foreground
    assert foreground.slots == 2
