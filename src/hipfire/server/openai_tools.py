"""Tools and tool_choice of OpenAI's API, checked before anything runs.

Plain functions of the request's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hipfire.base.errors import ValidationError
from hipfire.engine.turn import ToolChoice
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields
from hipfire.text.messages import copy_json

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def read_tools(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice]:
    """Return the tools and whether they are to be called.

    Raises FieldError, naming the tool, for what is no function, for two functions of one name, and for a
    choice that the tools do not allow.
    """
    values = fields.items("tools") or []
    if len(values) > MAX_TOOLS:
        raise FieldError("tools", f"{len(values)} tools are given, but {MAX_TOOLS} at most are taken")
    tools = tuple(_tool(value, f"tools[{index}]") for index, value in enumerate(values))
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FieldError(f"tools[{index}]", f"tools[{index}]: a function {name!r} was given before")
    parallel = fields.flag("parallel_tool_calls")
    return tools, _choice(fields, names, parallel=parallel is not False)


def strict_notes(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return what to say where a function asks for `strict`, which many clients do without being told to."""
    if not any(tool["function"].get("strict") for tool in tools):
        return ()
    return ("strict has no effect: a call's arguments are fitted to their schema where that is possible",)


def _tool(value: Any, where: str) -> Mapping[str, Any]:
    tool = Fields(value, where)
    if tool.choice("type", ("function",)) is None:
        raise tool.fault("type", "function")
    function = tool.part("function")
    if function is None:
        raise tool.fault("function", "an object with a name")
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.fault("name", "1 to 128 letters, digits and . : _ -")
    function.text("description")
    function.flag("strict")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise function.fault("parameters", "a JSON schema, which is an object")
    function.finish()
    tool.finish()
    try:
        copied: Mapping[str, Any] = copy_json(value, where)
    except ValidationError as error:
        raise FieldError(where, error.message, hint=error.hint) from error
    return copied


def _choice(fields: Fields, names: list[str], *, parallel: bool) -> ToolChoice:
    value = fields.get("tool_choice")
    if value is None or value == "auto":
        return ToolChoice(parallel=parallel)
    if value == "none":
        return ToolChoice("none", parallel=parallel)
    if value == "required":
        if not names:
            raise FieldError("tool_choice", "tool_choice is 'required' but there are no tools")
        return ToolChoice("required", parallel=parallel)
    if not isinstance(value, Mapping):
        raise fields.fault("tool_choice", "auto, none, required or an object that names a function")
    chosen = Fields(value, "tool_choice")
    if chosen.choice("type", ("function",)) is None:
        raise chosen.fault("type", "function")
    function = chosen.part("function")
    if function is None:
        raise chosen.fault("function", "an object with a name")
    name = function.need_text("name")
    function.finish()
    chosen.finish()
    if name not in names:
        raise FieldError("tool_choice", f"tool_choice names {name[:80]!r}, which is not among the tools")
    return ToolChoice("named", name, parallel)
