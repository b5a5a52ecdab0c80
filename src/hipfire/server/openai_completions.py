"""POST /v1/completions: plain text continued, without a chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hipfire.engine.turn import Delta
from hipfire.server import openai_replies as replies
from hipfire.server.openai_replies import Said
from hipfire.server.openai_schema import COMPLETION, takes
from hipfire.server.openai_turns import ReplyWriter, respond
from hipfire.server.openai_types import OpenAIRequest, read_completion
from hipfire.server.reply import Reply
from hipfire.server.service import Service


def router_for(service: Service) -> APIRouter:
    """Return the route."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", openapi_extra=takes(COMPLETION))
    async def complete(request: Request) -> Response:
        """Continue a text."""
        return await respond(service, request, read_completion, CompletionWriter)

    return routes


class CompletionWriter(ReplyWriter):
    """Words replies as text; `echoes` of the request go before it."""

    id_prefix = "cmpl"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, asked: OpenAIRequest) -> None:
        super().__init__(asked)
        # where the next token's text begins in its choice, for log-probabilities
        self._offsets = [0] * len(asked.turns)

    def first(self) -> list[dict[str, Any]]:
        """Return the echoes."""
        return [_choice(index, echo, None) for index, echo in enumerate(self.asked.echoes) if echo]

    def delta(self, index: int, event: Delta) -> dict[str, Any]:
        """Return a piece of the text."""
        made = _choice(index, event.text, None)
        if event.logprobs:
            made["logprobs"] = replies.completion_logprobs(event.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(token.text) for token in event.logprobs)
        return made

    def last(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        """Return the finish."""
        return [_choice(index, "", reply.result.finish)]

    def choice(self, index: int, reply: Reply, said: Said) -> dict[str, Any]:
        """Return the text."""
        made = _choice(index, self.asked.echoes[index] + "".join(said.answer), reply.result.finish)
        if self.asked.turns[index].generation.top_logprobs is not None:
            made["logprobs"] = replies.completion_logprobs(said.logprobs, 0)
        return made


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
