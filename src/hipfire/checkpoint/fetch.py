"""Fetching one file over HTTP or from a file: address: resumed, checked while it streams, all or nothing.

`download` leaves a verified file at the path that it is given; giving it its final name is the caller's
business (install.py). This file does not know registries or models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests

from hipfire.base.errors import TransportError
from hipfire.checkpoint.fetch_faults import Origin, RetryableError, connection_fault, status_fault
from hipfire.checkpoint.partial import CHUNK, Partial, Target, require_space, write_error
from hipfire.checkpoint.progress import TransferProgress

# small, since the bytes of an unfinished chunk are lost when a connection drops
NET_CHUNK = 64 << 10
CONNECT_SECONDS, READ_SECONDS = 15.0, 60.0
LONGEST_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How stubborn a download is: attempts in a row without a single new byte, and the waits between them."""

    attempts: int = 5
    first_wait: float = 0.5
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Transfer:
    """What all downloads of one command share."""

    progress: TransferProgress
    session: requests.Session
    policy: Policy = Policy()


@dataclass(frozen=True, slots=True)
class Access:
    """How a source is asked: which `origin` it is, the bearer `token` to send, and certificates to trust.

    `ca_file` is a file or a folder; None leaves the choice to `requests` (REQUESTS_CA_BUNDLE, else its own).
    """

    origin: Origin = "hub"
    token: str | None = None
    ca_file: str | None = None


@dataclass
class _Run:
    """The state of one download over all its connections."""

    url: str
    partial: Partial
    transfer: Transfer
    access: Access
    high_water: int = 0
    restarts: set[str] = field(default_factory=set)

    def restart(self, reason: str, detail: str = "") -> None:
        """Begin at zero, once per reason, so that no fault can loop."""
        self.partial.discard()
        if reason in self.restarts:
            raise TransportError(f"{_place(self.url)}: {reason}{detail}, also after starting over")
        self.restarts.add(reason)
        self.transfer.progress.note(f"starting over: {reason}{detail}")

    def advance(self, chunk: bytes, total: int | None) -> None:
        """Append bytes; what the user sees never falls, also when a server makes us begin again."""
        self.partial.write(chunk)
        self.high_water = max(self.high_water, self.partial.size)
        self.transfer.progress.update(self.high_water, total)


def download(
    url: str,
    destination: Path,
    *,
    target: Target,
    transfer: Transfer,
    label: str = "",
    access: Access = Access(),
) -> str:
    """Fetch `url` into `destination` and return its SHA-256.

    A `destination` left by an interrupted call is continued if it belongs to the same target. The session's
    proxies and certificates apply (HTTPS_PROXY, NO_PROXY, REQUESTS_CA_BUNDLE) where `access` does not replace
    them. Raises TransportError with the reason; the bytes so far then stay for the next call, except for
    those that turned out to be wrong.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    transfer.progress.start(label or destination.name, target.size)
    try:
        with Partial(destination, target, url, note=transfer.progress.note) as partial:
            require_space(destination.parent, max(0, (target.size or 0) - partial.size))
            run = _Run(url, partial, transfer, access, high_water=partial.size)
            fetch_once = _copy_local if urlsplit(url).scheme == "file" else _stream
            _until_complete(run, fetch_once)
            partial.seal()
            return partial.digest
    except OSError as error:
        raise write_error(error, destination.parent) from error
    finally:
        transfer.progress.finish()


def _until_complete(run: _Run, fetch_once: Callable[[_Run], None]) -> None:
    policy, failures = run.transfer.policy, 0
    while True:
        before = run.high_water
        try:
            if not run.partial.complete:
                fetch_once(run)
            wanted = run.partial.target.sha256
            if wanted is None or run.partial.digest == wanted:
                return
            run.restart("sha256 differs", f" (got {run.partial.digest}, expected {wanted})")
        except RetryableError as fault:
            failures = 0 if run.high_water > before else failures + 1
            if failures >= policy.attempts:
                raise TransportError(
                    f"{_place(run.url)}: gave up after {failures} attempts: {fault.reason}",
                    hint="run it again later; it continues where it was",
                ) from fault
            wait = fault.wait if fault.wait is not None else policy.first_wait * 2 ** max(0, failures - 1)
            run.transfer.progress.note(f"{fault.reason}; trying again at {run.partial.size / 2**20:.1f} MiB")
            policy.sleep(min(wait, LONGEST_WAIT))


def _copy_local(run: _Run) -> None:
    path = Path(url2pathname(urlsplit(run.url).path))
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            _check_total(run, total)
            run.partial.identify(None)
            file.seek(run.partial.size)
            while chunk := file.read(CHUNK):
                run.advance(chunk, total)
    except FileNotFoundError as error:
        raise TransportError(f"{path}: no such file") from error


def _stream(run: _Run) -> None:
    partial = run.partial
    headers = {"Accept-Encoding": "identity"}
    if run.access.token:
        headers["Authorization"] = f"Bearer {run.access.token}"
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
        if partial.etag and not partial.etag.startswith("W/"):
            headers["If-Range"] = partial.etag
    try:
        response = run.transfer.session.get(
            run.url,
            headers=headers,
            stream=True,
            timeout=(CONNECT_SECONDS, READ_SECONDS),
            verify=run.access.ca_file,
        )
    except OSError as error:
        raise connection_fault(error, run.url) from error
    with response:
        if response.status_code == 416 and partial.size:
            run.restart("the server cannot continue this file")
            return _stream(run)
        if response.status_code not in (200, 206):
            raise status_fault(response, run.access.origin, has_token=run.access.token is not None)
        try:
            return _receive(run, response)
        except requests.RequestException as error:
            raise connection_fault(error, run.url) from error


def _receive(run: _Run, response: requests.Response) -> None:
    partial = run.partial
    if response.headers.get("Content-Type", "").lower().startswith("text/html"):
        raise TransportError(
            f"{_place(run.url)}: a web page came instead of the file",
            hint="a company filter or a sign-in page may stand between; open the address in a browser",
        )
    length = _integer(response.headers.get("Content-Length"))
    if response.status_code == 206:
        start, total = _content_range(response.headers.get("Content-Range", ""))
        if start != partial.size:
            run.restart("the server continued at another place")
            return _stream(run)
    else:
        total = length
        if partial.size:
            # the whole file comes again: this server does not continue, or the file changed
            partial.discard()
    _check_total(run, total)
    partial.identify(response.headers.get("ETag"))
    expected = total if partial.target.size is None else partial.target.size
    for chunk in response.iter_content(NET_CHUNK):
        if expected is not None and partial.size + len(chunk) > expected:
            partial.discard()
            raise TransportError(
                f"{_place(run.url)}: the server sent more than the {expected} bytes of the file"
            )
        run.advance(chunk, expected)
    if expected is not None and partial.size < expected:
        raise RetryableError(f"the connection ended {expected - partial.size} bytes too early")
    return None


def _check_total(run: _Run, total: int | None) -> None:
    wanted = run.partial.target.size
    if wanted is not None and total is not None and total != wanted:
        raise TransportError(
            f"{_place(run.url)}: the server offers {total} bytes, the registry says {wanted}",
            hint="the file may have been replaced; check for a newer hipfire",
        )
    if wanted is None and total is not None:
        require_space(run.partial.path.parent, max(0, total - run.partial.size))


def _content_range(text: str) -> tuple[int | None, int | None]:
    """Return (first byte, size of the whole file) of a `bytes 5-9/10` header."""
    span, _, total = text.removeprefix("bytes").strip().partition("/")
    return _integer(span.partition("-")[0]), _integer(total)


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdecimal() else None


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname or ''}{parts.path}"
