"""Which markup a model's replies use, read off its chat template and its vocabulary.

This file decides and parses nothing: think_splitter.py, gemma_router.py and tools/ read replies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from hipfire.text.gemma_router import CHANNEL, CHANNEL_END, MARKERS, THOUGHT
from hipfire.text.template_words import template_words
from hipfire.text.think_splitter import THINK, THINK_END
from hipfire.text.tools import Dialect, markers_of

_XML_FUNCTION: Final = "<function="
_GEMMA_CALL: Final = "<|tool_call>"
_TOOL_CALL: Final = "<tool_call>"


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How replies mark reasoning and tool calls.

    `markers` are the tokens that a detokenizer has to show although the vocabulary calls them special,
    because the parser reads them.
    """

    thinking: Literal["none", "think", "gemma"] = "none"
    tools: Dialect | None = None
    markers: tuple[str, ...] = ()


def reply_format(template_source: str, has_token: Callable[[str], bool]) -> ReplyFormat:
    """Return the format that the template's own words imply; comments and code imply nothing.

    `has_token` says whether the vocabulary has a token of that spelling: Gemma's channels exist only as
    tokens. A template that writes no such markup gives the plain format.
    """
    words = template_words([template_source])
    thinking: Literal["none", "think", "gemma"] = "none"
    shown: list[str] = []
    if CHANNEL in words and has_token(CHANNEL) and has_token(CHANNEL_END):
        thinking = "gemma"
        shown += MARKERS
    elif THINK in words or THINK_END in words:
        thinking = "think"
        shown += (THINK, THINK_END)
    tools = _dialect(words)
    if tools is not None:
        shown += markers_of(tools)
    return ReplyFormat(thinking, tools, tuple(text for text in dict.fromkeys(shown) if has_token(text)))


def starts_in_thinking(rendered_tail: str, fmt: ReplyFormat) -> bool:
    """Say whether a reply to this prompt begins inside a thought: its end alone decides."""
    tail = rendered_tail.rstrip()
    return tail.endswith(THINK if fmt.thinking == "think" else THOUGHT) and fmt.thinking != "none"


def starts_closed(rendered_tail: str, fmt: ReplyFormat) -> bool:
    """Say whether this prompt ends with a closed thought, so that its reply has no reasoning."""
    tail = rendered_tail.rstrip()
    return tail.endswith(THINK_END if fmt.thinking == "think" else CHANNEL_END) and fmt.thinking != "none"


def close_text(fmt: ReplyFormat) -> str:
    """Return what ends an open thought when it is fed to the model, markup to be read as tokens.

    "" for a format without thoughts.
    """
    if fmt.thinking == "think":
        return f"{THINK_END}\n\n"
    return CHANNEL_END if fmt.thinking == "gemma" else ""


def _dialect(words: str) -> Dialect | None:
    if _GEMMA_CALL in words:
        return "gemma"
    if _XML_FUNCTION in words:
        return "qwen_xml"
    return "hermes" if _TOOL_CALL in words else None
