"""Where chats' prompts are likely to be left by later requests: with templates that rewrite what is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hipfire.cache.prefix import common_prefix
from hipfire.engine.borders import message_borders
from hipfire.text.template import ChatTemplate
from hipfire.text.tokenizer import Tokenizer
from recital import recite
from tiny_models import IM_START

# a thought is opened for the reply, kept while the last question is worked on, dropped from answers before
THINKER = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{%- endif %}"
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n' }}{%- endif %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and tools %}{%- continue %}{%- endif %}"
    "{%- if m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}"
    "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\n<tool_call>\n<function=' + call.function.name + '>\n</function>\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
SYSTEM = {"role": "system", "content": "You are terse."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    more = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": text, "reasoning_content": thought, **more}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return recite([0], [0]).tokenizer


def encoded(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, tools: Sequence[Any] = ()
) -> tuple[list[int], tuple[int, ...]]:
    """Return a prompt and its borders."""
    template = ChatTemplate(THINKER)
    rendered = template.render(messages, tools=tools or None)
    prompt = tokenizer.encode_chat(rendered)
    borders = message_borders(template, messages, rendered, prompt, tokenizer, tools=tools or None, extra={})
    for border in borders:
        assert prompt[border] == IM_START
    return prompt, borders


TALKS: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "the next question": (
        [SYSTEM, user("Hello, who is there?")],
        [SYSTEM, user("Hello, who is there?"), answer("Nobody.", "Who asks?"), user("Nobody?")],
        [],
    ),
    "a long history": (
        [user("one " * 90), answer("two " * 90, "ponder"), user("three")],
        [user("one " * 90), answer("two " * 90, "ponder"), user("three"), answer("four", "x"), user("five")],
        [],
    ),
    "a call that is answered": (
        [SYSTEM, user("Look!")],
        [SYSTEM, user("Look!"), answer("", "I look.", [CALL]), {"role": "tool", "content": "sky"}],
        [LOOK],
    ),
    "a thought with a marker of the caller's": (
        [user("<|im_start|>user\nhi<|im_end|>")],
        [user("<|im_start|>user\nhi<|im_end|>"), answer("ok", "t"), user("<|im_end|>")],
        [],
    ),
}


@pytest.mark.parametrize("talk", TALKS)
def test_the_next_request_agrees_up_to_the_last_border(talk: str, tokenizer: Tokenizer) -> None:
    before, after, tools = TALKS[talk]
    prompt, borders = encoded(before, tokenizer, tools)
    following, _ = encoded(after, tokenizer, tools)
    shared = common_prefix(prompt, following)
    # what both share behind the border is no more than what opens an answer
    assert borders[-1] <= shared <= borders[-1] + len("assistant\n<think>\n") + 1
    # and the thought is a part of the prompt that the next one does not have
    assert shared < len(prompt) or tools


def test_an_edited_question_agrees_up_to_the_border_before_it(tokenizer: Tokenizer) -> None:
    history = [SYSTEM, user("Tell me more than that."), answer("No.", "Why?")]
    _, borders = encoded([SYSTEM, user("Tell me more than that.")], tokenizer)
    prompt, _ = encoded([*history, user("Please do!")], tokenizer)
    edited, _ = encoded([*history, user("You must.")], tokenizer)
    other, _ = encoded([SYSTEM, user("Goodbye.")], tokenizer)
    assert borders[-1] < common_prefix(prompt, edited)
    # another conversation with the same system message
    first = next(border for border in borders if border > 0)
    assert first <= common_prefix(prompt, other) < borders[-1]


def test_a_loop_of_calls_has_the_border_of_its_question(tokenizer: Tokenizer) -> None:
    loop = [user("Look, and look again."), answer("", "I look.", [CALL]), {"role": "tool", "content": "sky"}]
    prompt, borders = encoded(loop, tokenizer, [LOOK])
    over, _ = encoded([*loop, answer("Sky.", "Done."), user("Thanks.")], tokenizer, [LOOK])
    again, _ = encoded(
        [*loop, answer("", "More.", [CALL]), {"role": "tool", "content": "sea"}], tokenizer, [LOOK]
    )
    # tools, question, and the whole
    assert len(borders) == 3
    # once the answer is there, the thoughts of the loop are dropped: all that is left is the question
    assert borders[1] <= common_prefix(prompt, over) < borders[2] <= common_prefix(prompt, again)


def test_nothing_is_wanted_of_a_template_without_control_tokens(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    messages = [SYSTEM, user("hi")]
    rendered = template.render(messages)
    prompt = tokenizer.encode_chat(rendered)
    assert message_borders(template, messages, rendered, prompt, tokenizer, tools=None, extra={}) == ()
