"""POST /v1/chat/completions: a conversation's next message, whole or as it is written."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hipfire.engine.turn import Delta
from hipfire.server import openai_replies as replies
from hipfire.server.openai_replies import Said
from hipfire.server.openai_schema import CHAT, takes
from hipfire.server.openai_turns import ReplyWriter, respond
from hipfire.server.openai_types import read_chat
from hipfire.server.reply import Reply
from hipfire.server.service import Service


def router_for(service: Service) -> APIRouter:
    """Return the route."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", openapi_extra=takes(CHAT))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await respond(service, request, read_chat, ChatWriter)

    return routes


class ChatWriter(ReplyWriter):
    """Words replies as messages."""

    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        """Return the roles."""
        count = len(self.asked.turns)
        return [_delta(index, {"role": "assistant"}) for index in range(count)]

    def delta(self, index: int, event: Delta) -> dict[str, Any]:
        """Return a piece of the message or of the reasoning before it."""
        if event.channel == "reasoning":
            return _delta(index, {"reasoning_content": event.text})
        made = _delta(index, {"content": event.text})
        return {**made, "logprobs": replies.chat_logprobs(event.logprobs)} if event.logprobs else made

    def last(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        """Return all tool calls at once, if there are any, and the finish."""
        end = {**_delta(index, {}), "finish_reason": reply.result.finish}
        calls = replies.tool_calls(reply)
        if not calls:
            return [end]
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        return [_delta(index, {"tool_calls": numbered}), end]

    def choice(self, index: int, reply: Reply, said: Said) -> dict[str, Any]:
        """Return the message."""
        wanted = self.asked.turns[index].generation.top_logprobs is not None
        return {
            "index": index,
            "message": replies.message(said, reply, inline_thinking=self.asked.inline_thinking),
            "finish_reason": reply.result.finish,
            "logprobs": replies.chat_logprobs(said.logprobs) if wanted else None,
        }


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None}
