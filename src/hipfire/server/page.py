"""The web page at `/`: its files, with headers that keep anything but them from running.

This file knows no API: the page talks to the same routes as every other client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from hipfire.server.errors import NotFoundError

STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# scripts and styles come from this server's own files only, and nothing is fetched from anywhere else: text
# of a model that slipped past the page's escaping still could not run or tell anyone
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # a newer hipfire's page is taken at once; the files are small and come from near
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """Return the routes of the page's files, which are public: they hold no data and ask for the token."""
    # the names are fixed when the server starts, so that no request can name another file
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in _TYPES}
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    def index() -> Response:
        return _file(files["index.html"])

    @routes.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise NotFoundError(f"there is no file {name!r} of the page")
        return _file(files[name])

    return routes


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=_HEADERS)
