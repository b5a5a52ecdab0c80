"""What a chat template and a vocabulary say about the markup of replies."""

from __future__ import annotations

import pytest
from templates_kit import HERMES, REASONING, TEMPLATES

from hipfire.text.reply_format import (
    ReplyFormat,
    close_text,
    reply_format,
    starts_closed,
    starts_in_thinking,
)
from hipfire.text.template import ChatTemplate

XML = (
    "{% if tools %}{{ 'Call like this:\\n<tool_call>\\n<function=name>\\n<parameter=a>\\n1\\n</parameter>\\n"
    "</function>\\n</tool_call>' }}{% endif %}{{ messages[0].content }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
GEMMA = (
    "{% if tools %}<|tool>{{ tools | tojson }}<tool|>{% endif %}"
    "{% for call in messages[0].tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{}<tool_call|>"
    "{% endfor %}<|turn>user\n{{ messages[0].content }}<turn|>\n"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
GEMMA_TOKENS = {"<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>'}


def of(source: str, *tokens: str) -> ReplyFormat:
    return reply_format(source, lambda text: text in tokens)


def tail(source: str, **extra: bool) -> str:
    made = ChatTemplate(source, bos_token=None, eos_token=None, origin="test")
    return made.render([{"role": "user", "content": "Hi"}], extra=extra).text[-40:]


def test_plain_templates_have_plain_replies() -> None:
    for name in ("chatml", "headers", "turns", "generation"):
        assert of(TEMPLATES[name], "<think>", "<tool_call>") == ReplyFormat("none", None, ())


@pytest.mark.parametrize(
    ("source", "thinking", "tools"),
    [
        (HERMES, "none", "hermes"),
        (REASONING, "think", None),
        (XML, "think", "qwen_xml"),
        (GEMMA, "none", "gemma"),
    ],
)
def test_formats_by_the_words_of_the_template(source: str, thinking: str, tools: str | None) -> None:
    made = of(source)
    assert (made.thinking, made.tools, made.markers) == (thinking, tools, ())


def test_only_markers_that_are_tokens_are_to_be_shown() -> None:
    assert of(XML, "<think>", "</think>", "<tool_call>").markers == ("<think>", "</think>", "<tool_call>")
    assert of(REASONING, "<tool_call>", "</think>").markers == ("</think>",)


def test_channels_count_only_where_the_vocabulary_has_them() -> None:
    made = of(GEMMA, *GEMMA_TOKENS)
    assert made.thinking == "gemma"
    assert set(made.markers) == GEMMA_TOKENS
    assert of(GEMMA, "<|channel>").thinking == "none"


def test_comments_and_code_say_nothing() -> None:
    assert of("{# <think> <tool_call> #}{% set tool_call = 1 %}{{ messages }}") == ReplyFormat()


@pytest.mark.parametrize(
    ("source", "extra", "inside", "closed"),
    [
        (XML, {}, True, False),
        (XML, {"enable_thinking": False}, False, True),
        (REASONING, {}, False, False),
        (REASONING, {"enable_thinking": False}, False, True),
        (GEMMA, {}, False, True),
        (GEMMA, {"enable_thinking": True}, False, False),
        (HERMES, {}, False, False),
    ],
)
def test_the_end_of_the_prompt_says_where_a_reply_begins(
    source: str, extra: dict[str, bool], inside: bool, closed: bool
) -> None:
    fmt, end = of(source, *GEMMA_TOKENS), tail(source, **extra)
    assert starts_in_thinking(end, fmt) is inside
    assert starts_closed(end, fmt) is closed


def test_an_open_channel_at_the_end_of_the_prompt() -> None:
    fmt = of(GEMMA, *GEMMA_TOKENS)
    assert starts_in_thinking("<|turn>model\n<|channel>thought\n", fmt)
    assert not starts_in_thinking("<|turn>model\n<think>\n", fmt)


def test_markup_earlier_in_the_prompt_and_other_formats_do_not_matter() -> None:
    assert not starts_in_thinking("<think>\nassistant\n", of(XML))
    assert not starts_in_thinking("the tag <think>", ReplyFormat())
    assert not starts_in_thinking("<|channel>thought", ReplyFormat())
    assert not starts_closed("</think>", ReplyFormat())
    assert not starts_closed("<channel|>", ReplyFormat())


def test_what_closes_a_thought() -> None:
    assert close_text(ReplyFormat("think")) == "</think>\n\n"
    assert close_text(ReplyFormat("gemma")) == "<channel|>"
    assert close_text(ReplyFormat("none")) == ""
