"""Flags and settings of the harness: what is refused, what is resolved, and where each value came from."""

from __future__ import annotations

from typing import Any

import pytest

from hipfire.base.errors import HipfireError, UnsupportedError, ValidationError
from hipfire.checkpoint.registry import Card
from hipfire.validate.harness_options import THINKING_CAPS, UsageError, parse
from hipfire.validate.harness_resolve import Resolved, resolve


def card(**changes: Any) -> Card:
    fields: dict[str, Any] = {
        **{"tag": "t:1", "file": "t.gguf", "size_bytes": 1, "sources": (), "family": "llama"},
        **{"arch_id": None, "quant": "q", "min_memory_gb": 1, "desc": "", "license": "", "sha256": "0" * 64},
        "recommended_settings": {"generation.temperature": 0.2, "generation.top_p": 0.9},
        "sampling_profiles": {"coding": {"generation.temperature": 0.1, "generation.repeat_penalty": 1.1}},
    }
    return Card(**(fields | changes))


def settle(*words: str, registry_card: Card | None = None) -> Resolved:
    return resolve(parse(["--model", "m", *words]), registry_card, "file name")


@pytest.mark.parametrize(
    "words",
    [
        ["--draft", "x"],
        ["--draft=x"],
        ["--dflash", "on"],
        ["--dflash", "auto"],
        ["--mtp", "on"],
        ["--ngram", "on"],
        ["--speculation", "ngram"],
        ["--kv-backend", "vmm"],
        ["--mtp-ngram"],
        ["--mtp-ngram-k", "3"],
        ["--replay-route-proof-log"],
        ["--assert-glimmer-cache-trace"],
    ],
)
def test_what_does_not_exist_is_refused(words: list[str]) -> None:
    with pytest.raises(UnsupportedError, match="is not available in this version") as caught:
        parse(["--model", "m", *words])
    assert words[0].partition("=")[0] in caught.value.message


def test_words_that_ask_for_nothing_new_are_accepted() -> None:
    parse(["--model", "m", "--dflash", "off", "--kv-backend", "contiguous", "--speculation", "off"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--model is required"),
        (["--model", "m", "--prompt-file", "a", "--niah-file", "b"], "exclude each other"),
        (["--model", "m", "--mode", "session"], "belong together"),
        (["--model", "m", "--session", "s"], "belong together"),
        (["--model", "m", "--no-spawn", "--cold"], "--no-spawn forbids"),
        (["--model", "m", "--fail-on", "empty,bad"], "'bad' is not known"),
        (["--model", "m", "--port", "0"], "--port is 0"),
        (["--model", "m", "--max-seq", "511"], "--max-seq is 511"),
        (["--model", "m", "--seed", "-1"], "--seed is -1"),
        (["--model", "m", "--serve-warm-timeout-secs", "nan"], "--serve-warm-timeout-secs is nan"),
        (["--model", "m", "--server-command", "a 'b"], "No closing quotation"),
        (["--model", "m", "--server-command", " "], "--server-command is empty"),
        (["--model", "m", "--kv", "fwht3"], "invalid choice"),
        (["--model", "m", "--max-tok", "5"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert text in caught.value.message


def test_default_sampling_is_what_the_registry_recommends() -> None:
    resolved = settle(registry_card=card(default_kv_mode="q8"))
    assert resolved.fields == {"max_tokens": 2048, "temperature": 0.2, "top_p": 0.9}
    assert resolved.settings["sampling.temperature"].source == "registry"
    assert (resolved.value("kv"), resolved.settings["kv"].source) == ("q8", "registry")
    assert resolved.warnings == ()
    assert settle("--kv", "f32", registry_card=card(default_kv_mode="q8")).settings["kv"].source == "explicit"


@pytest.mark.parametrize(
    ("sampling", "expected", "label"),
    [
        ("greedy", {"temperature": 0.0}, "explicit: greedy"),
        ("registry:coding", {"temperature": 0.1, "repeat_penalty": 1.1}, "registry:coding"),
        (
            "recipe:coding",
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.0},
            "recipe:coding",
        ),
        (
            "registry:instruct",
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
            "recipe:nothink instead of registry:instruct",
        ),
        ('json:{"top_k": 5}', {"top_k": 5}, "explicit: json"),
    ],
)
def test_sampling_and_its_source(sampling: str, expected: dict[str, Any], label: str) -> None:
    resolved = settle("--sampling", sampling, registry_card=card())
    assert resolved.fields == {"max_tokens": 2048} | expected
    assert resolved.settings["sampling.top_k"].source == label
    assert bool(resolved.warnings) == ("instead" in label)


def test_the_recipe_without_thinking_asks_for_no_effort() -> None:
    assert settle("--sampling", "recipe:nothink").fields["reasoning_effort"] == "none"
    assert settle("--sampling", "recipe:nothink", "--thinking", "off").fields["thinking"] == "off"


@pytest.mark.parametrize(
    "text",
    [
        "json:[]",
        "json:{}",
        "json:{",
        'json:{"stop": "x"}',
        'json:{"temperature": 3}',
        "registry:x",
        "recipe:",
    ],
)
def test_wrong_sampling_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        settle("--sampling", text)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--thinking", "off"], {"thinking": "off"}),
        (["--thinking", "low"], {"thinking": "on", "max_think_tokens": 512}),
        (["--thinking", "uncapped"], {"thinking": "on", "max_think_tokens": 0}),
        (["--thinking-effort", "high"], {"max_think_tokens": 0, "reasoning_effort": "high"}),
        (
            ["--thinking", "low", "--thinking-effort", "max"],
            {"thinking": "on", "max_think_tokens": 512, "reasoning_effort": "max"},
        ),
    ],
)
def test_thinking_is_three_axes(words: list[str], expected: dict[str, Any]) -> None:
    fields = settle("--sampling", "greedy", *words).fields
    assert fields == {"max_tokens": 2048, "temperature": 0.0} | expected


def test_off_wins_over_an_effort_and_says_so() -> None:
    resolved = settle("--sampling", "greedy", "--thinking", "off", "--thinking-effort", "high")
    assert resolved.fields == {"max_tokens": 2048, "temperature": 0.0, "thinking": "off"}
    assert resolved.warnings == ("--thinking off wins: the effort high is not sent",)


@pytest.mark.parametrize("name", [name for name, cap in THINKING_CAPS.items() if cap])
def test_a_cap_that_eats_the_answer_is_refused(name: str) -> None:
    cap = THINKING_CAPS[name]
    with pytest.raises(ValidationError, match=f"not above the thinking cap of {cap}"):
        settle("--thinking", name, "--max-tokens", str(cap))
    assert settle("--thinking", name, "--max-tokens", str(cap + 1)).fields["max_think_tokens"] == cap


def test_a_reply_as_long_as_the_context_is_refused() -> None:
    with pytest.raises(HipfireError, match="no room for a prompt"):
        settle("--max-seq", "2048", "--max-tokens", "2048")
    settle("--max-seq", "2049", "--max-tokens", "2048")


def test_every_setting_is_shown_with_its_source() -> None:
    resolved = settle("--sampling", "greedy", "--seed", "3", "--thinking", "low")
    lines = {line.split()[0]: line for line in resolved.lines()}
    assert "  3  (explicit)" in lines["seed"]
    assert "not set  (default: the server's choice)" in lines["max_seq"]
    assert "512  (from --thinking)" in lines["thinking.cap"]
    assert "not set  (default: the model's choice)" in lines["thinking.effort"]
    # what is sent is shown
    for name in resolved.fields:
        assert any(str(resolved.fields[name]) in line for line in lines.values()), name
