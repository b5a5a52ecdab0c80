"""Function schemas for tests of tool calls."""

from __future__ import annotations

from typing import Any


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return a tool of the OpenAI shape; a property is a schema, or the name of a type."""
    schemas = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    parameters = {"type": "object", "properties": schemas, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("get_weather", ("city",), city="string", days="integer", metric="boolean")
WRITE = tool("write_file", ("path", "text"), path="string", text="string")
NOW = tool("now")
TOOLS = [WEATHER, WRITE, NOW]
