"""The routes of Anthropic's Messages API: an adapter over the same turns as every other API.

What requests and replies look like is in anthropic_types.py and anthropic_replies.py.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hipfire.server.anthropic_replies import ERRORS, PING, MessageWriter
from hipfire.server.anthropic_types import MessagesRequest, read_count, read_messages
from hipfire.server.limits import read_json
from hipfire.server.openai_schema import takes
from hipfire.server.service import Reply, Service
from hipfire.server.sse import Frames, Last, TurnResponse, to_json

__all__ = ["ERRORS", "router_for"]

_PROPERTIES: Final = {
    "model": {"type": "string"},
    "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    "system": {"type": ["string", "array"]},
    "tools": {"type": "array", "items": {"type": "object"}},
    "tool_choice": {"type": "object"},
    "thinking": {"type": "object"},
    "output_config": {"type": "object"},
}
_COUNT_SCHEMA: Final = {"type": "object", "required": ["model", "messages"], "properties": _PROPERTIES}
_MESSAGES_SCHEMA: Final = {
    "type": "object",
    "required": ["model", "messages", "max_tokens"],
    "properties": {
        **_PROPERTIES,
        "max_tokens": {"type": "integer", "minimum": 0},
        "stream": {"type": "boolean"},
        "stop_sequences": {"type": "array", "items": {"type": "string"}},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "minimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 0},
        "metadata": {"type": "object"},
    },
}


def router_for(service: Service) -> APIRouter:
    """Return the routes below /v1/messages."""
    routes = APIRouter(tags=["Anthropic"])
    options = service.options

    async def body_of(request: Request) -> dict[str, Any]:
        return await read_json(
            request, max_bytes=options.max_request_bytes, timeout_s=options.header_timeout_s
        )

    @routes.post("/v1/messages", openapi_extra=takes(_MESSAGES_SCHEMA))
    async def messages(request: Request) -> Response:
        """Answer a conversation, as one message or as a stream of events."""
        asked = read_messages(await body_of(request), service.next_key("msg"))
        return TurnResponse(
            _stream(service, asked) if asked.stream else _whole(service, asked),
            ERRORS,
            stream=asked.stream,
            media_type="text/event-stream" if asked.stream else "application/json",
            keepalive=PING,
            head_delay=options.head_delay_s,
            silence=options.keepalive_s,
            headers={"request-id": asked.turn.key.id},
        )

    @routes.post("/v1/messages/count_tokens", openapi_extra=takes(_COUNT_SCHEMA))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation as its model would read it."""
        asked = read_count(await body_of(request), service.next_key("count"))
        return TurnResponse(_count(service, asked), ERRORS, stream=False)

    return routes


def _writer(reply: Reply, asked: MessagesRequest) -> MessageWriter:
    limit = asked.turn.generation.max_tokens or 0
    return MessageWriter(reply.key.id, reply.model, reply.started, limit=limit, thoughts=asked.thoughts)


async def _stream(service: Service, asked: MessagesRequest) -> Frames:
    async with await service.open(asked.model, asked.turn) as reply:
        writer = _writer(reply, asked)
        async for event in reply:
            if frames := writer.take(event):
                yield frames
        yield Last(writer.end(reply.result))
        await reply.commit()


async def _whole(service: Service, asked: MessagesRequest) -> Frames:
    async with await service.open(asked.model, asked.turn) as reply:
        writer = _writer(reply, asked)
        async for event in reply:
            writer.take(event)
        yield Last(to_json(writer.message(reply.result)))
        await reply.commit()


async def _count(service: Service, asked: MessagesRequest) -> Frames:
    """Count a prompt. The engine says its length before it reads it, and is then told to stop."""
    async with await service.open(asked.model, asked.turn) as reply:
        yield Last(to_json({"input_tokens": reply.started.prompt_tokens}))
