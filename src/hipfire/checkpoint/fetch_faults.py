"""What went wrong with a connection, in words that tell the user what to do.

This file turns HTTP statuses and exceptions of `requests` into typed errors. It does not retry (fetch.py
does).
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import requests

from hipfire.base.errors import HipfireError, TransportError

Origin = Literal["hub", "index"]
BUSY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


class RetryableError(Exception):
    """A fault that may go away: `reason` in words, `wait` in seconds where the server said how long."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


def status_fault(
    response: requests.Response, origin: Origin, *, has_token: bool
) -> RetryableError | HipfireError:
    """Return the fault that a status other than 200 and 206 stands for."""
    status = response.status_code
    place = urlsplit(response.url)
    if status in BUSY_STATUSES:
        after = response.headers.get("Retry-After", "")
        return RetryableError(
            f"{place.hostname} answered {status}", float(after) if after.isdecimal() else None
        )
    hint = status_advice(status, origin, has_token=has_token)
    return TransportError(
        f"{place.hostname}{place.path}: {status} {response.reason or ''}".strip(), hint=hint
    )


def status_advice(status: int, origin: Origin, *, has_token: bool = False) -> str:
    """Return what to do about 401, 403, 404 and 407; other statuses have no advice.

    `origin` is the model hub, which takes a token, or the server of a package index, which takes none.
    """
    if status == 407:
        return "the proxy wants a user and a password; put them into HTTPS_PROXY"
    return _hub_advice(status, has_token) if origin == "hub" else _index_advice(status)


def _index_advice(status: int) -> str:
    if status == 401:
        return "the package server wants a user and a password; put those of its host into ~/.netrc"
    if status == 403:
        return (
            "access is refused; a company filter may stand between, or the account in ~/.netrc lacks rights"
        )
    return "pip found the package but its file is gone; try again later" if status == 404 else ""


def _hub_advice(status: int, has_token: bool) -> str:
    if status == 401:
        if has_token:
            return "the token in HF_TOKEN was refused; renew it, or unset it if the file is public"
        return "this file needs a token; set HF_TOKEN"
    if status == 403:
        if has_token:
            return "the token is valid but not allowed here; accept the model's terms on its page first"
        return "access is refused; a company filter may stand between, or the file needs HF_TOKEN"
    if status == 404:
        if has_token:
            return "no such file, or the token may not see it; check the name and the token's rights"
        return "no such file; check the name, and if the repository is private set HF_TOKEN"
    return ""


def connection_fault(error: OSError, url: str) -> RetryableError | HipfireError:
    """Return the fault that an exception of `requests` (all of them are OSErrors) stands for."""
    host = urlsplit(url).hostname or url
    if isinstance(error, requests.exceptions.SSLError):
        return TransportError(
            f"the certificate of {host} could not be verified: {_cause(error)}",
            hint="if your company inspects TLS, set REQUESTS_CA_BUNDLE to its CA file",
        )
    if isinstance(error, requests.exceptions.ProxyError):
        return TransportError(
            f"the proxy for {host} cannot be used: {_cause(error)}",
            hint="check HTTP_PROXY and HTTPS_PROXY, or add the host to NO_PROXY",
        )
    if isinstance(
        error, (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
    ):
        return RetryableError(f"connection to {host} failed: {_cause(error)}")
    if isinstance(error, requests.RequestException):
        return TransportError(f"{host}: {_cause(error)}")
    # requests raises a plain OSError for a certificate file that is not there
    return TransportError(f"{host}: {error}", hint="check REQUESTS_CA_BUNDLE and PIP_CERT")


def _cause(error: BaseException) -> str:
    """Return the innermost reason of a chain of network errors, in one line."""
    reason: object = error
    while isinstance(reason, BaseException):
        inner = getattr(reason, "reason", None) or (reason.args[-1] if reason.args else None)
        if not isinstance(inner, (BaseException, str)) or inner == reason:
            break
        reason = inner
    return " ".join(str(reason).split())[:200]
