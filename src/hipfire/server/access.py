"""Who may use the server: names it answers to, web origins, and the bearer token.

A server on this machine can be reached by every web page that this machine's browser shows. So a request
that a page of another origin sends is refused, and so is one that comes by a name which is not this
server's (a page can point its own name at this machine). This file knows no routes but the few open ones.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hipfire.base.errors import ValidationError
from hipfire.server.errors import ForbiddenError, UnauthorizedError
from hipfire.server.options import ServeOptions, is_loopback
from hipfire.server.sse import ErrorShape

MIN_TOKEN_CHARS: Final = 16
# pages of programs on this machine, which no web page can pretend to be
_PROGRAMS: Final = frozenset({"app", "tauri", "vscode-file", "vscode-webview"})
_METHODS: Final = "GET, HEAD, POST, OPTIONS"
_HEADERS: Final = "Content-Type, Authorization, X-Api-Key, Anthropic-Version, Anthropic-Beta"


def read_token(options: ServeOptions) -> str | None:
    """Return the bearer token, None if the server asks for none.

    Raises ValidationError if the file holds no usable token, or if an address that others can reach is to be
    bound without one.
    """
    if options.token_file is None:
        if not options.loopback and not options.allow_open_bind:
            raise ValidationError(
                f"{options.host} can be reached from other machines, and there is no token",
                hint="set serve.token_file to a file with a secret, or bind to 127.0.0.1",
            )
        return None
    return _token_in(options.token_file)


def _token_in(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"the token file {path} cannot be read: {error}") from error
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or any(char.isspace() for char in token):
        raise ValidationError(
            f"the token file {path} holds no token of at least {MIN_TOKEN_CHARS} characters on one line",
            hint=f"make one with `openssl rand -hex 32 > {path}`",
        )
    return token


class Access:
    """ASGI middleware that lets requests pass or refuses them, and adds the headers that browsers ask for.

    `open_path` tells which paths GET needs no token for.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        options: ServeOptions,
        token: str | None,
        shape_of: Callable[[str], ErrorShape],
        open_path: Callable[[str], bool],
    ) -> None:
        self._app = app
        self._options = options
        self._token = token
        self._shape_of = shape_of
        self._open_path = open_path
        # a token keeps out what comes by a foreign name; an open bind has been asked for
        self._check_host = token is None and options.loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is not None and self._allows(origin, headers.get("host", ""))
        fault = self._fault(scope, headers, foreign=origin is not None and not allowed)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                made = MutableHeaders(scope=message)
                made.setdefault("X-Content-Type-Options", "nosniff")
                made.add_vary_header("Origin")
                if allowed and origin is not None:
                    made["Access-Control-Allow-Origin"] = origin
            await send(message)

        if fault is not None:
            await self._shape_of(scope["path"]).response(fault)(scope, receive, marked)
        elif scope["method"] == "OPTIONS":
            await _options(allowed, headers)(scope, receive, marked)
        elif scope["method"] == "HEAD":
            # as GET; the protocol below sends no body where the client asked for none
            await self._app({**scope, "method": "GET"}, receive, marked)
        else:
            await self._app(scope, receive, marked)

    def _fault(
        self, scope: Scope, headers: Headers, *, foreign: bool
    ) -> ForbiddenError | UnauthorizedError | None:
        if self._check_host and not self._is_ours(headers.get("host", "")):
            return ForbiddenError(
                f"this server does not answer to the name {headers.get('host', '')[:100]!r}",
                hint="use localhost or 127.0.0.1",
            )
        if scope["method"] == "OPTIONS":
            return None
        if foreign and scope["method"] not in ("GET", "HEAD"):
            return ForbiddenError(
                f"pages of {headers.get('origin', '')[:100]!r} may not use this server",
                hint="add the origin to serve.allow_origins",
            )
        if self._token is None or (scope["method"] in ("GET", "HEAD") and self._open_path(scope["path"])):
            return None
        if _shows(headers, self._token):
            return None
        return UnauthorizedError(
            "this server needs a bearer token", hint="send `Authorization: Bearer TOKEN`"
        )

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        return name is not None and (is_loopback(name) or name == self._options.host.lower())

    def _allows(self, origin: str, host: str) -> bool:
        listed = self._options.allow_origins
        if "*" in listed or origin in listed:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme in _PROGRAMS:
            return True
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return False
        return is_loopback(parts.hostname) or parts.netloc.lower() == host.lower()


def _shows(headers: Headers, token: str) -> bool:
    """Return whether the request shows the token; takes as long for a wrong one as for the right one."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    # some clients send both, one of them a placeholder
    shown = (value.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    right = [hmac.compare_digest(each.encode("utf-8", "replace"), token.encode("ascii")) for each in shown]
    return any(right)


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _options(allowed: bool, asked: Headers) -> Response:
    headers = {"Allow": _METHODS}
    if allowed:
        headers |= {
            "Access-Control-Allow-Methods": _METHODS,
            # clients send headers of their own (x-stainless-os, ...), and none of them does anything here
            "Access-Control-Allow-Headers": asked.get("access-control-request-headers") or _HEADERS,
            "Access-Control-Max-Age": "600",
        }
    return Response(status_code=204, headers=headers)
