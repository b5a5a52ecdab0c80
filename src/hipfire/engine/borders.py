"""Where later requests may part from a chat's prompt: at the borders of its messages.

A client's next request repeats what was said, but templates write an answer that is over differently from one
that is to begin, and people edit what they asked. What comes before such a place is likely to be asked for
again. This file knows templates and tokens; it knows no caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hipfire.base.errors import HipfireError
from hipfire.cache.prefix import common_prefix
from hipfire.text.origin import RenderedPrompt
from hipfire.text.template import ChatTemplate
from hipfire.text.tokenizer import Tokenizer

_SYSTEM = ("system", "developer")


def message_borders(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    rendered: RenderedPrompt,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> tuple[int, ...]:
    """Return ascending numbers of tokens of `prompt` with which later requests are likely to begin.

    They are what precedes the first message that is not the system's, what the last message of a user ends,
    and what the last message of all ends. `rendered` is the conversation as it is answered, and `prompt` its
    tokens. A border always precedes a control token, where no other text can change how tokens are cut.
    """
    found = set()
    for part in _beginnings(messages, bool(tools)):
        try:
            other = template.render(part, tools=tools, extra=extra, add_generation_prompt=False)
        except HipfireError:
            # a template may refuse a part of a conversation
            continue
        shared = _common_text(rendered.text, other.text)
        found.add(_tokens_of(rendered, shared, prompt, tokenizer))
    return tuple(sorted(border for border in found if 0 < border < len(prompt)))


def _beginnings(messages: Sequence[Mapping[str, Any]], tools: bool) -> Iterator[list[Mapping[str, Any]]]:
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    first = next((index for index, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    if first or tools:
        # templates want a message of a user; what it says is behind the border
        yield [*messages[:first], {"role": "user", "content": "-"}]
    users = [index for index, role in enumerate(roles) if role == "user"]
    if users and users[-1] + 1 < len(messages):
        yield list(messages[: users[-1] + 1])
    yield list(messages)


def _common_text(a: str, b: str) -> int:
    """Return how many characters two texts share from their beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


def _tokens_of(rendered: RenderedPrompt, length: int, prompt: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens of `prompt` precede the last control token in the first `length` characters.

    One right behind these characters counts, too. The shorter side is cut into tokens again.
    """
    text = rendered.text
    if 2 * length < len(text):
        ids = tokenizer.encode_chat(_part(rendered, 0, length))
        border = common_prefix(ids, prompt)
    else:
        ids = tokenizer.encode_chat(_part(rendered, length, len(text)))
        if ids[:1] == [tokenizer.bos_id]:
            ids = ids[1:]
        border = len(prompt) - len(ids)
        if border < 0 or list(prompt[border:]) != ids:
            return 0
    while border > 0 and not (border < len(prompt) and tokenizer.is_special(prompt[border])):
        border -= 1
    return border


def _part(rendered: RenderedPrompt, begin: int, end: int) -> RenderedPrompt:
    spans = tuple(
        (max(first, begin) - begin, min(last, end) - begin)
        for first, last in rendered.caller_spans
        if first < end and last > begin
    )
    return RenderedPrompt(rendered.text[begin:end], spans)
