"""JSON schemas of the requests of OpenAI's API, for /openapi.json and the tools that read it.

The fields are read in openai_types.py, which refuses what does not fit; a test holds both to the same names.
"""

from __future__ import annotations

from typing import Any

from hipfire.base.sampling import MAX_SEED, MAX_TOP_LOGPROBS
from hipfire.server.openai_sampling import MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS
from hipfire.server.openai_thinking import EFFORTS, MAX_CAP
from hipfire.server.openai_types import MAX_CHOICES

_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_OBJECT: dict[str, Any] = {"type": "object"}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_SHARED: dict[str, Any] = {
    "model": {"type": "string", "minLength": 1},
    "stream": _FLAG,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _FLAG, "include_obfuscation": _FLAG},
    },
    "max_tokens": _integer(1, MAX_TOKENS),
    "min_tokens": _integer(0, MAX_TOKENS),
    "ignore_eos": _FLAG,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": _number(0, 1),
    "repeat_penalty": _number(1, 3),
    "repetition_penalty": _number(1, 3),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repeat_window": {"type": "integer", "minimum": -1},
    "seed": _integer(0, MAX_SEED),
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    "stop": {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]},
    "n": _integer(1, MAX_CHOICES),
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "prompt_cache_retention": _TEXT,
    "prompt_cache_options": _OBJECT,
    "service_tier": {"enum": ["auto", "default"]},
    "metadata": {"type": "object", "additionalProperties": _TEXT},
    "store": {"enum": [False]},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, {"type": "null"}, {"type": "array", "items": _OBJECT}]},
        "reasoning_content": _TEXT,
        "tool_calls": {"type": "array", "items": _OBJECT},
        "tool_call_id": _TEXT,
        "name": _TEXT,
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT,
                "description": _TEXT,
                "parameters": _OBJECT,
                "strict": _FLAG,
            },
        },
    },
}
CHAT: dict[str, Any] = {
    "title": "ChatRequest",
    "type": "object",
    "additionalProperties": False,
    "required": ["model", "messages"],
    "properties": {
        **_SHARED,
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "max_completion_tokens": _integer(1, MAX_TOKENS),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "tools": {"type": "array", "items": _TOOL},
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
        "parallel_tool_calls": _FLAG,
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": _OBJECT,
                "schema": _OBJECT,
            },
        },
        "chat_template_kwargs": _OBJECT,
        "thinking": {"anyOf": [_FLAG, _TEXT, _OBJECT]},
        "enable_thinking": _FLAG,
        "reasoning_effort": {"enum": list(EFFORTS)},
        "max_think_tokens": _integer(0, MAX_CAP),
        "thinking_budget": {"anyOf": [_TEXT, _integer(0, MAX_CAP)]},
        "reasoning": _OBJECT,
    },
}
COMPLETION: dict[str, Any] = {
    "title": "CompletionRequest",
    "type": "object",
    "additionalProperties": False,
    "required": ["model", "prompt"],
    "properties": {
        **_SHARED,
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            ]
        },
        "best_of": _integer(1, MAX_CHOICES),
        "logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "echo": _FLAG,
        "suffix": {"enum": [""]},
    },
}


def takes(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a route's OpenAPI description that says what its body is."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
