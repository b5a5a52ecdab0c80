"""The routes of Ollama's API: an adapter over the same turns as every other API.

What requests and replies look like is in ollama_types.py and ollama_replies.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

import hipfire
from hipfire.base.errors import HipfireError
from hipfire.base.sampling import GenerationParams
from hipfire.engine.turn import TurnKey, TurnRequest
from hipfire.server.errors import FieldError, NotFoundError
from hipfire.server.fields import Fields
from hipfire.server.limits import read_json
from hipfire.server.model_facts import FactsReader
from hipfire.server.ollama_replies import ERRORS, KEEPALIVE, NDJSON, OllamaWriter, line, running, show, tags
from hipfire.server.ollama_types import OllamaRequest, keep_warnings, needs, read_chat, read_generate
from hipfire.server.openai_schema import takes
from hipfire.server.service import ModelEntry, Reply, Service
from hipfire.server.sse import Frames, Last, TurnResponse, to_json

__all__ = ["API_VERSION", "ERRORS", "router_for"]

# the version of Ollama whose API these routes follow: clients compare it to know what they may ask for
API_VERSION: Final = "0.12.11"
_COMMON: Final = {
    "model": {"type": "string"},
    "stream": {"type": "boolean", "default": True},
    "think": {"type": ["boolean", "string"]},
    "format": {"type": ["string", "object"]},
    "options": {"type": "object"},
    "keep_alive": {"type": ["string", "number"]},
    "logprobs": {"type": "boolean"},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
}
_OBJECTS: Final = {"type": "array", "items": {"type": "object"}}
_CHAT: Final = {**_COMMON, "messages": _OBJECTS, "tools": _OBJECTS}
_GENERATE: Final = {
    **_COMMON,
    "prompt": {"type": "string"},
    "system": {"type": "string"},
    "raw": {"type": "boolean"},
}
_SHOW: Final = {"model": {"type": "string"}, "verbose": {"type": "boolean"}}
_Reader = Callable[[Mapping[str, Any], TurnKey], OllamaRequest]


def router_for(service: Service) -> APIRouter:
    """Return the routes below /api."""
    routes = APIRouter(tags=["Ollama"])
    facts = FactsReader()

    @routes.post("/api/chat", openapi_extra=_asks(_CHAT))
    async def chat(request: Request) -> Response:
        """Answer a conversation, as lines of JSON unless stream is false."""
        return await _turn(service, request, read_chat, chat=True)

    @routes.post("/api/generate", openapi_extra=_asks(_GENERATE))
    async def generate(request: Request) -> Response:
        """Answer a prompt, as lines of JSON unless stream is false."""
        return await _turn(service, request, read_generate, chat=False)

    @routes.get("/api/tags")
    async def list_models() -> Response:
        """List the models on this disk."""
        return _json(tags(await run_in_threadpool(service.models)))

    @routes.get("/api/ps")
    async def list_running() -> Response:
        """List the model in memory."""
        info = service.backend.loaded()
        entries = await run_in_threadpool(service.models)
        entry = next((each for each in entries if info is not None and each.path == info.path), None)
        held = info.max_seq if info is not None else 0
        return _json(running(entry, context=held, idle_s=service.options.idle_timeout_s))

    @routes.get("/api/version")
    async def version() -> Response:
        """Tell the version of Ollama's API that these routes follow, and hipfire's own."""
        return _json({"version": API_VERSION, "hipfire": hipfire.__version__})

    @routes.post("/api/show", openapi_extra=_asks(_SHOW))
    async def show_model(request: Request) -> Response:
        """Tell what is known about a model."""
        name = _name(await _body(service, request))
        entry = await run_in_threadpool(_find, service, name)
        return _json(show(entry, await run_in_threadpool(facts.read, entry.path)))

    return routes


def _asks(properties: Mapping[str, Any]) -> dict[str, Any]:
    return takes({"type": "object", "required": ["model"], "properties": properties})


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _body(service: Service, request: Request) -> dict[str, Any]:
    options = service.options
    return await read_json(request, max_bytes=options.max_request_bytes, timeout_s=options.header_timeout_s)


def _name(body: Mapping[str, Any]) -> str:
    fields = Fields(body)
    # older clients call the field "name"
    name = fields.text("model") or fields.text("name")
    if not name:
        raise FieldError("model", "model is missing")
    fields.flag("verbose")
    fields.finish()
    return name


def _find(service: Service, name: str) -> ModelEntry:
    path = service.resolve(name).path
    entry = next((each for each in service.models() if each.path == path), None)
    if entry is None:
        raise NotFoundError(f"the model {name[:200]!r} does not exist here")
    return entry


async def _turn(service: Service, request: Request, read: _Reader, *, chat: bool) -> Response:
    options = service.options
    asked = read(await _body(service, request), service.next_key("ollama"))
    if asked.turn is None:
        frames = _load(service, asked, chat=chat)
    else:
        frames = _answer(service, asked, asked.turn, chat=chat)
    return TurnResponse(
        frames,
        ERRORS,
        stream=asked.stream,
        media_type=NDJSON if asked.stream else "application/json",
        keepalive=KEEPALIVE,
        head_delay=options.head_delay_s,
        silence=options.keepalive_s,
    )


def _warnings(service: Service, asked: OllamaRequest) -> tuple[str, ...]:
    return (*asked.notes, *keep_warnings(asked.keep, service.options.idle_timeout_s))


async def _open(service: Service, asked: OllamaRequest, turn: TurnRequest) -> Reply:
    reply = await service.open(asked.model, turn, warnings=_warnings(service, asked))
    try:
        info = service.backend.loaded()
        needs(asked.context, info.max_seq if info is not None else 0)
    except HipfireError:
        reply.leave()
        raise
    return reply


async def _answer(service: Service, asked: OllamaRequest, turn: TurnRequest, *, chat: bool) -> Frames:
    began = time.perf_counter_ns()
    async with await _open(service, asked, turn) as reply:
        load_ns = time.perf_counter_ns() - began
        writer = OllamaWriter(reply.model, chat=chat)
        async for event in reply:
            if (made := writer.take(event)) is not None and asked.stream:
                yield line(made)
        if asked.stream and (calls := writer.calls(reply.result)) is not None:
            yield line(calls)
        total_ns = time.perf_counter_ns() - began
        end = writer.last if asked.stream else writer.whole
        made = end(reply.result, load_ns=load_ns, total_ns=total_ns)
        yield Last(line(made) if asked.stream else to_json(made))
        await reply.commit()


async def _load(service: Service, asked: OllamaRequest, *, chat: bool) -> Frames:
    """Load a model. A turn begins once its model is loaded; this one is then left before it is read."""
    if asked.keep == 0:
        raise FieldError(
            "keep_alive",
            "keep_alive is 0, but a request cannot unload a model",
            hint="serve.idle_timeout_seconds says when it leaves memory",
        )
    key = service.next_key("load")
    turn = TurnRequest(key=key, prompt="\n", generation=GenerationParams(max_tokens=0))
    async with await _open(service, asked, turn) as reply:
        made = OllamaWriter(reply.model, chat=chat).loaded(_warnings(service, asked))
        yield Last(line(made) if asked.stream else to_json(made))
