"""Which chat template serves which request, and what a broken one reports."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hipfire.base.types import TextAssets
from hipfire.runtime.templates import Templates, load_templates
from hipfire.text.tokenizer import Tokenizer
from tiny_models import ROWS, TEMPLATE, tokenizer_text

ASSETS = TextAssets(
    tokenizer_json=tokenizer_text(),
    tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    chat_templates={"default": "A{{ eos_token }}", "tool_use": "B{{ tools | length }}"},
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
MESSAGES = [{"role": "user", "content": "x"}]


def load(assets: TextAssets, user_dir: Path | None = None) -> Templates | None:
    tokenizer = Tokenizer.from_assets(assets, ROWS)
    return load_templates(assets, tokenizer, Path("m.hf4"), override_file=None, user_dir=user_dir)


def test_requests_with_tools_take_the_template_made_for_them() -> None:
    templates = load(ASSETS)
    assert templates is not None
    assert templates.pick(None).render(MESSAGES).text == "A<|im_end|>"
    assert templates.pick([]).render(MESSAGES).text == "A<|im_end|>"
    assert templates.pick(TOOLS).render(MESSAGES, tools=TOOLS).text == "B1"


def test_one_template_serves_both_where_there_is_no_other() -> None:
    templates = load(dataclasses.replace(ASSETS, chat_templates={"default": TEMPLATE}))
    assert templates is not None
    assert templates.tools is templates.chat
    assert templates.faults() == ()


def test_the_users_template_is_named_after_the_model_file(tmp_path: Path) -> None:
    (tmp_path / "m.hf4.j2").write_text("own")
    templates = load(ASSETS, tmp_path)
    assert templates is not None
    assert templates.pick(None).render(MESSAGES).text == "own"
    assert templates.pick(TOOLS).render(MESSAGES, tools=TOOLS).text == "own"


def test_a_template_that_fails_on_tools_is_reported_before_the_first_request() -> None:
    broken = {"default": "{% if tools %}{{ 1 + 'x' }}{% endif %}ok"}
    templates = load(dataclasses.replace(ASSETS, chat_templates=broken))
    assert templates is not None
    assert templates.pick(None).render(MESSAGES).text == "ok"
    assert any("tool" in fault for fault in templates.faults())


def test_a_base_model_has_none() -> None:
    plain = tokenizer_text().replace("<|im_start|>", "<|other|>")
    assert load(dataclasses.replace(ASSETS, tokenizer_json=plain, chat_templates={})) is None
