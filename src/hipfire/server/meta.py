"""What a server says about itself: health, figures, metrics and models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from hipfire.server.errors import NotFoundError
from hipfire.server.metrics import CONTENT_TYPE
from hipfire.server.service import ModelEntry, Service
from hipfire.server.sse import to_json


def router_for(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["Server"])

    @routes.get("/health", responses={503: {"description": "The engine is restarting or does not stay up."}})
    async def health() -> Response:
        """Tell whether the server lives, and in `ready` whether it would work on a request now."""
        status, body = service.health()
        return Response(to_json(body), status, media_type="application/json")

    @routes.get("/stats")
    async def stats() -> Response:
        """Tell what the server has done and does."""
        return Response(to_json(service.stats()), media_type="application/json")

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Tell the same to Prometheus."""
        return Response(service.metrics.text(service.gauges()), media_type=CONTENT_TYPE)

    @routes.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """List the models on this machine."""
        entries = await run_in_threadpool(service.models)
        names = [entry.id for entry in entries]
        listed = {
            "object": "list",
            "data": [_model(entry) for entry in entries],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
        return Response(to_json(listed), media_type="application/json")

    @routes.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        """Describe one model."""
        local = await run_in_threadpool(service.resolve, name)
        for entry in await run_in_threadpool(service.models):
            if entry.path == local.path:
                return Response(to_json(_model(entry)), media_type="application/json")
        raise NotFoundError(f"the model {name[:200]!r} does not exist here", code="model_not_found")

    return routes


def _model(entry: ModelEntry) -> dict[str, Any]:
    """Return a model as OpenAI's clients want it, and with what Anthropic's want beside it."""
    return {
        "id": entry.id,
        "object": "model",
        "created": entry.modified,
        "owned_by": "hipfire",
        "type": "model",
        "display_name": entry.id,
        "created_at": datetime.fromtimestamp(entry.modified, UTC).isoformat(),
    }
