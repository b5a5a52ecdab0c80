"""The web application: all routes, each API's shape of errors, and the door in front of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hipfire import __version__
from hipfire.base.errors import HipfireError
from hipfire.server import anthropic, meta, ollama, openai_chat, openai_completions, openai_replies, page
from hipfire.server.access import Access
from hipfire.server.errors import FieldError, MethodError, NotFoundError
from hipfire.server.options import ServeOptions
from hipfire.server.service import Service
from hipfire.server.sse import ErrorShape, report

# the beginnings of the paths whose errors have another shape than OpenAI's
_SHAPES = (("/v1/messages", anthropic.ERRORS), ("/api/", ollama.ERRORS))
# what GET needs no token for: a sign of life, and the page that asks for the token
_OPEN = ("/health", "/")
_OPEN_BELOW = "/static/"


def create_app(options: ServeOptions, service: Service, *, token: str | None = None) -> FastAPI:
    """Return the application; `token` is the bearer token that requests must show, None for none."""
    # the usual documentation pages load scripts from elsewhere, so there are none
    app = FastAPI(title="hipfire", version=__version__, docs_url=None, redoc_url=None)
    modules = (meta, openai_chat, openai_completions, anthropic, ollama)
    for module in modules:
        app.include_router(module.router_for(service))
    app.include_router(page.router())
    app.add_exception_handler(HipfireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_error)
    app.add_middleware(Access, options=options, token=token, shape_of=shape_of, open_path=_is_open)
    return app


def shape_of(path: str) -> ErrorShape:
    """Return how errors are told on a path."""
    for beginning, shape in _SHAPES:
        if path.startswith(beginning):
            return shape
    return openai_replies.ERRORS


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_BELOW)


async def _on_error(request: Request, error: Exception) -> Response:
    report(error)
    return shape_of(request.url.path).response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer what no route did."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    known: Exception = error
    if status == 404:
        known = NotFoundError(f"there is nothing at {request.url.path[:200]}", code="unknown_url")
    elif status == 405:
        known = MethodError(f"{request.method} is not allowed at {request.url.path[:200]}")
    response = shape_of(request.url.path).response(known)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _on_validation(request: Request, error: Exception) -> Response:
    details: Any = error.errors() if isinstance(error, RequestValidationError) else []
    where = ".".join(str(part) for part in details[0]["loc"]) if details else "request"
    told = FieldError(where, f"{where}: {details[0]['msg'] if details else 'not valid'}")
    return shape_of(request.url.path).response(told)
