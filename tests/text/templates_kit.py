"""Chat templates in the styles that model makers use, written for these tests, and conversations for them."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "    {{- message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
HEADERS = (
    "{{ bos_token }}"
    "{% set first = messages[0] %}"
    "{% if first.role == 'system' %}{% set rest = messages[1:] %}{% set sys = first.content | trim %}"
    "{% else %}{% set rest = messages %}{% set sys = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if tools is not none %}Tools:\n{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}"
    "{% endif %}"
    "{{ sys ~ '<|eot_id|>' }}"
    "{% for m in rest %}"
    "{% if m.tool_calls is defined %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}"
    "{{ '<|start_header_id|>%s<|end_header_id|>\\n\\n' % m.role + m['content'] | trim + '<|eot_id|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}"
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set lead = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set lead = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('turns must alternate between user and assistant') }}"
    "{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (lead if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
HERMES = (
    "{%- macro call_text(call) -%}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{%- endmacro -%}"
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{%- endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and tools %}{% continue %}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    "{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '\\n' + call_text(call) }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ ['<|im_start|>', m.role, '\\n', m.content, '<|im_end|>\\n'] | join }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REASONING = (
    "{%- set ns = namespace(last=messages | length - 1) %}"
    "{%- for m in messages[::-1] %}"
    "{%- if m.role == 'user' and ns.last == messages | length - 1 %}"
    "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and thought %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content.lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
GENERATION = (
    "{% for m in messages %}\n"
    "    {% if m.role == 'assistant' %}\n"
    "{{ '<|' + m.role + '|>' }}\n"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n"
    "    {% else %}\n"
    "{{ '<|{}|>\\n{}'.format(m.role, m.content.replace('\\r\\n', '\\n')) }}\n"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "turns": TURNS,
    "hermes": HERMES,
    "reasoning": REASONING,
    "generation": GENERATION,
}
# everything that the templates above mean as control tokens
CONTROLS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": 'the <sky> & "sea" é', "n": 2}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look <there> & tell 'what' you see: é 😀",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]


def _said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": _said(("user", "Hello")),
    "system": _said(("system", " Be brief. "), ("user", "Hi  there\n")),
    "turns": _said(
        ("user", "1 + 1?"), ("assistant", " 2"), ("user", "\tand 日本?\r\nYes"), ("assistant", "")
    ),
    "two users": _said(("user", "one"), ("user", "two")),
    "thoughts": _said(
        ("user", "why"),
        ("assistant", "<think>\nhm\n</think>\n\nbecause"),
        ("user", "so?"),
        ("assistant", "yes"),
    ),
    "last thought": _said(("user", "why"), ("assistant", "<think>\nhm\n</think>\n\nbecause")),
    "tool": [
        *_said(("system", "s"), ("user", "look")),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "blue", "tool_call_id": "call00001", "name": "look"},
        *_said(("assistant", "It is blue.")),
    ],
}
