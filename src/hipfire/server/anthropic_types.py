"""A request of Anthropic's Messages API as a turn of the engine: every field is taken or refused by name.

Plain functions of the request's JSON. Conversations are read in anthropic_messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.turn import ResponseFormat, Thinking, ToolChoice, ToolMode, TurnKey, TurnRequest
from hipfire.server.anthropic_messages import cache_mark, conversation, system_message
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields

MAX_TOKENS = 393_216
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
EFFORTS = ("low", "medium", "high", "xhigh", "max")
_TOOL_MODES: Final[Mapping[str, ToolMode]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}
# what of the API needs machinery that only its own provider has, with values that ask for nothing
_ABSENT: Final[Mapping[str, tuple[object, ...]]] = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "user_profile_id": (),
    "workspace_id": (),
}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request: the turn, and how its reply is to be told. `thoughts` says whether reasoning is shown."""

    model: str
    turn: TurnRequest
    stream: bool
    thoughts: bool


def read_messages(body: Mapping[str, Any], key: TurnKey) -> MessagesRequest:
    """Return what POST /v1/messages asks for. Raises FieldError or UnsupportedError, naming the field."""
    fields = Fields(body)
    limit = fields.integer("max_tokens", 0, MAX_TOKENS)
    if limit is None:
        raise fields.fault("max_tokens", f"an integer from 0 to {MAX_TOKENS}")
    stream = fields.flag("stream") or False
    stops = fields.texts("stop_sequences", most=MAX_STOPS, longest=MAX_STOP_LENGTH)
    if (metadata := fields.part("metadata")) is not None:
        # names the client's user, which has no effect on a reply
        metadata.text("user_id")
        metadata.finish()
    fields.choice("service_tier", ("auto", "standard_only"))
    sampling = _sampling(fields)
    model, turn, thoughts = _common(fields, key, limit)
    request = TurnRequest(
        **turn,
        sampling=SamplingParams(**sampling),
        sampling_given=frozenset(sampling),
        generation=GenerationParams(max_tokens=limit, stop=stops),
        # max_tokens is mandatory in this API and means "at most", so clients name large numbers
        fit=True,
    )
    return MessagesRequest(model, request, stream, thoughts)


def read_count(body: Mapping[str, Any], key: TurnKey) -> MessagesRequest:
    """Return a turn that has the prompt of POST /v1/messages/count_tokens and generates nothing."""
    model, turn, _ = _common(Fields(body), key, None)
    request = TurnRequest(**turn, generation=GenerationParams(max_tokens=0))
    return MessagesRequest(model, request, stream=False, thoughts=False)


def _common(fields: Fields, key: TurnKey, limit: int | None) -> tuple[str, dict[str, Any], bool]:
    """Read the fields of both routes and end the reading; return model, parts of the turn, and `thoughts`."""
    model = fields.need_text("model")
    messages = fields.items("messages")
    if not messages:
        raise fields.fault("messages", "a list of at least one message")
    fields.refuse("speed", neutral=("standard",))
    for name, neutral in _ABSENT.items():
        fields.refuse(name, neutral=neutral)
    cache_mark(fields)
    enabled, cap, thoughts = _thinking(fields, limit)
    effort, response_format = _output(fields)
    tools = _tools(fields.items("tools") or [])
    turn = {
        "key": key,
        "messages": (*system_message(fields.get("system")), *conversation(messages)),
        "tools": tools,
        "tool_choice": _tool_choice(fields, tools),
        "response_format": response_format,
        "thinking": Thinking(enabled, effort, cap),
    }
    fields.finish()
    return model, turn, thoughts


def _sampling(fields: Fields) -> dict[str, Any]:
    given = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", 0, 2**31 - 1),
    }
    return {name: value for name, value in given.items() if value is not None}


def _thinking(fields: Fields, limit: int | None) -> tuple[bool | None, int | None, bool]:
    """Return mode, cap, and whether reasoning is shown. "adaptive" leaves thinking to the model."""
    thinking = fields.part("thinking")
    if thinking is None:
        return None, None, True
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
    if kind is None:
        raise thinking.fault("type", "enabled, disabled or adaptive")
    budget = thinking.integer("budget_tokens", 1, MAX_TOKENS)
    if kind == "enabled" and budget is None:
        raise thinking.fault("budget_tokens", "an integer of at least 1")
    if kind != "enabled" and budget is not None:
        raise thinking.fault("budget_tokens", f"left out where thinking is {kind}")
    if budget is not None and limit is not None and budget >= limit:
        raise thinking.fault("budget_tokens", f"less than max_tokens, which is {limit}")
    display = thinking.choice("display", ("summarized", "omitted"))
    thinking.finish()
    return {"enabled": True, "disabled": False, "adaptive": None}[kind], budget, display != "omitted"


def _output(fields: Fields) -> tuple[str | None, ResponseFormat]:
    output = fields.part("output_config")
    if output is None:
        return None, ResponseFormat()
    effort = output.choice("effort", EFFORTS)
    shape = output.part("format")
    output.finish()
    if shape is None:
        return effort, ResponseFormat()
    if shape.choice("type", ("json_schema",)) is None:
        raise shape.fault("type", "json_schema")
    schema = shape.need("schema")
    if not isinstance(schema, dict):
        raise shape.fault("schema", "an object")
    shape.finish()
    return effort, ResponseFormat("json_schema", schema)


def _tools(values: list[Any]) -> tuple[Mapping[str, Any], ...]:
    tools = [_tool(Fields(value, f"tools[{index}]")) for index, value in enumerate(values)]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise FieldError(f"tools[{index}].name", f"tools[{index}].name is {name!r}, as an earlier one's")
        seen.add(name)
    return tuple(tools)


def _tool(fields: Fields) -> dict[str, Any]:
    fields.refuse("type", neutral=("custom",), hint="only the client's own tools can be given, type custom")
    function: dict[str, Any] = {"name": fields.need_text("name")}
    if (description := fields.text("description")) is not None:
        function["description"] = description
    schema = fields.need("input_schema")
    if not isinstance(schema, dict):
        raise fields.fault("input_schema", "an object")
    function["parameters"] = schema
    cache_mark(fields)
    # a call's input comes in one piece either way
    fields.flag("eager_input_streaming")
    fields.refuse("strict", neutral=(False,))
    fields.refuse("defer_loading", neutral=(False,))
    fields.refuse("input_examples", neutral=([],))
    fields.refuse("allowed_callers", neutral=(["direct"],))
    fields.finish()
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields, tools: tuple[Mapping[str, Any], ...]) -> ToolChoice:
    choice = fields.part("tool_choice")
    if choice is None:
        return ToolChoice()
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    parallel = not choice.flag("disable_parallel_tool_use")
    name = choice.need_text("name") if kind == "tool" else None
    choice.finish()
    if kind is None:
        raise choice.fault("type", "auto, any, tool or none")
    if kind in ("any", "tool") and not tools:
        raise FieldError("tool_choice", f"tool_choice {kind!r} needs tools")
    if name is not None and all(tool["function"]["name"] != name for tool in tools):
        raise choice.fault("name", "the name of one of the tools")
    return ToolChoice(_TOOL_MODES[kind], name, parallel)
